"""Checkpoints without frozen tensors: what is saved once, what is read, what is refused."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from frozen import frozen_once
from lightning_fl import ClientModule, VectorizedClients, complete_checkpoint
from lightning_fl.aggregators import FedAvgM
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.federation.frozen import REFERENCE, FrozenTensors, complete, digest
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError

# A test loads checkpoints without the callbacks that saved them.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


class Net(nn.Module):
    """A head on a frozen backbone, of which one tensor has two names."""

    def __init__(self, width=8, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 8))
        self.same = self.backbone[0]
        self.backbone.requires_grad_(False)
        torch.manual_seed(1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def make(**options):
    return ClientModule(Net(**options), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.fixture
def run(trainer, data, tmp_path):
    """Fit, or test, a module with checkpoints in ``run``; returns it and the Trainer."""

    def run(module=None, rounds=2, command="fit", ckpt_path=None, callbacks=None, **options):
        module = make().double() if module is None else module
        wrap = options.pop("wrap", lambda m: m)
        trainer_options = options.pop("trainer", {})
        loop = FederatedLoop(
            FedAvgM(),
            Schedule(num_steps=2),
            seed=1,
            **options,
        )
        saving = [RoundCheckpoint(str(tmp_path / "run"))] if callbacks is None else callbacks
        made = trainer(
            loop, rounds, callbacks=saving, enable_checkpointing=bool(saving), **trainer_options
        )
        with frozen_once():
            getattr(made, command)(
                wrap(module), datamodule=data(test=data().val), ckpt_path=ckpt_path
            )
        return module, made

    return run


def frozen_files(folder):
    return sorted(folder.glob("frozen-*.pt"))


def load(path):
    return torch.load(path, weights_only=True)


def assert_same(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


# --- what is saved --------------------------------------------------------------------------------


def test_a_checkpoint_does_not_grow_with_the_backbone(run, tmp_path):
    sizes, small = [], tmp_path / "run" / "last.ckpt"
    for width in (8, 4096):
        run(make(width=width).double())
        sizes.append(small.stat().st_size)
    (one, other) = frozen_files(tmp_path / "run")
    assert abs(sizes[1] - sizes[0]) < 256, "the numbers in shapes, and padding"
    assert sizes[1] < 30_000 < max(one.stat().st_size, other.stat().st_size)
    assert set(load(small)["state_dict"]) == {"net.head.weight", "net.head.bias"}


def test_the_file_is_written_once_and_again_if_it_is_lost(run, tmp_path):
    (tmp_path / "run").mkdir()
    seen = []

    class Looks(L.Callback):
        def on_train_epoch_start(self, *_):
            for path in frozen_files(tmp_path / "run"):
                seen.append(path.stat().st_mtime_ns)
            if len(seen) == 3:
                path.unlink()

    run(rounds=6, callbacks=[RoundCheckpoint(str(tmp_path / "run")), Looks()])
    assert len(seen) == 5
    assert len(set(seen[:3])) == 1
    assert len(set(seen[3:])) == 1
    (path,) = frozen_files(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:-200])  # a later run does not trust the name
    _, trainer = run()
    assert "net.backbone.0.weight" in load(path)
    assert trainer.strategy.checkpoint_io.load_checkpoint(tmp_path / "run" / "last.ckpt")


def test_the_option_saves_everything(run, tmp_path):
    run(checkpoint_frozen=True)
    assert "net.backbone.0.weight" in load(tmp_path / "run" / "last.ckpt")["state_dict"]
    assert not frozen_files(tmp_path / "run")
    with pytest.raises(FederationError, match="checkpoint_frozen must be true or false, got 'no'"):
        run(checkpoint_frozen="no")


def test_tensors_that_were_changed_after_the_fit_are_saved(run, tmp_path):
    module, trainer = run()
    trainer.save_checkpoint(tmp_path / "same.ckpt")
    assert REFERENCE in load(tmp_path / "same.ckpt")
    module.net.backbone[2].weight.data[0, 0] += 1
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    saved = load(tmp_path / "other.ckpt")["state_dict"]
    assert torch.equal(saved["net.backbone.2.weight"], module.net.backbone[2].weight)


def test_a_tensor_elsewhere_in_memory_is_saved(tmp_path):
    """As in the copy of a module that a callback averages."""
    weight = Net().backbone[0].weight
    state = {"a": weight.detach(), "b": weight.detach().clone()}
    left = FrozenTensors({"backbone.0.weight": weight}).leave_out({"state_dict": state}, tmp_path)
    assert list(left["state_dict"]) == ["b"]
    assert left[REFERENCE]["state_dict"] == {"a": "backbone.0.weight"}


# --- what is loaded -------------------------------------------------------------------------------


def vectorized(module):
    return VectorizedClients(module, 3, compile=False)


@pytest.mark.parametrize(
    ("source", "wrap"),
    [("module", vectorized), ("file", vectorized), ("file", lambda m: m), ("whole", lambda m: m)],
    ids=["module", "vectorized", "file", "whole"],
)
def test_a_killed_run_resumes_bit_for_bit(run, tmp_path, source, wrap):
    run(rounds=2, wrap=wrap, checkpoint_frozen=source == "whole")
    path = (tmp_path / "run" / "last.ckpt").rename(tmp_path / "run" / "killed.ckpt")
    if source == "module":
        frozen_files(tmp_path / "run")[0].unlink()
    module = make(seed=3 if source == "file" else 0).double()
    resumed, _ = run(module, rounds=4, ckpt_path=str(path), wrap=wrap)
    path.unlink()
    expected, _ = run(rounds=4, wrap=wrap)
    assert_same(expected, resumed)


@pytest.mark.parametrize("command", ["fit", "test", "validate"])
def test_without_them_the_error_names_the_file_and_the_remedy(run, tmp_path, command):
    fitted, _ = run()
    path = str(tmp_path / "run" / "last.ckpt")
    other = make(seed=3).double()
    run(other, command="test", ckpt_path=path, callbacks=[])
    assert_same(fitted, other)
    file = frozen_files(tmp_path / "run")[0]
    file.unlink()
    with pytest.raises(FederationError, match=r"4 frozen tensors \(net\.backbone") as info:
        run(make(seed=3).double(), rounds=3, command=command, ckpt_path=path)
    for words in (str(file), "copy this file", "build the module", "checkpoint_frozen=True"):
        assert words in str(info.value)
    run(rounds=3, command=command, ckpt_path=path)  # of the same weights


def test_checkpoints_in_a_round_and_of_weights_only_are_completed(run, tmp_path, data):
    in_validation = ModelCheckpoint(str(tmp_path / "val"), save_on_train_epoch_end=False)
    options = {"save_weights_only": True, "train_time_interval": None, "every_n_epochs": 2}
    weights = ModelCheckpoint(str(tmp_path / "weights"), **options)
    fitted, _ = run(rounds=2, callbacks=[in_validation, weights])
    for folder in ("val", "weights"):
        (path,) = (tmp_path / folder).glob("*.ckpt")
        assert "net.backbone.0.weight" not in str(load(path)["state_dict"])
        other = make(seed=3).double()
        run(other, command="test", ckpt_path=str(path), callbacks=[])
        assert_same(fitted, other)
    path = next((tmp_path / "val").glob("*.ckpt"))
    assert load(path)["callbacks"]["FederatedLoop"]["server"], "it was saved before a round's end"
    resumed, _ = run(make(seed=3).double(), rounds=3, ckpt_path=str(path))
    expected, _ = run(rounds=3)
    assert_same(expected, resumed)


def test_a_module_that_the_trainer_converts_later_has_them(run, tmp_path):
    options = {"trainer": {"precision": "64-true"}}
    run(make(), **options)
    frozen_files(tmp_path / "run")[0].unlink()
    resumed, _ = run(make(), rounds=3, ckpt_path=str(tmp_path / "run" / "last.ckpt"), **options)
    expected, _ = run(make(), rounds=3, **options)
    assert_same(expected, resumed)


def test_outside_of_a_trainer(run, tmp_path):
    fitted, _ = run()
    path, whole = tmp_path / "run" / "last.ckpt", tmp_path / "whole.ckpt"
    load_from = ClientModule.load_from_checkpoint
    assert_same(fitted, load_from(path, net=Net().double()))
    for strict in (True, False):
        with pytest.raises(FederationError, match="complete_checkpoint"):
            load_from(path, net=Net(seed=3).double(), strict=strict)
    complete_checkpoint(path, whole)
    assert_same(fitted, load_from(whole, net=Net(seed=3).double()))
    resumed, _ = run(make(seed=3).double(), rounds=3, ckpt_path=str(whole))
    assert_same(run(rounds=3)[0], resumed)


# --- what is refused ------------------------------------------------------------------------------


def change(path, *keys, value):
    """Change an entry of a file of torch."""
    tree = load(path)
    part = tree
    for key in keys[:-1]:
        part = part[key]
    if value is None:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    torch.save(tree, path)


NAME = "net.backbone.0.weight"
REFERENCES = [
    ((REFERENCE,), 3, "must be of type dict"),
    ((REFERENCE, "digest"), "../../etc/passwd", "is no digest"),
    ((REFERENCE, "digest"), 64 * "a", "does not exist"),
    ((REFERENCE, "tensors"), None, "'tensors' is missing"),
    ((REFERENCE, "tensors", NAME, "shape"), [2**50], "must be an integer"),
    ((REFERENCE, "tensors", NAME, "shape"), [8, 7], "has another shape"),
    ((REFERENCE, "tensors", NAME, "dtype"), "Tensor", "has another shape or data type"),
    ((REFERENCE, "tensors", NAME, "dtype"), "qint8", "its reference to frozen tensors is damaged"),
    ((REFERENCE, "tensors", "net.other"), {"dtype": "float64", "shape": [1]}, "no tensor 'net.oth"),
    ((REFERENCE, "state_dict", NAME), "net.other", "do not include 'net.other'"),
    ((REFERENCE, "state_dict", NAME), None, "does not match the checkpoint"),
    ((REFERENCE, "servers", "Other"), {"a": NAME}, "are of 'Other'"),
]


@pytest.mark.parametrize(("keys", "value", "words"), REFERENCES)
def test_a_changed_reference_is_refused(run, tmp_path, keys, value, words):
    run(rounds=1)
    path = tmp_path / "run" / "last.ckpt"
    change(path, *keys, value=value)
    with pytest.raises(FederationError, match=words):
        run(make(seed=3).double(), command="test", ckpt_path=str(path))


def test_parts_of_a_checkpoint_that_are_one_object_are_refused(run, tmp_path):
    fitted, _ = run(rounds=1)
    names = {NAME: NAME}
    one = {REFERENCE: {**load(tmp_path / "run" / "last.ckpt")[REFERENCE]}, "state_dict": names}
    one[REFERENCE] |= {"state_dict": names, "servers": {"Other": names}}
    for callbacks in ({}, [1], {"Other": [1]}):
        with pytest.raises(FederationError, match="are of 'Other'"):
            complete({**one, "callbacks": callbacks}, None, fitted)
    with pytest.raises(FederationError, match="are of 'state_dict'"):
        complete({REFERENCE: one[REFERENCE]}, None, fitted)
    complete({**one, "callbacks": {"Other": {"server": names}}}, None, fitted)
    assert torch.equal(names[NAME], fitted.state_dict()[NAME])


def test_a_changed_file_is_refused(run, tmp_path):
    run(rounds=1)
    (file,), path = frozen_files(tmp_path / "run"), tmp_path / "run" / "last.ckpt"
    good, tensors = file.read_bytes(), load(file)
    other = copy.deepcopy(tensors)
    other[NAME][0, 0] += 1
    sparse = {**tensors, NAME: tensors[NAME].to_sparse()}
    changes = [
        (lambda: torch.save(other, file), "its digest is not that in the name"),
        (lambda: torch.save(sparse, file), "sparse"),
        (lambda: torch.save([1], file), "must be of type dict"),
        (lambda: file.write_bytes(good[:-300]), "damaged, or not a file of frozen tensors"),
        (lambda: file.write_bytes(bytes(9)), "damaged, or not a file of frozen tensors"),
    ]
    for write, words in changes:
        write()
        with pytest.raises(FederationError, match=words):
            run(make(seed=3).double(), command="test", ckpt_path=str(path))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"v": t["w"]},
        lambda t: {"w": t["w"].T},
        lambda t: {"w": t["w"].reshape(-1)},
        lambda t: {"w": t["w"].view(torch.int32)},
        lambda t: {"w": t["w"] + torch.tensor([1e-6, 0, 0])},
    ],
)
def test_the_digest_is_of_names_types_shapes_and_values(change):
    tensors = {"w": torch.arange(9.0).reshape(3, 3)}
    assert digest(change(tensors)) != digest(tensors)
    strided = torch.empty(3, 6)[:, ::2].copy_(tensors["w"])
    assert digest({"w": strided}) == digest(tensors)
