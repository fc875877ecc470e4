"""FedDyn: the algorithm written plainly, its traffic, frozen parameters, and a refusal."""

import pytest
import torch

from lightning_fl.aggregators import FedDyn
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from rounds import of
from two_classes import samples
from written_plainly import LR, Noted, close, loss_and_gradient, module, vector


def plainly(loop, data, alpha, weighting, decay=0.0, momentum=0.0):
    """Algorithm 1 of the paper, on the batches of a run."""
    n = [len(part) for part in data.parts]
    mean = sum(n) / len(n)
    alphas = [alpha if weighting == "uniform" else alpha * mean / size for size in n]
    x = vector(module())
    h, g = torch.zeros_like(x), {k: torch.zeros_like(x) for k in range(len(n))}
    models = []
    for batches in loop.batches:
        moves = {}
        for k, steps in batches.items():
            y, velocity = x.clone(), torch.zeros_like(x)
            for batch in steps:
                gradient = loss_and_gradient(y, *batch)[1] + alphas[k] * (y - x) - g[k]
                velocity = momentum * velocity + gradient + decay * y
                y = y - LR * velocity
            g[k] = g[k] - alphas[k] * (y - x)
            moves[k] = y - x
        h = h - alpha / len(n) * sum(moves.values())
        x = x + sum(moves.values()) / len(moves) - h / alpha
        models.append(x)
    return models, h, g


@pytest.mark.parametrize(
    ("alpha", "weighting", "options"),
    [(0.1, "uniform", {}), (0.5, "samples", {"weight_decay": 0.1, "momentum": 0.5})],
)
def test_rounds_are_the_algorithm_with_partial_participation(fit, alpha, weighting, options):
    data, rule = samples(partition=QuantitySkew(2.0, min_size=4)), FedDyn(alpha, weighting)
    loop = Noted(rule, Schedule(num_steps=4), seed=1, clients_per_round=3)
    fit(module(**options), loop, data, rounds=5)
    options["decay"] = options.pop("weight_decay", 0.0)
    models, h, g = plainly(loop, data, alpha, weighting, **options)
    assert len({tuple(batches) for batches in loop.batches}) > 1
    close(loop.models, models)
    close(rule.h, h)
    for client, rows in loop.store.rows.items():
        close(rows["part.0.gradient"], g[client])
    received = 10 + (weighting == "samples")  # parameters, and the strength of the client
    for row in loop.rows:
        assert (row["bytes_up"], row["bytes_down"]) == (3 * 8 * 10, 3 * 8 * received)


def test_parameters_that_are_frozen_later_do_not_move():
    """The server has a vector of them."""
    rule, server = of(4, FedDyn(0.1), 2), torch.ones(4, dtype=torch.float64)
    rule.start(server)
    rule.h = torch.ones_like(server)
    rule.start(server, torch.arange(4) < 2)
    rule.count += 1
    assert (rule.compute() - server).tolist() == [-10, -10, 0, 0]


def test_a_stream_of_samples_cannot_weigh_clients():
    stream = samples()
    stream.stream_steps = 2
    with pytest.raises(FederationError, match="clients of a constant size"):
        of(5, FedDyn(weighting="samples"), data=stream)
