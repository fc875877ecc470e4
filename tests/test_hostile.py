"""Checkpoints, manifests and traces from strangers: data, never code; refused in clear words."""

import os
import pickle
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fl import files
from lightning_fl.aggregators import PFNM, ClusteredFL, FedAdam
from lightning_fl.callbacks import (
    AtomicCheckpointIO,
    ClientFaults,
    FederatedLoop,
    RoundCheckpoint,
)
from lightning_fl.callbacks.faults import read_trace
from lightning_fl.cli import main
from lightning_fl.lanes import Lanes
from lightning_fl.partition import IID
from lightning_fl.partition.manifest import Manifest
from lightning_fl.policies import DiscreteGaussianReinforce, PersonalizedPolicyGradient
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import hostile

sys.path.pop(0)


class Payload:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture
def federation(trainer, data, linear, tmp_path):
    """Run or resume a federation; a run writes its checkpoints to one folder."""

    def run(
        rounds=1,
        ckpt_path=None,
        loop=None,
        more=(),
        command="fit",
        folder=tmp_path,
        make=linear,
        **options,
    ):
        callbacks = [*more, RoundCheckpoint(str(folder / "run"))]
        runner = trainer(loop, rounds=rounds, callbacks=callbacks, enable_checkpointing=True)
        model = make(features=6)
        getattr(runner, command)(model, datamodule=data(), ckpt_path=ckpt_path, **options)

    return run


@pytest.fixture
def refuses(federation, home):
    """Change the checkpoint of a run; resumed, it has to be refused and to leave all as it was."""

    def check(change, words, loop=FederatedLoop, more=tuple, **make):
        path, source = home / "hostile.ckpt", home / "plain.ckpt"
        if (loop, more) != (FederatedLoop, tuple) or not source.exists():
            federation(1, loop=loop(buffers="average"), more=more(), folder=home, **make)
            if (loop, more) == (FederatedLoop, tuple):
                shutil.copy(home / "run" / "last.ckpt", source)
            else:
                source = home / "run" / "last.ckpt"
        tree = torch.load(source, weights_only=True)
        torch.save(change(tree) or tree, path)
        before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
        with pytest.raises(FederationError, match=words) as error:
            federation(2, path, loop=loop(buffers="average"), more=more(), folder=home, **make)
        assert str(path) in str(error.value) or "the checkpoint" in str(error.value)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 1000
        assert {p: p.read_bytes() for p in home.rglob("*") if p.is_file()} == before

    return check


# --- no code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["fit", "validate"])
@pytest.mark.parametrize("where", ["top", "state", "weights"])
def test_a_checkpoint_cannot_run_code(federation, tmp_path, monkeypatch, command, where):
    federation()
    tree = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    state, weights = tree["callbacks"]["FederatedLoop"], tree["state_dict"]
    spot = {"top": tree, "state": state, "weights": weights}[where]
    spot["net.weight" if where == "weights" else "x"] = Payload(tmp_path / "ran")
    torch.save(tree, tmp_path / "hostile.ckpt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # many set it for other projects
    with pytest.raises(
        FederationError, match=r"holds more than data: .*nsupported GLOBAL posix.mkdir"
    ):
        federation(2, tmp_path / "hostile.ckpt", command=command)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "hostile.ckpt", weights_only=False)  # it would have
    assert (tmp_path / "ran").exists()


def test_a_user_who_trusts_a_checkpoint_can_say_so(federation, tmp_path):
    federation()
    tree = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    torch.save({**tree, "own": Payload(tmp_path / "ran")}, tmp_path / "mine.ckpt")
    federation(2, tmp_path / "mine.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_neither_can_one_from_the_web(monkeypatch):
    """Lightning's default for these is weights_only=False."""
    given = []
    monkeypatch.setattr(
        TorchCheckpointIO, "load_checkpoint", lambda self, *args: given.append(args[2]) or {}
    )
    with pytest.raises(FederationError, match="no checkpoint of Lightning"):
        AtomicCheckpointIO().load_checkpoint("http://localhost/last.ckpt")
    assert given == [True]


def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["lightning-fl", *args])
    main()


