"""Checkpoints, manifests and traces from strangers: data, never code; refused in clear words.

What a checkpoint holds is tested on plain trees: ``tests/federation/test_resume.py``.
"""

import os
import pickle
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_fl import files
from lightning_fl.aggregators import PFNM
from lightning_fl.callbacks import AtomicCheckpointIO, ClientFaults, FederatedLoop, RoundCheckpoint
from lightning_fl.callbacks.faults import FAULTS, read_trace
from lightning_fl.cli import main
from lightning_fl.federation.resume import STATE
from lightning_fl.partition import IID
from lightning_fl.partition.manifest import Manifest
from lightning_fl.policies import DiscreteGaussianReinforce
from lightning_fl.runners import VectorizedClients
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError


class Payload:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def federation(trainer, data, linear, tmp_path):
    """Run or resume a federation; a run writes its checkpoints to one folder."""

    def run(rounds=1, ckpt_path=None, loop=None, command="fit", make=linear, **options):
        runner = trainer(
            loop,
            rounds=rounds,
            callbacks=[RoundCheckpoint(str(tmp_path / "run")), ClientFaults()],
            enable_checkpointing=True,
        )
        model = make(features=6)
        getattr(runner, command)(model, datamodule=data(), ckpt_path=ckpt_path, **options)

    return run


# --- no code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["top", "state", "weights"])
def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch, where):
    tree = {"pytorch-lightning_version": "2.6", "state_dict": {}, "callbacks": {"Loop": {}}}
    spot = {"top": tree, "state": tree["callbacks"]["Loop"], "weights": tree["state_dict"]}[where]
    spot["x"] = Payload(tmp_path / "ran")
    torch.save(tree, tmp_path / "hostile.ckpt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # many set it for other projects
    with pytest.raises(
        FederationError, match=r"holds more than data: .*nsupported GLOBAL posix.mkdir"
    ):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "hostile.ckpt")
    assert not (tmp_path / "ran").exists()
    # A user who trusts a checkpoint can say so.
    AtomicCheckpointIO().load_checkpoint(tmp_path / "hostile.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_neither_can_one_from_the_web(monkeypatch):
    """Lightning's default for these is weights_only=False."""
    given = []
    monkeypatch.setattr(
        TorchCheckpointIO, "load_checkpoint", lambda self, *args: given.append(args[2]) or {}
    )
    with pytest.raises(FederationError, match="not a checkpoint of Lightning"):
        AtomicCheckpointIO().load_checkpoint("http://localhost/last.ckpt")
    assert given == [True]


def test_the_file_of_a_pickle_is_no_checkpoint(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(FederationError, match="not a zip file"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "ran").exists()


def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["lightning-fl", *args])
    main()


def test_a_checkpoint_does_not_choose_classes(tmp_path, monkeypatch, capsys):
    """Lightning's command line makes the model that hyperparameters of a checkpoint name."""
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = {"pytorch-lightning_version": "2.6", "state_dict": {}}
    torch.save({**tree, "hyper_parameters": {"_class_path": "evil.Model"}}, tmp_path / "a.ckpt")
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.logger=false"]
    with pytest.raises(SystemExit):
        command(
            monkeypatch,
            "test",
            "--config=digits.yaml",
            f"--ckpt_path={tmp_path / 'a.ckpt'}",
            *quiet,
        )
    assert "the model does not match the checkpoint" in capsys.readouterr().err
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


# --- fits -----------------------------------------------------------------------------------------


def reinforce():
    policy = DiscreteGaussianReinforce({"lr": [0.1, 0.2]})
    return FederatedLoop(buffers="average", policy=policy, update_transforms=[TopK(0.5)])


def removes_files(tree, state, path):
    """The state of the loop is that of a run that has not begun, which is not compared."""
    key = next(key for key in tree["callbacks"] if key.startswith("RoundCheckpoint"))
    tree["callbacks"][key]["best_k_models"] = {"s3://a/b.ckpt": torch.tensor(1.0)}
    state.clear()
    state["round"] = 0


#: One change for each call of the checks in a fit: what it does to the file, and the message.
CHANGES = [
    (lambda t, s, path: t.update(x=Payload(path)), "holds more than data"),
    (lambda t, s, path: t["state_dict"].update({1: 2}), "is damaged, or not a checkpoint: each"),
    (lambda t, s, path: t["state_dict"].update({"net.weight": 3}), "the model does not match the"),
    (lambda t, s, path: t["state_dict"].pop("net.weight"), "Missing key.s. in state_dict"),
    (lambda t, s, path: t.pop("callbacks"), "was not written by a federation"),
    (
        lambda t, s, path: s.clear() or s.update(round=torch.zeros(2)),
        "was changed|cannot be loaded",
    ),
    (removes_files, "is not where a checkpoint of this run may be"),
    (
        lambda t, s, path: t["callbacks"].update(ClientFaults={"happened": 3}),
        "ClientFaults.'happened",
    ),
    (lambda t, s, path: t["loops"]["fit_loop"].update(epoch_progress=3), "was changed: loops"),
    (lambda t, s, path: s.pop("rows"), "was changed: 'rows' is missing"),
    (
        lambda t, s, path: t["loops"]["fit_loop"]["epoch_progress"]["total"].update(started=7),
        "cannot be loaded: Lightning's epochs are not the 1 rounds",
    ),
    (lambda t, s, path: t.update(optimizer_states=[]), "cannot be resumed: optimizer_states has 0"),
    (lambda t, s, path: s.update(val_loss=None), "needs 'val_loss', which is null"),
    (lambda t, s, path: s["store"][0].update(clients=torch.arange(4) + 1), "from 0 to 3, got 4"),
    (lambda t, s, path: s["store"][0].update(rows=torch.ones(4, 5)), "TopK.* cannot use it"),
    (lambda t, s, path: s["unsaved buffers"].update(x=torch.ones(3)), "non-persistent buffer 'x'"),
    (
        lambda t, s, path: s["policy"].update(mean=3),
        "Reinforce cannot resume: mean must be a tensor",
    ),
    (lambda t, s, path: s["policy"].update(x=3), "cannot resume from the checkpoint's state"),
    (lambda t, s, path: s.update(server={"net.weight": torch.ones(3)}), "is of another network"),
    (lambda t, s, path: s.update(trained=[]), "'trained' has 0 entries"),
]


def test_a_fit_refuses_what_does_not_fit_and_leaves_all_files_as_they_were(federation, tmp_path):
    federation(1, loop=reinforce())
    last, path = tmp_path / "run" / "last.ckpt", tmp_path / "hostile.ckpt"
    saved = torch.load(last, weights_only=True)["callbacks"]["FederatedLoop"]
    assert saved.keys() == STATE.keys()
    for change, words in CHANGES:
        tree = torch.load(last, weights_only=True)
        change(tree, tree["callbacks"]["FederatedLoop"], tmp_path / "ran")
        torch.save(tree, path)
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(FederationError, match=words) as error:
            federation(2, path, loop=reinforce())
        assert str(path) in str(error.value)
        assert str(error.value).isprintable()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    federation(2, last, loop=reinforce())


def test_a_test_of_a_model_refuses_it_too(federation, tmp_path):
    torch.save({"pytorch-lightning_version": "2.6", "x": Payload(tmp_path / "ran")}, tmp_path / "a")
    with pytest.raises(FederationError, match="holds more than data"):
        federation(command="validate", ckpt_path=tmp_path / "a")
    weights = {"net.weight": torch.ones(1, 6)}
    tree = {"state_dict": weights, "callbacks": {"FederatedLoop": {"round": 2}}}
    torch.save({"pytorch-lightning_version": "2.6", **tree}, tmp_path / "b")
    with pytest.raises(FederationError, match="was changed: 'seed' is missing"):
        federation(command="validate", ckpt_path=tmp_path / "b")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "wrap", [lambda module: module, lambda module: VectorizedClients(module, group_size=2)]
)
def test_optimizers_that_fit_go_on(federation, foreign, tmp_path, wrap):
    def make(**options):
        module = foreign(**options)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        steps = torch.optim.lr_scheduler.MultiStepLR(sgd, [3, 9])
        module.register_buffer("late", torch.ones(2), persistent=False)
        module.configure_optimizers = lambda: ([sgd], [steps])
        return wrap(module)

    for rounds, path in ((1, None), (2, tmp_path / "run" / "last.ckpt")):
        loop = FederatedLoop(optimizer_state="keep", buffers="local")
        federation(rounds, path, loop=loop, make=make)
    assert loop.round == 2


