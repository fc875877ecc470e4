"""Checkpoints without frozen parameters: what they hold, and which modules may load them."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from frozen import frozen_once
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAvgM
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.frozen import digest
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError

# A test loads checkpoints without the callbacks that saved them.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
HEAD = {"net.head.weight", "net.head.bias"}


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


@pytest.fixture(autouse=True)
def frozen_parameters_of_any_size_are_left_out():
    with frozen_once():
        yield


@pytest.fixture
def run(trainer, data, tmp_path):
    """Fit, or test, a module with checkpoints in ``run``; returns it and the Trainer."""

    def run(module=None, rounds=2, command="fit", ckpt_path=None, callbacks=None, **options):
        if module is None:  # the Trainer converts one to another precision after loading
            module = make() if "precision" in options else make().double()
        wrap = options.pop("wrap", lambda m: m)
        loop = FederatedLoop(FedAvgM(), Schedule(num_steps=2), seed=1)
        loop.table_name = None
        saving = [RoundCheckpoint(str(tmp_path / "run"))] if callbacks is None else callbacks
        made = trainer(loop, rounds, callbacks=saving, enable_checkpointing=bool(saving), **options)
        getattr(made, command)(wrap(module), datamodule=data(test=data().val), ckpt_path=ckpt_path)
        return module, made

    return run


def load(path):
    return torch.load(path, weights_only=True)


def assert_same(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_checkpoint_does_not_grow_with_the_backbone(run, tmp_path):
    sizes, path = [], tmp_path / "run" / "last.ckpt"
    for width in (8, 4096):
        run(make(width=width).double())
        sizes.append(path.stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 256, "the numbers in shapes, and padding"
    assert set(load(path)["state_dict"]) == HEAD


def test_checkpoint_after_the_fit_holds_everything(run, tmp_path):
    _, trainer = run()
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    other = make(seed=3).double()
    resumed, _ = run(other, rounds=3, ckpt_path=str(tmp_path / "whole.ckpt"))
    assert_same(run(rounds=3)[0], resumed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"wrap": lambda module: VectorizedClients(module, 3, compile=False)},
        {"precision": "64-true"},
    ],
    ids=["plain", "vectorized", "converted"],
)
def test_killed_run_resumes_bit_for_bit(run, tmp_path, options):
    run(rounds=2, **options)
    path = (tmp_path / "run" / "last.ckpt").rename(tmp_path / "killed.ckpt")
    resumed, _ = run(rounds=4, ckpt_path=str(path), **options)
    expected, _ = run(rounds=4, **options)
    assert_same(expected, resumed)
    words = r"exchanged parameter values is 27, here it is"
    with frozen_once(False), pytest.raises(FederationError, match=words):
        run(rounds=4, ckpt_path=str(path), **options)


@pytest.mark.parametrize("command", ["fit", "test", "validate"])
def test_module_with_another_backbone_is_refused(run, tmp_path, command):
    run()
    path = str(tmp_path / "run" / "last.ckpt")
    words = (
        r"last.ckpt cannot be loaded: .*6 frozen parameters \(net\.backbone\.0\.weight, .*differ"
    )
    with pytest.raises(FederationError, match=words):
        run(make(seed=3).double(), rounds=3, command=command, ckpt_path=path)
    with pytest.raises(FederationError, match="build it with the weights"):
        run(make(width=9).double(), rounds=3, command=command, ckpt_path=path)
    run(rounds=3, command=command, ckpt_path=path)


@pytest.mark.parametrize("kind", ["in validation", "weights"])
def test_checkpoint_in_a_round_or_of_weights_leaves_them_out(run, tmp_path, kind):
    options = {"save_on_train_epoch_end": False}
    if kind == "weights":
        options = {"save_weights_only": True, "every_n_epochs": 2}
    fitted, _ = run(rounds=2, callbacks=[ModelCheckpoint(str(tmp_path / "saved"), **options)])
    (path,) = (tmp_path / "saved").glob("*.ckpt")
    assert set(load(path)["state_dict"]) == HEAD
    tested, _ = run(command="test", ckpt_path=str(path), callbacks=[])
    assert_same(fitted, tested)
    if kind == "in validation":
        server = load(path)["callbacks"]["FederatedLoop"]["server"]
        assert set(server) == HEAD, "it was saved before a round's end"
        resumed, _ = run(rounds=3, ckpt_path=str(path))
        assert_same(run(rounds=3)[0], resumed)


def test_client_module_loads_it_without_a_trainer(run, tmp_path):
    fitted, _ = run()
    path = tmp_path / "run" / "last.ckpt"
    assert_same(fitted, ClientModule.load_from_checkpoint(path, net=Net().double()))
    for strict in (True, False):
        with pytest.raises(FederationError, match="those of ClientModule differ"):
            ClientModule.load_from_checkpoint(path, net=Net(seed=3).double(), strict=strict)


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
def test_digest_is_of_names_types_shapes_and_values(change):
    tensors = {"w": torch.arange(9.0).reshape(3, 3)}
    assert digest(change(tensors)) != digest(tensors)
    strided = torch.empty(3, 6)[:, ::2].copy_(tensors["w"])
    assert digest({"w": strided}) == digest(tensors)
