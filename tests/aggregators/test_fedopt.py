"""Optimizers on the server: by hand, in their limit cases, saved, in a federation."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fl.aggregators import (
    Downpour,
    DPFedAvg,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedNova,
    FedOpt,
    FedYogi,
)
from lightning_fl.optimizers import Adaptive
from lightning_fl.options import describe
from lightning_fl.types import FederationError
from rounds import aggregate, sent


def rounds(rule, count, server=None, seed=0):
    """Some rounds of random updates; what the server has after each."""
    random = torch.Generator().manual_seed(seed)
    server = torch.zeros(3, dtype=torch.float64) if server is None else server
    found = []
    for _ in range(count):
        delta = torch.randn(4, 3, generator=random, dtype=torch.float64)
        update = sent(delta, [1, 2, 3, 4], num_steps=torch.ones(4))
        server = aggregate(rule, server, update)
        found.append(server)
    return found


def means(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    return [
        weights @ torch.randn(4, 3, generator=random, dtype=torch.float64) for _ in range(count)
    ]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


MOMENTUM = partial(torch.optim.SGD, lr=0.5, momentum=0.7)


@pytest.mark.parametrize("make", [partial(FedAvgM, 0.5, 0.7), partial(FedNova, MOMENTUM)])
def test_momentum_by_hand(make):
    """w = sum of velocities; v = beta v + mean."""
    expected, velocity, server = [], torch.zeros(3), torch.zeros(3)
    for mean in means(4):
        velocity = 0.7 * velocity + mean
        server = server + 0.5 * velocity
        expected.append(server)
    close(rounds(make(), 4), expected)


@pytest.mark.parametrize(
    ("make", "rule"), [(FedAdagrad, "adagrad"), (FedAdam, "adam"), (FedYogi, "yogi")]
)
def test_presets_are_their_optimisers_on_the_mean(make, rule):
    x, expected = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)), []
    optimizer = Adaptive([x], rule, lr=0.2, betas=(0.8, 0.95), tau=0.01)
    for mean in means(4):
        x.grad = -mean
        optimizer.step()
        expected.append(x.detach().clone())
    close(rounds(make(lr=0.2, betas=(0.8, 0.95), tau=0.01), 4), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_parameters_that_clients_do_not_train_have_no_weight_decay(momentum):
    """They are averaged; the server's decay and momentum would move a frozen layer."""
    made = partial(torch.optim.SGD, lr=0.5, weight_decay=0.1, momentum=momentum)
    rule, whole = FedOpt(made), FedOpt(made)
    trained, server = torch.tensor([True, False, False]), torch.ones(3, dtype=torch.float64)
    expected = server
    for _ in range(3):
        update = sent(torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64), [5])
        for each, model, mask in ((rule, server, trained), (whole, expected, None)):
            each.start(model, mask)
            each.update(update)
        server, expected = rule.compute(), whole.compute()
    close([server], [torch.tensor([expected[0], 1.0, 7.0], dtype=torch.float64)])


def test_a_frozen_parameter_has_neither_decay_nor_noise(simulate):
    class Freeze(Callback):
        def on_fit_start(self, trainer, pl_module):
            pl_module.net.bias.requires_grad_(False)

    made = partial(torch.optim.SGD, lr=1.0, weight_decay=0.1)
    decayed, _ = simulate(Freeze(), aggregator=DPFedAvg(1.0, optimizer=made), rounds=2)
    plain, _ = simulate(Freeze(), rounds=2)
    assert torch.equal(decayed.net.bias, plain.net.bias)
    assert not torch.equal(decayed.net.weight, plain.net.weight)


def test_a_resumed_run_has_the_options_that_are_given_now():
    before = FedAvgM(lr=0.1)
    rounds(before, 2)
    after = FedAvgM(lr=0.4)
    after.start(torch.zeros(3, dtype=torch.float64))
    after.load_state_dict(before.state_dict())
    assert after._optimizer.param_groups[0]["lr"] == 0.4
    other = FedOpt(partial(torch.optim.Adam, lr=0.1))
    other.start(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(
        FederationError, match="the optimizer SGD, and the current optimizer is Adam"
    ):
        other.load_state_dict(before.state_dict())


def resumed(make, rule, server):
    """A rule that goes on from the state of another one."""
    again = make()
    again.start(server)
    again.load_state_dict(copy.deepcopy(rule.state_dict()))
    return again


def test_a_resumed_run_has_the_rate_and_the_counters_of_its_groups():
    class Counts(torch.optim.SGD):
        """Decays its rate by a counter that it keeps in its group."""

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
                group["lr"] *= 0.5 ** group["steps"]

    make = partial(FedOpt, partial(Counts, lr=1.0, momentum=0.9))
    rule = make()
    server = rounds(rule, 2)[-1]
    again = resumed(make, rule, server)
    close(rounds(again, 2, server, seed=1), rounds(rule, 2, server, seed=1))
    assert again._optimizer.param_groups[0]["steps"] == 4


SCHEDULE = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    "make",
    [
        partial(FedOpt, partial(torch.optim.SGD, lr=0.5), scheduler=SCHEDULE),
        partial(FedAvgM, 0.5, 0.0, scheduler=SCHEDULE),
        partial(FedNova, partial(torch.optim.SGD, lr=0.5), scheduler=SCHEDULE),
    ],
)
def test_a_schedule_changes_the_rate_round_by_round(make):
    rule, server, expected = make(), torch.zeros(3, dtype=torch.float64), []
    for lr, mean in zip((0.5, 0.5, 0.05, 0.05), means(4), strict=True):
        server = server + lr * mean
        expected.append(server)
    found = rounds(rule, 4)
    close(found, expected)
    assert rule.metrics() == {"server_lr": pytest.approx(0.05)}
    assert "StepLR(step_size=2, gamma=0.1" in describe(rule)
    whole = rounds(rule, 2, found[-1], seed=1)
    first = make()
    rounds(first, 4)
    close(rounds(resumed(make, first, found[-1]), 2, found[-1], seed=1), whole)


def test_a_schedule_of_downpour_counts_rounds_and_not_steps():
    rule = Downpour(partial(torch.optim.SGD, lr=0.5), SCHEDULE)
    found = rounds(rule, 3)
    moves = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(found[0], 0.5 * moves.sum(0))
    assert rule.metrics() == {"server_lr": pytest.approx(0.05)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedOpt(partial(torch.optim.SGD, lr=-1.0)), "invalid server optimizer: Invalid"),
        (lambda: FedOpt(torch.optim.LBFGS), "invalid server optimizer: .*closure"),
        (lambda: FedOpt(scheduler=PLATEAU), "invalid server optimizer: .*metrics"),
    ],
)
def test_optimisers_that_cannot_be_used_are_refused_at_once(make, message):
    with pytest.raises(FederationError, match=message):
        make()
