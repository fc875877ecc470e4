"""Frozen parameters that are not exchanged: one copy for all clients, and errors if they change."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from frozen import frozen_once
from lightning_fl import VectorizedClients
from lightning_fl.aggregators import PFNM, FedAvgM, Scaffold
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.policies import Schedule
from lightning_fl.runners import constants
from lightning_fl.runners.constants import Constants, constant_parameters
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from linear import Linear
from mlp import module as matched

HEAD = 3 * 8 + 3


class Tuned(Linear):
    """A head on a frozen backbone; ``change`` is called with the backbone in each local step."""

    def __init__(self, change=None, momentum=0.9):
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        super().__init__(nn.Identity(), sgd)
        self.backbone, self.head = backbone.requires_grad_(False), nn.Linear(8, 3)
        self.change = change
        self.double()

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        if self.change is not None:
            self.change(self.backbone)
        return super().training_step(batch, batch_idx)


def named(module):
    return dict(module.named_parameters())


# --- which parameters -----------------------------------------------------------------------------


def test_large_frozen_parameters_are_constant(monkeypatch):
    module = Tuned()
    frozen = {n for n in named(module) if n.startswith("backbone")}
    assert constant_parameters(module, False) == {}, "they are small"
    monkeypatch.setattr(constants, "LARGE", 0)
    assert constant_parameters(module, True) == {}
    assert set(constant_parameters(module, False)) == frozen
    assert set(constant_parameters(module, False, local=["backbone.0.bias"])) == frozen - {
        "backbone.0.bias"
    }
    module.requires_grad_(True).head.requires_grad_(False)
    assert constant_parameters(module, False) == {}, "less is frozen than trained"


CHANGES = {
    "in place": lambda p: p.data.mul_(1.01),
    "one entry": lambda p: p.data[-1:].add_(0.01),
    "moved": lambda p: setattr(p, "data", p.data + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 5).half(), torch.randn(5, 3).T, torch.randn(9)[1:]],
    ids=["half", "transposed", "offset"],
)
def test_every_change_of_a_constant_is_noticed(tensor, change):
    parameter = nn.Parameter(tensor.clone(memory_format=torch.preserve_format), requires_grad=False)
    held = Constants("Net", {"w": nn.Parameter(torch.ones(2), False), "other": parameter})
    held.check()
    held.note()
    held.check()
    change(parameter)
    with pytest.raises(FederationError, match=r"Net\.other .* but it was changed.* in a buffer"):
        held.check()


# --- the same result ------------------------------------------------------------------------------


@pytest.fixture
def tuned(fit, data):
    """Fit a module; returns it and the loop."""

    def run(exchange_frozen, module=None, wrap=lambda m: m, rounds=3, callbacks=(), **options):
        module = Tuned() if module is None else module
        samples = data(local_test_size=options.pop("local_test_size", 0))
        loop = FederatedLoop(**{"policy": Schedule(num_steps=3), "seed": 1} | options)
        with frozen_once(not exchange_frozen):
            fit(wrap(module), loop, samples, rounds=rounds, callbacks=callbacks)
        return module, loop

    return run


def assert_equal(one, other):
    for name, parameter in named(one).items():
        torch.testing.assert_close(named(other)[name], parameter, rtol=0, atol=1e-12)


RULES = {
    "FedAvg": dict,
    "FedAvgM": lambda: {"aggregator": FedAvgM(lr=0.5)},
    "SCAFFOLD": lambda: {"aggregator": Scaffold(), "policy": Schedule(lr=0.1, num_steps=3)},
    "TopK": lambda: {"update_transforms": [TopK(0.5)], "clients_per_round": 2},
    "kept optimizer": lambda: {"optimizer_state": "keep"},
}


@pytest.mark.parametrize("rule", RULES)
def test_the_result_is_that_of_an_exchange_of_all(tuned, wrap, rule):
    momentum, options = 0.0 if rule == "SCAFFOLD" else 0.9, RULES[rule]
    every, with_all = tuned(True, Tuned(momentum=momentum), wrap, **options())
    held, loop = tuned(False, Tuned(momentum=momentum), wrap, **options())
    assert_equal(held, every)
    assert (held.head.weight - Tuned().head.weight).abs().max() > 0.05, "nothing was trained"
    assert loop.fit.federation.layout.num_parameters == HEAD
    assert with_all.fit.federation.layout.num_parameters > 2 * HEAD
    # SCAFFOLD would send control variates of frozen parameters, too.
    others = {"dropped_clients"} | ({"bytes_up", "bytes_down"} if rule == "SCAFFOLD" else set())
    for row, wanted in zip(loop.rows, with_all.rows, strict=True):
        wanted = {name: value for name, value in wanted.items() if name not in others}
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
def test_a_compiled_step_uses_the_shared_tensors(tuned):
    plain, _ = tuned(False)
    stacked, loop = tuned(False, wrap=lambda m: VectorizedClients(m, 3, compile=True))
    assert loop.runner.graphs is not None
    assert_equal(stacked, plain)


def test_one_tensor_serves_all_clients_and_the_server(tuned):
    seen = set()
    module = Tuned(change=lambda net: seen.add(net[0].weight.data_ptr()))
    _, loop = tuned(False, module)
    assert seen == {module.backbone[0].weight.data_ptr()}
    assert list(loop.runner.named_parameters) == ["head.weight", "head.bias"]


def test_evaluation_of_personal_models_shares_them(tuned, wrap):
    def metric(module, batch):
        return (module(batch[0]).argmax(1) == batch[1]).float()

    scores = []
    for exchange_frozen in (True, False):
        module, personal = Tuned(), PersonalizedEvaluation(metric=metric, steps=2)
        module.federated_local_parameters = ["head.bias"]
        tuned(exchange_frozen, module, wrap, 2, [personal], local_test_size=0.3)
        scores.append(personal.rows)
    assert scores[0]
    assert scores[0] == scores[1]


# --- what is refused ------------------------------------------------------------------------------


def drift(net):
    net[0].weight.data.mul_(0.99)


class Late:
    """Changes the backbone in one local step."""

    def __init__(self, step):
        self.left = step

    def __call__(self, net):
        self.left -= 1
        if not self.left:
            drift(net)


@pytest.mark.parametrize("step", [2, 11, 15])
def test_a_module_that_writes_to_them_is_refused(tuned, step):
    with pytest.raises(FederationError, match=r"backbone\.0\.weight .* but it was changed") as info:
        tuned(False, Tuned(change=Late(step)))
    places = {2: "1, client", 11: "1, during aggregation", 15: "2, client"}
    assert any(f"In round {places[step]}" in note for note in info.value.__notes__)


@pytest.mark.filterwarnings("ignore:Tuned trains one client after another")
def test_clients_that_write_to_them_are_refused(tuned, wrap):
    with pytest.raises(FederationError, match=r"backbone\.0\.weight .* but it was changed"):
        tuned(False, Tuned(change=drift), wrap)


class Thaws(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        module.backbone[0].bias.requires_grad_(trainer.current_epoch > 0)


def test_unfreezing_them_is_refused(tuned):
    with pytest.raises(FederationError, match=r"backbone\.0\.bias .* but it was unfrozen"):
        tuned(False, callbacks=[Thaws()])
    assert tuned(True, callbacks=[Thaws()])[1].round == 3


def test_a_callback_that_unfreezes_layers_exchanges_them(tuned):
    module = Tuned()
    module.optimizer = lambda _: torch.optim.SGD(module.head.parameters(), lr=0.1)
    tuned(False, module, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
    assert not torch.equal(module.backbone[0].weight, Tuned().backbone[0].weight)


def test_matching_needs_the_updates_of_all_parameters(tuned):
    made = matched()
    made.net[0].requires_grad_(False)
    with pytest.raises(FederationError, match=r"PFNM .* needs updates of all"):
        tuned(False, made, aggregator=PFNM(), rounds=1)