def test_a_checkpoint_does_not_choose_classes(tmp_path, monkeypatch):
    """Lightning's command line makes the model that hyper-parameters of a checkpoint name."""
    config = ["--config", "digits.yaml", f"--trainer.default_root_dir={tmp_path}"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    command(monkeypatch, "fit", *config, "--trainer.max_epochs=1", *quiet)
    path = tmp_path / "version_0" / "last.ckpt"
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = torch.load(path, weights_only=True)
    torch.save({**tree, "hyper_parameters": {"_class_path": "evil.Model"}}, path)
    command(monkeypatch, "test", *config, *quiet)
    assert not (tmp_path / "ran").exists()


def test_the_command_line_says_it_in_a_line(tmp_path, monkeypatch, capsys):
    torch.save({"pytorch-lightning_version": "2.6", "x": Payload(tmp_path / "ran")}, tmp_path / "a")
    with pytest.raises(SystemExit) as exit:
        command(monkeypatch, "test", "--config", "digits.yaml", f"--ckpt_path={tmp_path / 'a'}")
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-fl: error: {tmp_path / 'a'} is damaged, or not a")
    assert error.count("\n") == 1
    assert not (tmp_path / "ran").exists()


# --- files that Lightning would remove ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["best", "last", "kth_best", None])
@pytest.mark.parametrize("path", ["{}/run/../precious.ckpt", "{}/run/config.yaml", "s3://x/y.ckpt"])
def test_a_checkpoint_cannot_have_files_removed(refuses, home, kind, path):
    def change(tree):
        name = next(key for key in tree["callbacks"] if key.startswith("RoundCheckpoint"))
        state, there = tree["callbacks"][name], path.format(home)
        if kind:
            state[f"{kind}_model_path"] = there
        else:
            state["best_k_models"] = {there: torch.tensor(1.0)}

    refuses(change, "is not where a checkpoint of this run may be")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_best_of_before_are_removed_as_ever(federation, tmp_path):
    def best():
        return [ModelCheckpoint(str(tmp_path / "best"), "{epoch}", "val_loss", save_top_k=1)]

    federation(1, more=best())
    federation(3, str(tmp_path / "run" / "last.ckpt"), more=best())
    assert len(list((tmp_path / "best").iterdir())) == 1


# --- archives -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "times"), [(zipfile.ZIP_DEFLATED, 1), (zipfile.ZIP_STORED, 9)])
def test_an_archive_that_unpacks_to_more_is_refused(federation, tmp_path, method, times):
    federation()
    bomb = tmp_path / "bomb.ckpt"
    with (
        zipfile.ZipFile(tmp_path / "run" / "last.ckpt") as old,
        zipfile.ZipFile(bomb, "w", method) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.filelist *= times  # the same bytes in many places
    with pytest.raises(FederationError, match="it is compressed, which"):
        federation(2, bomb)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}q\x00.", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive_is_refused(federation, tmp_path, content):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(FederationError, match=r"a.ckpt is damaged, or not a checkpoint"):
        federation(1, tmp_path / "a.ckpt")
    with pytest.raises(FederationError, match=r"cannot be read \(No such file"):
        federation(1, tmp_path / "absent.ckpt")


# --- what is in them ------------------------------------------------------------------------------


def laughs():
    """30 lists of ten times the next: 10^30 parts, in a file of a kilobyte."""
    tree = [0]
    for _ in range(30):
        tree = [tree] * 10
    return tree


def endless():
    tree = []
    tree.append(tree)
    return tree


def deep():
    tree = []
    for _ in range(100):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [t], "no checkpoint of Lightning"),
        (lambda t: t.pop("pytorch-lightning_version") and None, "no checkpoint of Lightning"),
        (lambda t: t.update({"pytorch-lightning_version": "x"}), "Invalid version"),
        (lambda t: t.update({"pytorch-lightning_version": "1.5"}), "Lightning 1.5: bring it up to"),
        (lambda t: t.update({"pytorch-lightning_version": 2}), "version' must be a str, got 2"),
        (lambda t: t.pop("state_dict") and None, "'state_dict' is missing"),
        (lambda t: t.update(state_dict=[1]), "'state_dict' must be a dictionary"),
        (lambda t: t["state_dict"].update({None: 2}), "each name in 'state_dict' must be of type"),
        (lambda t: t["state_dict"].update({1: 2}), "each name in 'state_dict' must be of type str"),
        (lambda t: t.pop("callbacks") and None, "was not written by a federation"),
        (lambda t: t.update(callbacks=[]), "'callbacks' must be a dictionary"),
        (lambda t: t.update(callbacks={"FederatedLoop": 3}), "must be a dict, got 3"),
        (lambda t: t.update(loops={"fit_loop": 1}), "must be a dict, got 1"),
        (lambda t: t["loops"]["fit_loop"].update(epoch_progress=[]), "must be a dict"),
        (
            lambda t: t["loops"]["fit_loop"]["epoch_progress"]["total"].update(started=7),
            "1 rounds are .* epochs of Lightning",
        ),
        (
            lambda t: t["loops"]["fit_loop"]["epoch_progress"]["current"].update(completed=-1),
            "1 rounds are -1 epochs of Lightning",
        ),
        (
            lambda t: t["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"].update(
                ready=3
            ),
            "in the middle of a batch",
        ),
        (lambda t: t.update(epoch=-1), "'epoch' must be a whole number from 0"),
        (lambda t: t.update(global_step=10**30), "'global_step' must be a whole number"),
        (
            lambda t: t.update(optimizer_states=[]),
            "has 0 entries, here there are 1",
        ),
        (lambda t: t.pop("optimizer_states") and None, "optimizer_states must be a list, got None"),
        (
            lambda t: t["optimizer_states"][0]["param_groups"][0].update(lr="1"),
            "must be a whole number from .* got '1'",
        ),
        (lambda t: t.update(x=laughs()), "hold each other, over and over"),
        (lambda t: t.update(x=endless()), "hold each other, over and over"),
        (lambda t: t.update(x=deep()), "nested more than 64 levels|hold each other"),
        (lambda t: t.update(x=torch.ones(1).expand(10**12)), "larger than the file"),
        (lambda t: t.update(x=torch.ones(2, device="meta")), "not simply its numbers"),
        (lambda t: t.update(x=torch.eye(2).to_sparse()), "not simply its numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_lightnings_part_is_checked(refuses, change, words):
    refuses(change, words)


def test_attributes_cannot_hide_methods(refuses):
    def change(tree):
        tree["state_dict"].get = 3

    refuses(change, "OrderedDict has an attribute 'get'")


def test_pickles_by_hand_are_read_with_the_same_care(federation, tmp_path):
    """torch.save itself could not write so deep a tree."""
    federation()
    path = tmp_path / "deep.ckpt"
    with zipfile.ZipFile(tmp_path / "run" / "last.ckpt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            inside = old.read(name)
            if name.endswith("data.pkl"):
                inside = (
                    inside[:-1] + b"(X\x01\x00\x00\x00x" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"u."
                )
            new.writestr(name, inside)
    with pytest.raises(FederationError, match="nested more than 64 levels deep"):
        federation(2, path)


def kept(name, clients, rows):
    return [{"name": name, "clients": torch.tensor(clients), "rows": rows}]


def state(change):
    return lambda tree: change(tree["callbacks"]["FederatedLoop"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("rows") and None, "'rows' is missing"),
        (lambda s: s.update(round=-1), "'round' must be a whole number from 0"),
        (lambda s: s.update(round=10**30), "'round' must be a whole number"),
        (lambda s: s.update(round=True), "'round' must be a whole number .* got True"),
        (lambda s: s.update(round=2), "'rows' are of the rounds .1., and 'round' is 2"),
        (lambda s: s.update(rows=[]), "'rows' are of the rounds"),
        (lambda s: s.update(rows=[3]), "must be a dictionary, got 3"),
        (lambda s: s["rows"][0].update(lr=[1]), "must be a whole number|must be a float"),
        (lambda s: s["rows"][0].update(dropped_clients="\x1b[2J"), "must be"),
        (lambda s: s.update(val_loss="1"), "'val_loss' must be a float, got '1'"),
        (lambda s: s.update(monitored=[]), "'monitored' must be a dictionary"),
        (lambda s: s.update(base_lr=torch.ones(2)), "'base_lr' must be a float, got a tensor"),
        (lambda s: s.update(base_lr=1e308), "'base_lr' is 1e.308, which is no learning rate"),
        (lambda s: s.update(base_lr=float("nan")), "'base_lr' is nan"),
        (lambda s: s.update(options={"x": laughs()}), "hold each other"),
        (lambda s: s.update(options={"x": {}}), "'options'"),
        (lambda s: s.update(seed=-1), "'seed' must be a whole number from 0"),
        (lambda s: s.update(checksum=3), "'checksum' must be a str, got 3"),
        (lambda s: s.update(store={}), "'store' must be a list"),
        (lambda s: s.update(store=[{"name": "x"}]), "'clients' is missing"),
        (lambda s: s.update(store=kept("x", [0], torch.ones(1))), "client 0 keeps: .x. is not"),
        (lambda s: s.update(store=kept(3, [0], torch.ones(1))), "'name' must be a str, got 3"),
        (lambda s: s.update(store=kept("x", [4], torch.ones(1))), "must be .* from 0 to 3, got 4"),
        (lambda s: s.update(store=kept("x", [-1], torch.ones(1))), "a client of 'store' must be"),
        (lambda s: s.update(store=kept("x", [0, 1], torch.ones(1))), "2 clients have 1 rows"),
        (lambda s: s.update(store=kept("x", [0], torch.ones(()))), "a list of clients and a row"),
        (lambda s: s.update(store=kept("x", [0.5], torch.ones(1))), "a list of clients and a row"),
        (lambda s: s.update(store=kept("x", [[0]], torch.ones(1))), "a list of clients and a row"),
        (lambda s: s.update(store=kept("x", [1, 1], torch.ones(2))), "client 1 has it twice"),
        (
            lambda s: s.update(store=kept("x", [1], torch.ones(1)) + kept("x", [1], torch.ones(1))),
            "client 1 has it twice",
        ),
        (
            lambda s: s.update(store=kept("optimizer.0.momentum", [0], torch.ones(1, 9, 9))),
            r"client 0 keeps: optimizer.0.momentum is float32 \[9, 9\], its parameter is",
        ),
        (lambda s: s.update(store=kept("optimizer.7.x", [0], torch.ones(1))), "is not known here"),
        (lambda s: s.update(server=[torch.ones(3)]), "'server' must be a dictionary"),
        (
            lambda s: s.update(server={"net.weight": torch.ones(3)}),
            "its model is of another network",
        ),
        (
            lambda s: s.update({"unsaved buffers": {"x": torch.ones(3)}}),
            "the module has no non-persistent buffer 'x'",
        ),
        (lambda s: s.update(policy=[]), "'policy' must be a dictionary"),
        (lambda s: s.update(aggregator={"x": 1}), "cannot go on from the checkpoint's state"),
    ],
)
def test_the_loops_state_is_checked(refuses, change, words):
    refuses(state(change), words)


@pytest.mark.parametrize(
    ("make", "room", "change", "words"),
    [
        (
            lambda: {"aggregator": ClusteredFL(warmup=0)},
            "aggregator",
            lambda s: s.update(cluster_of=s["cluster_of"] + 5),
            "the checkpoint has models of 1 clusters, and others",
        ),
        (
            lambda: {"aggregator": ClusteredFL(warmup=0)},
            "aggregator",
            lambda s: s.update(models=3),
            "ClusteredFL cannot go on: models must be a Tensor, got 3",
        ),
        (
            lambda: {"aggregator": ClusteredFL(warmup=0)},
            "aggregator",
            lambda s: s.update(tree=s["tree"].double()),
            "tree is float64",
        ),
        (
            lambda: {"aggregator": FedAdam()},
            "aggregator",
            lambda s: s.update(_extra_state={"kind": "Adaptive", "state": {0: {"step": 3}}}),
            "FedAdam cannot go on from the checkpoint: Adaptive has no use",
        ),
        (
            lambda: {"aggregator": FedAdam()},
            "aggregator",
            lambda s: s.update(_extra_state=[]),
            "_extra_state must be a dict, got",
        ),
        (
            lambda: {"policy": DiscreteGaussianReinforce({"lr": [0.1, 0.2]})},
            "policy",
            lambda s: s.update(mean=s["mean"] * torch.nan),
            "and the mean .nan.: no policy learns that",
        ),
        (
            lambda: {"policy": DiscreteGaussianReinforce({"lr": [0.1, 0.2]})},
            "policy",
            lambda s: s.update(rewards=torch.zeros(7).double()),
            "scores of 7 rewards",
        ),
        (
            lambda: {
                "policy": PersonalizedPolicyGradient(
                    [{"lr": 0.1}, {"lr": 0.2}], "reward", monitor="val_loss"
                )
            },
            "policy",
            lambda s: s.update(logits=s["logits"] * torch.nan),
            "has logits that are not finite",
        ),
        (
            lambda: {"transforms": [TopK(0.5)]},
            "store",
            lambda s: s[0].update(rows=torch.ones(4, 5).double()),
            "what client 0 keeps: TopK.* cannot use it",
        ),
    ],
)
def test_the_state_of_rules_is_checked(refuses, make, room, change, words):
    refuses(
        state(lambda s: change(s[room])),
        words,
        loop=lambda **options: FederatedLoop(**make(), **options),
    )


def test_optimisers_that_clients_keep_are_tried(refuses, foreign):
    def change(tree):
        store = tree["callbacks"]["FederatedLoop"]["store"]
        store.remove(next(each for each in store if each["name"] == "optimizer.0.exp_avg"))

    def keeping(**options):
        return FederatedLoop(optimizer_state="keep", **options)

    refuses(change, "what client 0 keeps: Adam cannot use it", loop=keeping, make=foreign)


def test_schedulers_keep_their_modes(refuses, foreign):
    def make(**options):
        module = foreign(**options)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, "min")
        scheduler = {"scheduler": plateau, "monitor": "val_loss"}
        module.configure_optimizers = lambda: {"optimizer": sgd, "lr_scheduler": scheduler}
        return module

    def change(tree):
        tree["lr_schedulers"][0]["mode"] = "no"

    refuses(change, "'mode'. is 'no', here it is 'min'", lambda **o: FederatedLoop(**o), make=make)


