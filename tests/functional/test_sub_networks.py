"""Masks of narrower networks and the mean over holders, entry by entry."""

import math

import pytest
import torch

from lightning_fl.functional.sub_networks import held_entries, held_units, mean_over_holders


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.3, 1 / 16])
@pytest.mark.parametrize("first", [0, 3, 9, 23])
def test_units_are_counted_up_and_go_around(rate, first):
    for width in (1, 4, 10, 17):
        wanted = {(first + i) % width for i in range(math.ceil(rate * width))}
        assert set(held_units(width, rate, first).nonzero()[:, 0].tolist()) == wanted


def test_rounding_adds_no_unit():
    """In floating point 0.07 * 100 is above 7."""
    assert int(held_units(100, 0.07).sum()) == 7
    assert int(held_units(100, 0.071).sum()) == 8


def test_entries_are_those_of_held_rows_and_columns():
    rows, columns = torch.tensor([True, False, True]), torch.tensor([False, True])
    for shape, pixels in (([3, 2], 1), ([3, 8], 4), ([3, 2, 5, 4], 1)):
        found = held_entries(shape, rows, columns)
        assert list(found.shape) == shape
        for index in torch.ones(shape).nonzero().tolist():
            wanted = rows[index[0]] and columns[index[1] // pixels]
            assert found[tuple(index)] == wanted
    assert torch.equal(held_entries([3], rows), rows)
    assert torch.equal(held_entries([3, 2], rows), rows[:, None].expand(3, 2))


def test_the_mean_is_over_the_holders_of_an_entry():
    torch.manual_seed(0)
    server, delta = torch.randn(40).double(), torch.randn(6, 40).double()
    held = torch.rand(6, 40) < torch.linspace(0, 1, 40)
    total, count = (delta * held).sum(0), held.sum(0).double()
    found = mean_over_holders(server, total, count)
    for i in range(40):
        holders = [k for k in range(6) if held[k, i]]
        if not holders:
            assert found[i] == server[i]
        else:
            wanted = server[i] + sum(delta[k, i] for k in holders) / len(holders)
            torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-12)
    assert 0 in count
    half = server.bfloat16()
    assert torch.equal(mean_over_holders(half, 0 * total, count), half)
