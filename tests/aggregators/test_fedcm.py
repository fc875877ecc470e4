"""FedCM: the algorithm written plainly, and rounds without updates."""

import pytest
import torch

from lightning_fl.aggregators import FedCM
from lightning_fl.policies import Schedule
from rounds import aggregate, sent
from two_classes import samples
from written_plainly import LR, Noted, close, loss_and_gradient, module, vector


def plainly(loop, alpha, server_lr, weight_decay):
    """Algorithm 2 of the paper, on the batches of a run."""
    x = vector(module())
    m, models = torch.zeros_like(x), []
    for batches in loop.batches:
        moves, directions = [], []
        for steps in batches.values():
            y = x.clone()
            for batch in steps:
                v = alpha * loss_and_gradient(y, *batch)[1] + (1 - alpha) * m
                y -= LR * (v + weight_decay * y)
            moves.append(y - x)
            directions.append((x - y) / (len(steps) * LR))
        x = x + server_lr * sum(moves) / len(moves)
        m = sum(directions) / len(directions)
        models.append(x)
    return models, m


@pytest.mark.parametrize(("alpha", "server_lr", "decay"), [(0.1, 1.0, 0.0), (0.6, 0.7, 0.1)])
def test_rounds_are_the_algorithm_with_partial_participation(fit, alpha, server_lr, decay):
    rule = FedCM(alpha, server_lr)
    loop = Noted(rule, Schedule(num_steps=4), seed=1, clients_per_round=3)
    fit(module(weight_decay=decay), loop, samples(), rounds=4)
    models, momentum = plainly(loop, alpha, server_lr, decay)
    close(loop.models, models)
    close(rule.momentum, momentum)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_round_without_updates_keeps_model_and_momentum():
    rule, one = FedCM(), torch.ones(1)
    model = aggregate(rule, torch.zeros(2), sent([[1.0, -2.0]], num_steps=5 * one, lr=0.1 * one))
    assert torch.equal(aggregate(rule, model), model)
    assert rule.momentum.tolist() == [-2, 4]
