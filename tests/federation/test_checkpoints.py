"""Files of checkpoints: damaged and hostile ones, and those of another federation."""

import sys
import zipfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn

from growing import Growing, Resizing
from lightning_fl.aggregators import FedAdam
from lightning_fl.callbacks import AtomicCheckpointIO, ClientFaults, FederatedLoop, RoundCheckpoint
from lightning_fl.cli import main
from lightning_fl.models.weights import load_weights
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import DiscreteGaussianReinforce, PersonalizedPolicyGradient
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from payload import Payload

VERSION = {"pytorch-lightning_version": "2.6"}


def load(path, **options):
    return AtomicCheckpointIO().load_checkpoint(path, **options)


@pytest.fixture
def federation(trainer, data, linear, tmp_path):
    """Run or resume a federation; a run writes its checkpoints to one folder."""

    def run(rounds=1, ckpt_path=None, loop=None, change=lambda module: None, **split):
        callbacks = [RoundCheckpoint(str(tmp_path / "run")), ClientFaults()]
        runner = trainer(loop, rounds, callbacks, enable_checkpointing=True)
        module = linear(features=6)
        change(module)
        runner.fit(module, datamodule=data(**split), ckpt_path=ckpt_path)

    return run


# --- damaged files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "last.ckpt"
    tree = {**VERSION, "state_dict": {"a": torch.ones(999)}, "epoch": 3}
    AtomicCheckpointIO().save_checkpoint(tree, path)
    return path.read_bytes()


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(at=st.floats(0, 0.9999), piece=st.binary(max_size=4), cut=st.sampled_from([0, 1, 4, 10**6]))
def test_damaged_file_is_refused_or_read_as_it_was(content, tmp_path_factory, at, piece, cut):
    at = int(at * len(content))
    path = tmp_path_factory.getbasetemp() / "damaged.ckpt"
    path.write_bytes(content[:at] + piece + content[at + cut :])
    with suppress(FederationError):  # any other error fails
        tree = load(path)  # some bytes of an archive mean nothing
        assert tree["epoch"] == 3
        assert tree["state_dict"]["a"].tolist() == [1] * 999


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}q\x00.", b"PK\x05\x06" + bytes(18)])
def test_file_that_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(FederationError, match=r"a.ckpt is damaged, or not a checkpoint"):
        load(tmp_path / "a.ckpt")
    with pytest.raises(FederationError, match=r"absent.ckpt is damaged.*No such file"):
        load(tmp_path / "absent.ckpt")


@pytest.mark.parametrize("tree", [[1], {"state_dict": {}}], ids=["list", "weights"])
def test_file_of_torch_that_is_no_checkpoint_is_refused(tmp_path, tree):
    torch.save(tree, tmp_path / "a.ckpt")
    with pytest.raises(FederationError, match="not a checkpoint of Lightning"):
        load(tmp_path / "a.ckpt")