def test_matched_networks_are_checked(linear):
    rule = PFNM(gamma=1.0, client_variance=1.0, prior_variance=1.0)
    module = linear(features=6)
    module.net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    module.forward = module.net.forward
    rule.prepare(module, lambda: (torch.randn(2, 6),))
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
        with pytest.raises(FederationError, match="the checkpoint is inconsistent"):
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
        ('"seed": 0', '"seed": ' + "9" * 5000, "Exceeds the limit"),
        ('"0": 2', '"x": 2', "invalid literal for int"),
        ("{", "\ufeff{", "Unexpected UTF-8 BOM"),
        ("3,", "3, \x00", "JSONDecodeError"),
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
        ("1,\u0663,nan", r"line 2 .* must contain a round"),
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


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.binary(max_size=40)
    | st.tuples(st.integers(-1, 3), st.integers(-1, 3), st.sampled_from([*FAULTS, "x", "é"])).map(
        lambda line: ",".join(map(str, line)).encode()
    ),
    st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\x00"]),
)
def test_no_trace_is_more_than_refused(tmp_path_factory, content, end):
    path = tmp_path_factory.getbasetemp() / "trace.csv"
    path.write_bytes(b"round,client,fault" + end + b"1,0,nan" + end + content)
    found = {}
    with suppress(FederationError):
        found = read_trace(path)
    for (round, client), fault in found.items():
        assert round >= 1
        assert client >= 0
        assert fault in FAULTS
