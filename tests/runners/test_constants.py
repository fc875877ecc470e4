"""Frozen parameters that are not exchanged: one copy for all clients, and errors if they change."""

import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from frozen import frozen_once
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import PFNM, FedAvgM, Scaffold
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.policies import Schedule
from lightning_fl.runners import constants
from lightning_fl.runners.constants import Constants, constant_parameters
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from linear import Linear

HEAD = 3 * 8 + 3
WRAPS = {
    "plain": lambda module: module,
    "vectorized": lambda module: VectorizedClients(module, group_size=3, compile=False),
}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


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
    [
        torch.randn(3, 5).half(),
        torch.randn(5, 3).T,
        torch.randn(9)[1:],
    ],
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

    def run(wrap, exchange_frozen, module=None, rounds=3, callbacks=(), **options):
        module = Tuned() if module is None else module
        loop = FederatedLoop(**{"policy": Schedule(num_steps=3), "seed": 1} | options)
        with frozen_once(not exchange_frozen):
            fit(wrap(module), loop, data(), rounds=rounds, callbacks=callbacks)
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


@wraps
@pytest.mark.parametrize("rule", RULES)
def test_the_result_is_that_of_an_exchange_of_all(tuned, wrap, rule):
    momentum, options = 0.0 if rule == "SCAFFOLD" else 0.9, RULES[rule]
    every, with_all = tuned(wrap, True, Tuned(momentum=momentum), **options())
    held, loop = tuned(wrap, False, Tuned(momentum=momentum), **options())
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
    plain, _ = tuned(WRAPS["plain"], False)
    stacked, loop = tuned(lambda m: VectorizedClients(m, 3, compile=True), False)
    assert loop.runner.graphs is not None
    assert_equal(stacked, plain)


def test_one_tensor_serves_all_clients_and_the_server(tuned):
    seen = set()
    module = Tuned(change=lambda net: seen.add(net[0].weight.data_ptr()))
    _, loop = tuned(WRAPS["plain"], False, module)
    assert seen == {module.backbone[0].weight.data_ptr()}
    assert list(loop.runner.named_parameters) == ["head.weight", "head.bias"]


@wraps
def test_evaluation_of_personal_models_shares_them(tuned, wrap, fit, data):
    scores = []
    for exchange_frozen in (True, False):
        module = Tuned()
        module.federated_local_parameters = ["head.bias"]
        loop = FederatedLoop(seed=1)
        personal = PersonalizedEvaluation(
            metric=lambda m, batch: (m(batch[0]).argmax(1) == batch[1]).float(),
            steps=2,
        )
        with frozen_once(not exchange_frozen):
            fit(wrap(module), loop, data(local_test_size=0.3), rounds=2, callbacks=[personal])
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
        tuned(WRAPS["plain"], False, Tuned(change=Late(step)))
    places = {2: "1, client", 11: "1, during aggregation", 15: "2, client"}
    assert any(f"In round {places[step]}" in note for note in info.value.__notes__)


@pytest.mark.filterwarnings("ignore:Tuned trains one client after another")
def test_vectorized_clients_that_write_to_them_are_refused(tuned):
    with pytest.raises(FederationError, match=r"backbone\.0\.weight .* but it was changed"):
        tuned(WRAPS["vectorized"], False, Tuned(change=drift))


class Thaws(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        module.backbone[0].bias.requires_grad_(trainer.current_epoch > 0)


def test_unfreezing_them_is_refused(tuned):
    with pytest.raises(FederationError, match=r"backbone\.0\.bias .* but it was unfrozen"):
        tuned(WRAPS["plain"], False, callbacks=[Thaws()])
    assert tuned(WRAPS["plain"], True, callbacks=[Thaws()])[1].round == 3


def test_a_callback_that_unfreezes_layers_exchanges_them(fit, data):
    class Owner(Tuned):
        def configure_optimizers(self):
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    module, loop = Owner(), FederatedLoop(seed=1)
    thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    with frozen_once():
        fit(module, loop, data(), rounds=3, callbacks=[thaw])
    assert not torch.equal(module.backbone[0].weight, Tuned().backbone[0].weight)


def test_matching_needs_the_updates_of_all_parameters(fit, data):
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    module = ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()
    refused = pytest.raises(FederationError, match=r"PFNM .* needs updates of all")
    with frozen_once(), refused:
        fit(module, FederatedLoop(PFNM(), seed=1), data(), rounds=1)