def test_a_round_begins_without_a_state_of_the_optimiser(federation, foreign, tmp_path):
    federation(1, make=foreign)
    last = tmp_path / "run" / "last.ckpt"
    tree = torch.load(last, weights_only=True)
    tree["optimizer_states"][0]["state"] = {0: torch.ones(3)}
    torch.save(tree, last)
    federation(2, last, make=foreign)


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: Lanes(module, lanes=2)])
def test_optimisers_that_fit_go_on(federation, foreign, tmp_path, wrap):
    def make(**options):
        module = foreign(**options)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        module.configure_optimizers = lambda: sgd
        return wrap(module)

    for rounds, path in ((1, None), (2, tmp_path / "run" / "last.ckpt")):
        loop = FederatedLoop(optimizer_state="keep", buffers="local")
        federation(rounds, path, loop=loop, make=make)
    assert loop.round == 2


def test_a_policy_misses_its_loss_before_the_round_and_not_after_it(refuses):
    refuses(
        state(lambda s: s.update(val_loss=None)),
        "DiscreteGaussianReinforce needs 'val_loss', which is null",
        loop=lambda **options: FederatedLoop(
            policy=DiscreteGaussianReinforce({"lr": [0.1, 0.2]}), **options
        ),
    )


@pytest.mark.parametrize(
    ("callback", "change", "words"),
    [
        (ClientFaults, lambda s: s.pop("happened") and None, "'happened' is missing|'happened'"),
        (ClientFaults, lambda s: s.update(happened=[(1, 2)]), "must be a round, a client and one"),
        (ClientFaults, lambda s: s.update(happened=[(1, 2, "x")]), "must be a round, a client"),
        (ClientFaults, lambda s: s.update(virtual_time="1"), "'virtual_time' must be a float"),
        (EarlyStopping, lambda s: s.pop("wait_count") and None, "wait_count"),
        (EarlyStopping, lambda s: s.update(best_score=torch.ones(2)), "'best_score' must be a"),
        (EarlyStopping, lambda s: s.update(stopping_reason=99), "'stopping_reason' must be"),
    ],
)
def test_the_state_of_callbacks_is_checked(refuses, callback, change, words):
    def more():
        return [EarlyStopping("val_loss") if callback is EarlyStopping else callback()]

    def find(tree):
        key = next(k for k in tree["callbacks"] if k.startswith(callback.__name__))
        change(tree["callbacks"][key])

    refuses(find, words, more=more)


