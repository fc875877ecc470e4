"""Downpour SGD: each client's move is a gradient of its own for the server's optimizer."""

from functools import partial

import torch

from lightning_fl.aggregators import Downpour, FedOpt
from lightning_fl.types import ClientUpdate


def test_adam_by_hand():
    """Two rounds of three clients, given out of order: six steps of Adam."""
    rule = Downpour(partial(torch.optim.Adam, lr=0.1))
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    expected, m, v = w.clone(), torch.zeros(2), torch.zeros(2)
    moves = torch.randn(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for round in range(2):
        rule.start(w)
        rule.update(ClientUpdate(torch.tensor([7]), moves[round, 2:], torch.tensor([100])))
        rule.update(ClientUpdate(torch.tensor([1, 4]), moves[round, :2], torch.tensor([3, 5])))
        w = rule.compute()
        for i, move in enumerate(moves[round]):
            t = 3 * round + i + 1
            m, v = 0.9 * m - 0.1 * move, 0.999 * v + 0.001 * move**2
            expected = expected - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


def test_one_client_a_round_is_fedopt():
    make = partial(torch.optim.SGD, lr=0.3, momentum=0.5)
    found = []
    for rule in (Downpour(make), FedOpt(make)):
        w = torch.zeros(3, dtype=torch.float64)
        for round in range(4):
            rule.start(w)
            move = torch.full((1, 3), float(round), dtype=torch.float64)
            rule.update(ClientUpdate(torch.tensor([round]), move, torch.tensor([2])))
            w = rule.compute()
        found.append(w)
    assert torch.equal(*found)
