"""The tensors of several clients, stacked: each client trains as if it were alone."""

import functools

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.runners import VectorizedClients, client_runner
from lightning_fl.runners.vectorized import VectorizedRunner
from lightning_fl.types import ServerState

LR = [0.1, 0.2, 0.05]


class Mixed(LightningModule):
    """Parameters and buffers of several shapes and kinds, in float64."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.randn(2, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(7))
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


sgd = functools.partial(torch.optim.SGD, lr=0.1)
momentum = functools.partial(sgd, momentum=0.9)
adam = functools.partial(torch.optim.Adam, lr=0.1)


def runners(optimizer=sgd, buffers="average", keep=False):
    """The runner of a module, and the module itself."""
    group_size, plain = VectorizedClients(Mixed(optimizer)), Mixed(optimizer)
    stacked = client_runner(group_size, buffers, group_size.configure_optimizers(), keep)
    assert type(stacked) is VectorizedRunner
    return stacked, client_runner(plain, buffers, plain.configure_optimizers(), keep)


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


def step(runner, grads, active=None, clip=None):
    """A step of every client."""
    active = torch.ones(runner.count, dtype=torch.bool) if active is None else torch.tensor(active)
    for name, grad in grads.items():
        runner.stacks.params[name].grad = grad.clone()
    if clip is not None:
        runner.clip(*clip)
    before = runner.before_step(active)
    runner.optimizer.step()
    runner.after_step(before, active)


def alone(plain, state, lr, rows, grads, row, clip=None):
    """Where a client ends that makes these steps by itself, and what it keeps."""
    plain.load(ServerState(state.vector[row : row + 1], state.counters), [rows], [lr])
    for each in grads:
        for name, grad in each.items():
            plain.named_parameters[name].grad = grad[row].clone()
        params = [p for p in plain.named_parameters.values() if p.grad is not None]
        if clip is not None and clip[1] == "norm":
            nn.utils.clip_grad_norm_(params, clip[0])
        elif clip is not None:
            nn.utils.clip_grad_value_(params, clip[0])
        plain.optimizer.step()
    delta = plain.collect(ServerState(state.vector[row : row + 1], state.counters))[0][0]
    return delta, {name: value.clone() for name, value in plain.rows()[0].items()}


# --- a step of many is a step of each -------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("lr", [[0.1] * 3, [0.3] * 3, LR])
@pytest.mark.parametrize("optimizer", [sgd, momentum, adam])
def test_stacked_clients_step_as_clients_alone(optimizer, lr, own):
    stacked, plain = runners(optimizer)
    state = starts(stacked, own=own)
    stacked.load(state, [{}] * 3, lr)
    grads = [gradients(stacked, seed) for seed in range(3)]
    for each in grads:
        step(stacked, each)
    found = stacked.collect(state)[0]
    for row in range(3):
        expected = alone(plain, state, lr[row], {}, grads, row)[0]
        torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=0)
    assert [group["lr"] for group in stacked.optimizer.param_groups] == [0.1]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("lr", [[0.1] * 3, LR])
def test_a_client_that_is_done_does_not_change(lr, keep):
    stacked, plain = runners(momentum, keep=keep)
    state, work = starts(stacked), [2, 4, 1]
    stacked.load(state, [{}] * 3, lr)
    grads = [gradients(stacked, seed) for seed in range(4)]
    for i, each in enumerate(grads):
        each["bias"][0] *= torch.nan if i >= work[0] else 1
        step(stacked, each, [i < n for n in work])
    found, rows = stacked.collect(state)[0], stacked.rows()
    for row, n in enumerate(work):
        expected, kept = alone(plain, state, lr[row], {}, grads[:n], row)
        torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=0)
        assert rows[row].keys() == kept.keys()
        for name, value in kept.items():
            torch.testing.assert_close(rows[row][name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("clip", [(1.5, "norm"), (1e3, "norm"), (0.4, "value")])
def test_a_client_is_clipped_by_its_own_gradient(clip):
    stacked, plain = runners()
    state = starts(stacked)
    stacked.load(state, [{}] * 3, [0.1] * 3)
    grads = gradients(stacked, 0)
    scale = torch.tensor([0.1, 1.0, 30.0])
    # Values of complex numbers are not clamped: torch itself cannot.
    names = [name for name in grads if name != "wave" or clip[1] == "norm"]
    grads = {name: grads[name] * scale.view(3, *[1] * (grads[name].ndim - 1)) for name in names}
    step(stacked, grads, clip=clip)
    found = stacked.collect(state)[0]
    for row in range(3):
        expected = alone(plain, state, 0.1, {}, [grads], row, clip)[0]
        torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=0)


# --- in and out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_stacks_hold_what_clients_start_from(own):
    stacked, _ = runners()
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


def test_moves_of_earlier_clients_are_not_written_over():
    stacked, _ = runners(sgd)
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