def test_matched_networks_are_checked(linear):
    rule = PFNM(gamma=1.0, sigma2=1.0, sigma02=1.0)
    module = linear(features=6)
    module.net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    module.forward = module.net.forward
    rule.prepare(module, (torch.randn(2, 6),))
    rule.start(torch.zeros(33))
    good = {name: tensor.clone() for name, tensor in rule.state_dict().items()}
    good |= {"merged": torch.ones(41), "shapes": torch.tensor([[5, 6], [1, 5]])}
    good |= {"places": torch.tensor([[[3, 0, 4, 1, 2]], [[0, 3, 2, 1, 0]]])}
    places = [
        [[[3, 0, 4, 1, 5]]],  # an atom that is not there
        [[[3, 0, 4, 1, -2]]],
        [[[3, 0, 4, 0, 2]]],  # two neurons of one atom
        [[[3, 0, 4, 1, -1]]],  # a neuron without one
        [[[64, 0, 4, 1, 2]]],  # a client that is not known
        [[[-1, 0, 4, 1, 2]]],
        [[[3, 0, 4, 1, 2]], [[3, 0, 4, 1, 2]]],
        [[[3, 0, 4, 1, 2], [3, 0, 4, 1, 2]]],  # a layer too many
    ]
    for bad in (
        *({"places": torch.tensor(each)} for each in places),
        {"merged": torch.ones(7), "shapes": torch.tensor([[4, 6], [1, 4]])},
        {"starts": torch.ones(3, 3)},
        {"known": torch.ones(3).bool()},
    ):
        with pytest.raises(FederationError, match="they do not fit"):
            rule.load_state_dict({**good, **bad})
        rule.load_state_dict(good)


