"""Downpour SGD: each client's move is a gradient of its own for the server's optimizer."""

from functools import partial

import torch

from lightning_fl.aggregators import Downpour
from rounds import aggregate, sent


def test_adam_by_hand():
    """Two rounds of three clients, given out of order: six steps of Adam."""
    rule = Downpour(partial(torch.optim.Adam, lr=0.1))
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    expected, m, v = w.clone(), torch.zeros(2), torch.zeros(2)
    moves = torch.randn(2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for round in range(2):
        last, others = sent(moves[round, 2:], [100], [7]), sent(moves[round, :2], [3, 5], [1, 4])
        w = aggregate(rule, w, last, others)
        for i, move in enumerate(moves[round]):
            t = 3 * round + i + 1
            m, v = 0.9 * m - 0.1 * move, 0.999 * v + 0.001 * move**2
            expected = expected - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)
