"""HeteroFL: narrow networks written plainly, traffic, and what is refused."""

import math

import pytest
import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.aggregators import HeteroFL
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.objectives import Ditto
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from linear import WithoutForward
from rounds import aggregate, sent
from two_classes import samples
from written import Written
from written_plainly import Lost, Noted, close

RATES = [0.8, 0.5, 0.25, 0.1]
#: Each activation maps 0 to 0; weight decay and momentum leave zeros.
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def linear(first=7, second=5):
    """Inputs, two hidden layers with normalization by the batch, two classes."""
    return nn.Sequential(
        nn.Linear(4, first),
        nn.BatchNorm1d(first, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(first, second, bias=False),
        nn.GELU(),
        nn.Linear(second, 2),
    )


def conv(first=6, second=5):
    """Convolution, normalization per channel, flattened maps of nine pixels, two classes."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, first, 2, padding=1),
        nn.GroupNorm(first, first),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(9 * first, second),
        nn.PReLU(second),
        nn.Linear(second, 2),
    )


def cuts(net, a, b):
    """Return the index of the entries of each parameter with units ``a`` and ``b``."""
    every = slice(None)
    if net is linear:
        return [(a, every), a, a, a, (b[:, None], a), (every, b), every]
    pixels = (9 * a[:, None] + torch.arange(9)).flatten()
    return [a, a, a, a, (b[:, None], pixels), b, b, (every, b), every]


def module(net, *widths, terms=()):
    torch.manual_seed(0)
    return ClientModule(net(*widths), terms, lambda p: torch.optim.SGD(p, **SGD)).double()


def units(width, rate, first):
    return (first + torch.arange(math.ceil(rate * width))) % width


def train(fit, made, rule, rounds=1, **options):
    """Train a module; return the loop."""
    loop = FederatedLoop(rule, **{"seed": 1, **options})
    fit(made, loop, data(), rounds=rounds)
    return loop


def data():
    return samples(5, partition=Dirichlet(2.0, min_size=6), drop_last=True)


def plainly(loop, net, rates, lost, rolling):
    """Train networks of their own width on the noted batches; average entry by entry."""
    whole = [p.detach().clone() for p in module(net).parameters()]
    widths = (7, 5) if net is linear else (6, 5)
    models = []
    for round, batches in enumerate(loop.batches):
        total, count = [0 * p for p in whole], [0 * p for p in whole]
        for client, steps in batches.items():
            rate, first = rates[client % len(rates)], round if rolling else 0
            a, b = (units(width, rate, first) for width in widths)
            narrow, index = net(len(a), len(b)).double(), cuts(net, a, b)
            start = [p[i] for p, i in zip(whole, index, strict=True)]
            for p, value in zip(narrow.parameters(), start, strict=True):
                p.data = value.clone()
            optimizer = torch.optim.SGD(narrow.parameters(), **SGD)
            for x, y in steps:
                optimizer.zero_grad()
                nn.functional.cross_entropy(narrow(x), y).backward()
                optimizer.step()
            if client not in lost:
                ends = zip(total, count, index, start, narrow.parameters(), strict=True)
                for t, n, i, before, after in ends:
                    t[i] += after.detach() - before
                    n[i] += 1
        moved = zip(whole, total, count, strict=True)
        whole = [p + torch.where(n > 0, t / n.clamp(min=1), 0) for p, t, n in moved]
        models.append(torch.cat([p.flatten() for p in whole]))
    return models


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("net", [linear, conv])
@pytest.mark.parametrize("window", ["first", "rolling"])
@pytest.mark.parametrize("lost", [(), (1,)])
def test_rounds_are_those_of_narrow_networks(fit, net, window, lost):
    loop = Noted(HeteroFL(RATES, window=window), Schedule(num_steps=3), seed=1, clients_per_round=3)
    fit(module(net), loop, data(), rounds=5, callbacks=[Lost(*lost)])
    models = plainly(loop, net, RATES, lost, window == "rolling")
    close(loop.models, models)


def test_rates_go_around_or_are_drawn_by_the_seed(fit):
    def levels(seed=1, **options):
        rule = HeteroFL([1, 0.5], **options)
        train(fit, module(linear), rule, seed=seed)
        return rule.levels.tolist()

    assert levels() == [1, 0, 1, 0, 1]
    drawn = [levels(seed, drawn=True) for seed in (1, 2, 3, 1)]
    assert drawn[0] == drawn[3]
    assert len(set(map(tuple, drawn))) > 1
    assert all(sorted(each) == [0, 0, 1, 1, 1] for each in drawn)


@pytest.mark.parametrize("window", ["first", "rolling"])
def test_traffic_is_that_of_the_entries_of_a_client(fit, window):
    loop = train(fit, module(conv), HeteroFL(RATES, window=window), rounds=2)
    rates = [*RATES, RATES[0]]
    narrow = [conv(math.ceil(6 * r), math.ceil(5 * r)) for r in rates]
    wanted = 8 * sum(p.numel() for net in narrow for p in net.parameters())
    for row in loop.rows:
        assert (row["bytes_up"], row["bytes_down"]) == (wanted, wanted)


def test_what_is_added_beyond_the_entries_is_not_averaged(fit):
    rule = HeteroFL([0.5])
    train(fit, module(linear), rule)
    ones = torch.ones(2, rule.held.shape[1]).double()
    assert torch.equal(aggregate(rule, 0 * ones[0], sent(ones)), rule.held[0].double())
    assert 0 < int(rule.held.sum()) < rule.held.shape[1]


# --- what is refused ------------------------------------------------------------------------------


def stacked(*middle):
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 2))


def of_three(forward):
    return Written(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2))


def reversed_order():
    return of_three(lambda net, x: net.c(net.a(net.b(x).relu()).relu()))


def skips():
    return of_three(lambda net, x: net.c(net.b(net.a(x).relu()).relu()) + net.a(x)[:, 2:])


def recurrent():
    def run(net, x):
        return net.last(net.lstm(x[:, None])[0][:, 0])

    return Written(run, lstm=nn.LSTM(4, 6), last=nn.Linear(6, 2))


def normalized_inputs():
    return nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), stacked())


def frozen():
    net = stacked()
    net[0].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: stacked(nn.BatchNorm1d(6)), "buffers .*track_running_stats=False"),
        (lambda: stacked(nn.Sigmoid()), "units are 0 without weights"),
        (lambda: stacked(nn.LayerNorm(6)), "act on others through weights only"),
        (lambda: stacked(nn.LayerNorm(6, elementwise_affine=False)), "through weights only"),
        (lambda: stacked(nn.GroupNorm(2, 6)), "normalization per channel"),
        (lambda: stacked(nn.Softmax(1)), "through weights only"),
        (reversed_order, "the order of their definition"),
        (skips, "through weights only"),
        (frozen, "0.bias is frozen or stays with the clients"),
        (normalized_inputs, "0.weight"),
        (recurrent, r"lstm.weight_ih_l0, \[24, 4\]"),
    ],
)
def test_networks_that_are_no_stack_are_refused(fit, make, words):
    with pytest.raises(FederationError, match=words):
        train(fit, ClientModule(make()).double(), HeteroFL([0.5, 0.6]))


def test_normalization_of_groups_that_are_held_as_a_whole_is_no_harm(fit):
    made = ClientModule(stacked(nn.GroupNorm(2, 6))).double()
    train(fit, made, HeteroFL([0.5]))
    with pytest.raises(FederationError, match="through weights only"):
        train(fit, made, HeteroFL([0.5], window="rolling"))


def test_a_module_without_forward_is_refused(fit):
    with pytest.raises(FederationError, match="implement forward in WithoutForward"):
        train(fit, WithoutForward(linear()).double(), HeteroFL([0.5]))


def test_a_second_model_of_the_client_is_refused(fit):
    with pytest.raises(FederationError, match="stays with the clients"):
        train(fit, module(linear, terms=[Ditto(0.1)]), HeteroFL([0.5]))


@pytest.mark.parametrize(
    "options", [{"optimizer_state": "keep"}, {"update_transforms": [TopK(0.5)]}]
)
def test_clients_of_a_rolling_window_keep_nothing(fit, options):
    train(fit, module(linear), HeteroFL([0.5]), **options)
    with pytest.raises(FederationError, match="moves the units of a client"):
        train(fit, module(linear), HeteroFL([0.5], window="rolling"), **options)


@pytest.mark.parametrize("rate", [0.0, 1.5, math.nan])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(FederationError, match=f"each of rates .*, got {rate}"):
        HeteroFL([0.5, rate])