# --- hostile files --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["top", "state", "weights"])
def test_hostile_file_runs_no_code(tmp_path, monkeypatch, where):
    tree = {**VERSION, "state_dict": {}, "callbacks": {"Loop": {}}}
    spot = {"top": tree, "state": tree["callbacks"]["Loop"], "weights": tree["state_dict"]}[where]
    spot["x"] = Payload(tmp_path / "ran")
    torch.save(tree, tmp_path / "hostile.ckpt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # many set it for other projects
    words = rf"{tmp_path}/hostile.ckpt holds more than data: .*posix.mkdir"
    with pytest.raises(FederationError, match=words):
        load(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "ran").exists()
    # A user who trusts a checkpoint can say so.
    load(tmp_path / "hostile.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_file_from_the_web_runs_no_code(monkeypatch):
    """Lightning's default for these is weights_only=False."""
    given = []
    monkeypatch.setattr(
        TorchCheckpointIO, "load_checkpoint", lambda self, *args: given.append(args[2]) or {}
    )
    with pytest.raises(FederationError, match="not a checkpoint of Lightning"):
        load("http://localhost/last.ckpt")
    assert given == [True]


def test_weights_of_a_network_run_no_code(tmp_path):
    path = str(tmp_path / "weights.pt")
    torch.save({"x": Payload(tmp_path / "ran")}, path)
    with pytest.raises(FederationError, match=r"weights=.*weights.pt' cannot be loaded"):
        load_weights(nn.Linear(2, 2), path, "head")
    assert not (tmp_path / "ran").exists()


def test_compressed_file_is_not_unpacked(content, tmp_path):
    (tmp_path / "last.ckpt").write_bytes(content)
    with (
        zipfile.ZipFile(tmp_path / "last.ckpt") as old,
        zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(FederationError, match=r"bomb.ckpt is compressed, which"):
        load(tmp_path / "bomb.ckpt")


def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["lightning-fl", *args])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2


def test_file_does_not_choose_the_class_of_the_model(tmp_path, monkeypatch, capsys):
    """Lightning's command line makes the model that hyperparameters of a checkpoint name."""
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = {**VERSION, "state_dict": {}, "hyper_parameters": {"_class_path": "evil.Model"}}
    torch.save(tree, tmp_path / "a.ckpt")
    options = ["--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    options.append(f"--ckpt_path={tmp_path / 'a.ckpt'}")
    command(monkeypatch, "test", "--config=digits.yaml", *options)
    assert "the model does not match the checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_command_line_refuses_a_hostile_file_in_one_line(tmp_path, monkeypatch, capsys):
    torch.save({**VERSION, "x": Payload(tmp_path / "ran")}, tmp_path / "a")
    command(monkeypatch, "test", "--config", "digits.yaml", f"--ckpt_path={tmp_path / 'a'}")
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-fl: error: {tmp_path / 'a'} holds more than data: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "ran").exists()


# --- files that do not fit ------------------------------------------------------------------------


def reinforce():
    policy = DiscreteGaussianReinforce({"lr": [0.1, 0.2]})
    return FederatedLoop(buffers="average", policy=policy, update_transforms=[TopK(0.5)])


def others_files(*paths):
    """Name files in the state of a callback that removes files."""

    def change(tree, state, folder):
        key = next(key for key in tree["callbacks"] if key.startswith("RoundCheckpoint"))
        for path in paths:
            tree["callbacks"][key]["best_k_models"][path] = torch.tensor(1.0)
        state.clear()  # a run that has not begun is not compared
        state["round"] = 0

    return change


#: Changes of a file, and words of the message.
CHANGES = {
    "code": (lambda t, s, path: t.update(x=Payload(path)), "holds more than data"),
    "weight": (lambda t, s, path: t["state_dict"].pop("net.weight"), "Missing key.s. in state_dic"),
    "weights": (lambda t, s, path: t.pop("state_dict"), "'state_dict' is missing"),
    "callbacks": (lambda t, s, path: t.pop("callbacks"), "was not written by a federation"),
    "entry": (lambda t, s, path: s.pop("rows"), "cannot be loaded: 'rows' is missing"),
    "remote": (others_files("s3://a/b.ckpt"), "is not where a checkpoint of this run may be"),
    "outside": (others_files("/runs/../a.ckpt"), "is not where a checkpoint of this run may be"),
    "config": (others_files("/runs/a.yaml"), "is not where a checkpoint of this run may be"),
    "callback": (
        lambda t, s, path: t["callbacks"].update(ClientFaults={"time": 0.5}),
        "cannot be loaded: 'virtual_time' is missing",
    ),
    "optimizer": (lambda t, s, path: t.pop("optimizer_states"), "'optimizer_states' is missing"),
    "name": (lambda t, s, path: s["store"][0].update(name="x"), "client 0 keeps 'x' of shape"),
    "loops": (lambda t, s, path: t["loops"].clear(), "cannot be loaded: 'fit_loop' is missing"),
    "buffer": (
        lambda t, s, path: s["unsaved buffers"].update(x=torch.ones(3)),
        r"non-persistent buffers are missing or differ: \['x'\]",
    ),
    "policy": (
        lambda t, s, path: s["policy"].update(x=3),
        "Reinforce cannot resume from the checkpoint's state: restore its options",
    ),
    "server": (
        lambda t, s, path: s.update(server={**t["state_dict"], "x": torch.ones(3)}),
        "is of another network",
    ),
    "validated": (
        lambda t, s, path: s.update(server={}),  # before the round; the rest is of its end
        "cannot be resumed: it leaves out net.weight, which clients exchange: save the whole state",
    ),
    "flags": (lambda t, s, path: s.update(trained=[]), "cannot be resumed"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_changed_file_is_refused_and_no_file_changes(federation, tmp_path, change, words):
    federation(1, loop=reinforce())
    path = tmp_path / "run" / "last.ckpt"
    tree = torch.load(path, weights_only=True)
    change(tree, tree["callbacks"]["FederatedLoop"], tmp_path / "ran")
    torch.save(tree, path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(FederationError, match=words) as error:
        federation(2, path, loop=reinforce())
    assert str(path) in str(error.value)
    assert str(error.value).isprintable()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("is_frozen", [False, True])
def test_file_that_leaves_out_what_clients_train_is_refused(federation, tmp_path, is_frozen):
    """Lightning loads it into a module that is not strict."""

    def change(module):
        module.net = nn.Linear(6, 1).double()
        module.net.bias.requires_grad_(not is_frozen)
        module.strict_loading = False

    federation(1, change=change)
    path = tmp_path / "run" / "last.ckpt"
    tree = torch.load(path, weights_only=True)
    del tree["state_dict"]["net.bias"]
    torch.save(tree, path)
    if is_frozen:  # as a module does that does not save its backbone
        federation(2, path, change=change)
        return
    with pytest.raises(FederationError, match=r"resumed: it leaves out net\.bias, which clients"):
        federation(2, path, change=change)


def test_buffer_of_a_policy_that_grows_is_refused_unless_the_policy_resizes_it(
    federation, tmp_path
):
    with pytest.raises(FederationError, match="the buffer losses of Growing has another shape"):
        federation(2, loop=FederatedLoop(policy=Growing()))
    federation(1, loop=FederatedLoop(policy=Resizing()))
    resumed = Resizing()
    federation(2, tmp_path / "run" / "last.ckpt", loop=FederatedLoop(policy=resumed))
    assert len(resumed.losses) == 2


def test_file_of_another_federation_is_refused_by_name(federation, tmp_path):
    federation(1)
    path = tmp_path / "run" / "last.ckpt"

    def wider(module):
        module.net = nn.Linear(6, 2).double()

    def queue(module):
        module.register_buffer("queue", torch.zeros(2), persistent=False)

    others = [
        ({"num_clients": 5}, "its num_clients is 4, here it is 5. To resume, restore"),
        ({"partition": QuantitySkew()}, "its split of the data over clients"),
        ({"change": wider}, "the model does not match the checkpoint: .*size mismatch"),
        ({"change": queue}, r"non-persistent buffers are missing or differ: \['queue'\]"),
        ({"loop": FederatedLoop(FedAdam())}, "aggregator_class is FedAvg, here it is FedAdam"),
        ({"loop": FederatedLoop(seed=3)}, "its seed is 0, here it is 3. To resume, restore it"),
        ({"loop": FederatedLoop(optimizer_state="keep")}, "its optimizer_state is reset, here"),
        ({"loop": FederatedLoop(policy=Growing())}, "policy_class is Schedule.* Growing"),
        ({"loop": FederatedLoop(buffers="local")}, "its buffers is average, here it is local"),
    ]
    for options, words in others:
        with pytest.raises(FederationError, match=f"{path} cannot be .*{words}"):
            federation(2, path, **options)


# --- states of rules ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (DiscreteGaussianReinforce({"lr": [0.1, 0.2]}), "mean"),
        (PersonalizedPolicyGradient([{"lr": 0.1}, {"lr": 0.2}], "reward"), "logits"),
    ],
)
def test_inconsistent_state_of_a_policy_is_refused(policy, name):
    state = policy.state_dict()
    policy.load_state_dict(state)
    with pytest.raises(FederationError, match=f"{name} of the policy"):
        policy.load_state_dict({**state, name: torch.full((2,), torch.nan)})
