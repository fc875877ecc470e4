"""How many clients train at once, and how many local steps a Lightning batch holds."""

import pytest
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.runners.groups import clients_at_once


@pytest.mark.parametrize(("group_size", "expected"), [(1, 1), (4, 4), (50, 7), ("auto", 7)])
def test_a_group_has_at_most_as_many_clients_as_the_round(tiny, group_size, expected):
    vectorized = VectorizedClients(tiny(), group_size)
    assert vectorized.layout(clients=7, batch_bytes=280, stepwise=True)[0] == expected


def test_steps_are_bundled_by_memory(tiny):
    group_size = VectorizedClients(tiny(), 4)
    few, many = (group_size.layout(9, 32 * size, False)[1] for size in (2**20, 2**10))
    assert 1 <= few < many
    assert group_size.layout(9, 2**45, False)[1] == 1
    assert group_size.layout(9, 2**45, True)[1] > many


def test_auto_takes_as_many_clients_as_the_cache_holds(tiny):
    def group_size(batch_bytes, layer):
        return VectorizedClients(tiny.kind(net=lambda: layer)).layout(10**6, batch_bytes, True)[0]

    assert group_size(2**19, nn.Linear(2, 2)) == 63
    assert group_size(2**10, nn.Linear(2**10, 2**10)) == 10
    assert group_size(2**19, nn.Conv2d(2, 2, 3)) == 1


@pytest.mark.parametrize(
    ("net", "memory", "expected"),
    [
        (nn.Linear(1, 1), 2**32, 2**30 // (32 + 64 * 2**19)),
        (nn.Linear(1, 1), 2**40, 500),
        (
            nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)),
            2**36,
            2**34 // (136 + 1000 * 2**19),
        ),
        (nn.Conv2d(1, 1, 1), 2**32, 10),
        (nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2)), 2**40, 63),  # as on a CPU
    ],
)
def test_auto_takes_as_many_clients_as_fit_into_a_quarter_of_a_gpu(net, memory, expected):
    found = clients_at_once(net, {}, "auto", 500, 2**19, memory, on_a_gpu=True)
    assert found == expected
