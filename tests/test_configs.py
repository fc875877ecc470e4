"""Configs resume bit-equal, on small data of their kind."""

from pathlib import Path

import pytest
import torch
import yaml

import extras
import quick_cli
from layouts import cifar_layout, mnist_layout
from lightning_fl.callbacks import FederatedLoop

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in ("MNIST", "FashionMNIST"):
        mnist_layout(root, name, train=1300, test=40)
    cifar_layout(root)
    return root


def options(name, root, folder, rounds=3):
    given = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    small = [
        "fit",
        "--config",
        str(CONFIGS / f"{name}.yaml"),
        f"--trainer.default_root_dir={folder}",
        f"--trainer.max_epochs={rounds}",
        "--trainer.check_val_every_n_epoch=1",
        "--checkpoint.every_n_rounds=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--threads=1",
    ]
    if given["data"]["class_path"] == "TopicText":
        small.append("--data.init_args.train_size=600")
    elif given["data"]["class_path"] != "Digits":
        small += [f"--data.init_args.root={root}", "--data.init_args.val_size=20"]
    if given["data"]["class_path"] == "CIFAR10":  # 20 samples
        small += ["--data.init_args.val_size=5", "--data.init_args.num_clients=5"]
    policy = given["federation"]["policy"]
    if given["data"]["init_args"]["num_clients"] > 100:
        small.append("--data.init_args.num_clients=100")
    if "PersonalizedEvaluation" in str(given["trainer"].get("callbacks")):
        few = '[{"class_path":"PersonalizedEvaluation","init_args":{"steps":2,"local_steps":2}}]'
        small.append(f"--trainer.callbacks={few}")
    if policy["class_path"] == "Schedule":
        small += [
            f"--federation.policy.init_args.{o}" for o in ("local_epochs=null", "num_steps=3")
        ]
    if len(policy.get("init_args", {}).get("phases", [])) > 1:
        phases = '[{"train":"local","num_steps":1},{"train":"shared"}]'
        small.append(f"--federation.policy.init_args.phases={phases}")
    if policy["class_path"] == "StagedPolicy":  # into the second stage
        small += [f"--federation.{rule}.init_args.rounds=[1]" for rule in ("policy", "aggregator")]
    if policy["class_path"] == "Stragglers":
        small += ["--federation.policy.init_args.policy.init_args.local_epochs=3"]
    if given["federation"].get("aggregator", {}).get("class_path") == "ClusteredFL":  # does split
        small += [f"--federation.aggregator.init_args.{o}" for o in ("warmup=1", "eps1=9")]
        small += ["--federation.aggregator.init_args.eps2=0"]
    return small


def left(folder):
    """Return what a run has left: its table, and what the next round would start from."""
    (run,) = Path(folder).glob("version_*")
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["FederatedLoop"]
    kept = {k: state[k] for k in ("aggregator", "policy")}
    # Clients are in the order in which they were stored, which depends on the processes.
    kept["store"] = [
        {"name": each["name"], "rows": each["rows"][each["clients"].argsort()]}
        for each in sorted(state["store"], key=lambda each: each["name"])
    ]
    return (run / "rounds.csv").read_text(), checkpoint["state_dict"], kept


def command(args):
    """What ``lightning-fl`` does, in a process that forks.py has made."""
    with quick_cli.no_pictures():
        quick_cli.call(*args)


@pytest.fixture
def run(monkeypatch):
    def run(args):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        command(args)

    return run


class KilledError(Exception):
    """The end of a process, without which no test could go on."""


#: One config for some kinds of state that outlives a round: a privacy ledger, the server's
#: optimizer.
KINDS = ("dp_mnist", "fedopt_mnist")


#: Further kinds: clients' mixture weights, a policy for each client, control variates, networks of
#: other widths than the module's, adapters.
MORE_KINDS = (
    *("fedem_mnist", "personalized_policy_mnist", "scaffold_mnist", "pfnm_digits", "lora_text"),
)


@pytest.mark.parametrize("name", [*KINDS, *extras.marked(MORE_KINDS, pytest.mark.slow)])
def test_a_config_resumes_bit_equal_after_its_end_in_a_round(
    name, root, run, tmp_path, monkeypatch
):
    run(options(name, root, tmp_path / "whole"))
    ended = FederatedLoop.on_train_batch_end

    def killed(self, *args):
        ended(self, *args)
        if self.round == 1:
            raise KilledError

    with monkeypatch.context() as context:
        context.setattr(FederatedLoop, "on_train_batch_end", killed)
        # As after a kill: nothing is tidied up but what dies with a process, as the folder's lock.
        context.setattr(FederatedLoop, "on_exception", lambda loop, *_: loop.undo.close())
        with pytest.raises(KilledError):
            run(options(name, root, tmp_path / "parts"))
    run([*options(name, root, tmp_path / "parts"), "--ckpt_path=last"])
    whole, parts = left(tmp_path / "whole"), left(tmp_path / "parts")
    assert whole[0] == parts[0]
    assert whole[0].count("\n") == 4
    _assert_equal(whole[1:], parts[1:], torch.equal)


def _assert_equal(one, two, same):
    """Compare trees of tensors."""
    if isinstance(one, torch.Tensor):
        assert one.shape == two.shape
        assert same(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            _assert_equal(one[key], two[key], same)
    elif isinstance(one, list | tuple):
        for a, b in zip(one, two, strict=True):
            _assert_equal(a, b, same)
    else:
        assert one == two
