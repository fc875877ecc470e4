"""The tensors of several clients, stacked, at the start and at the end of their training."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.runners import VectorizedClients, client_runner
from lightning_fl.runners.vectorized_runner import VectorizedRunner
from lightning_fl.types import ServerState

LR = [0.1, 0.2, 0.05]


class Mixed(LightningModule):
    """Parameters and buffers of several shapes and kinds, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.randn(2, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def stacked():
    module = VectorizedClients(Mixed())
    runner = client_runner(module, "average", [module.configure_optimizers()], False)
    assert type(runner) is VectorizedRunner
    return runner


def starts(runner, k=3, own=False):
    server = runner.read()
    moved = torch.arange(float(k), dtype=torch.float64)[:, None] if own else torch.zeros(k, 1)
    vector = server.vector + moved if own else server.vector.expand(k, -1)
    return ServerState(vector, server.counters)


def gradients(runner, seed, k=3):
    """Gradients of each client, ``[k, ...]``."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(k, *p.shape, generator=random, dtype=p.dtype)
        for name, p in runner.named_parameters.items()
        if p.requires_grad
    }


def step(runner, grads):
    """A step of every client."""
    active = torch.ones(runner.count, dtype=torch.bool)
    for name, grad in grads.items():
        runner.stacks.params[name].grad = grad.clone()
    before = runner.before_step(active)
    runner.optimizer.step()
    runner.after_step(before, active)


@pytest.mark.parametrize("own", [False, True])
def test_stacks_hold_what_clients_start_from(stacked, own):
    vars(stacked.module)["federated_global_parameters"] = {}
    state = starts(stacked, own=own)
    stacked.load(state, [{}] * 3, LR)
    assert stacked.count == 3
    assert stacked.stacks.params["weight"].shape == (3, 2, 3)
    assert torch.equal(stacked.collect(state)[0], torch.zeros(3, state.vector.shape[1]).double())
    for row in range(3):
        first = stacked.stacks.params["weight"][row].detach().flatten()
        assert torch.equal(first, state.vector[row, :6])
    assert stacked.stacks.fixed_is_shared != own
    before = {name: value.clone() for name, value in stacked.stacks.fixed.items()}
    step(stacked, gradients(stacked, 0))
    assert all(torch.equal(stacked.stacks.fixed[name], value) for name, value in before.items())
    wanted = stacked.module.weight if not own else state.vector[:, :6].view(3, 2, 3)
    assert torch.equal(before["weight"], wanted)


def test_moves_of_earlier_clients_are_not_written_over(stacked):
    state = starts(stacked)
    found = []
    for seed in range(2):
        stacked.load(state, [{}] * 3, [0.1] * 3)
        step(stacked, gradients(stacked, seed))
        moves = stacked.collect(state)[0]
        found.append((moves, moves.clone()))
    (first, was), (second, is_now) = found
    assert not torch.equal(was, is_now)
    assert torch.equal(first, was)
    assert torch.equal(second, is_now)