# --- manifests and traces -------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    path, labels = tmp_path / "split.json", torch.arange(6) % 2
    Manifest.of(IID(), [torch.arange(3), torch.arange(3, 6)], labels, seed=0).write(path)
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"seed": 0', '"seed": 0, "seed": 0', "the name 'seed' is there twice"),
        ('"seed": 0', '"seed": ' + "9" * 5000, "Exceeds the limit"),
        ('"0": 2', '"00": 2', "'class_counts' must map"),
        ('"0": 2', '" 0": 2', "'class_counts' must map"),
        ('"0": 2', '"\u0660": 2', "'class_counts' must map"),
        ('{"0": 2, "1": 1}', '{"0": -2, "1": 5}', "'class_counts' must map"),
        ('{"0": 2, "1": 1}', '{"0": 2, "1": true}', "'class_counts' must map"),
        ("{", "\ufeff{", "Unexpected UTF-8 BOM"),
        ("3,", "3, \x00", "is not JSON"),
    ],
)
def test_tricks_in_a_manifest_are_refused(written, old, new, words):
    text = written.read_text()
    assert old in text
    written.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(FederationError, match=words):
        Manifest.read(written)


def test_large_files_are_not_read(written, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", written.stat().st_size)
    Manifest.read(written)
    written.write_text(written.read_text() + " ")
    for read in (Manifest.read, read_trace):
        for path in (written, "/dev/zero"):
            with pytest.raises(FederationError, match=r"more than the \d+ bytes that .*MOST_BYTES"):
                read(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,\u0663,nan", r"line 2 .* must be a round"),
        ("1" * 10**6 + ",1,nan", "field limit|line 2"),
        ("1,1" + "," * 10**6, "line 2"),
        ("1,1,nan\x00", "line 2"),
        ('1,1,"nan', "unexpected end of data"),
        ("1,1,\x1b[2J", "line 2"),
        ("-1,1,nan", "line 2"),
        ("1.0,1,nan", "line 2"),
    ],
)
def test_tricks_in_a_trace_are_refused(tmp_path, line, words):
    (tmp_path / "trace.csv").write_text("round,client,fault\n" + line, encoding="utf-8")
    with pytest.raises(FederationError, match=words) as error:
        read_trace(tmp_path / "trace.csv")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_a_trace_from_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes("\ufeffround,client,fault\r\n1,2,nan\r\n".encode())
    assert read_trace(path) == {(1, 2): "nan"}


# --- anything -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where targets write."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("targets"))
    yield hostile._folder()
    tempfile.tempdir = before
    hostile._folder.cache_clear()


reproducible = {"derandomize": True, "database": None, "deadline": None}


@settings(max_examples=150, **reproducible)
@given(st.binary(max_size=64))
@pytest.mark.parametrize("target", ["manifest", "trace"])
@pytest.mark.usefixtures("place")
def test_no_text_is_more_than_refused(target, data):
    hostile.TARGETS[target](data)


@settings(max_examples=40, **reproducible)
@given(st.binary(min_size=8, max_size=96))
@pytest.mark.usefixtures("place")
def test_no_checkpoint_is_more_than_refused(data):
    hostile.checkpoint(data)


def test_the_file_of_a_pickle_is_no_checkpoint(tmp_path, federation):
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(FederationError, match="not a zip file"):
        federation(1, tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()
