"""Sums of fixed-point integers: plain Python integers, and wrap-around."""

import pytest
import torch

from lightning_fl.functional.fixed_point import FixedPointSum, largest_integer
from lightning_fl.types import FederationError

SIZE, CLIENTS = 11, 7


def addends(dtype=torch.float32):
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(CLIENTS, SIZE, generator=drawn, dtype=torch.float64).to(dtype)
    return rows, torch.randint(1, 90, (CLIENTS,), generator=drawn).double()


def total_of(rows, weights, bits, order=None, parts=1, clients=CLIENTS):
    """The sum of rows in an order, a part at a time."""
    total = FixedPointSum(SIZE, clip=1.5, bits=bits, max_weight=90.0, clients=clients)
    order = torch.arange(len(rows)) if order is None else torch.tensor(order)
    for part in order.chunk(parts):
        total.add(rows[part], weights[part])
    return total


@pytest.mark.parametrize("bits", [4, 9, 32, 53])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_is_the_sum_of_plain_integers(bits, dtype):
    rows, weights = addends(dtype)
    modulus, largest = 2**bits, (2 ** (bits - 1) - 1) // CLIENTS
    unit, expected = 90.0 * 1.5 / largest, []
    for column in rows.T.double().tolist():
        total = 0
        for x, w in zip(column, weights.tolist(), strict=True):
            sent = round(min(max(x, -1.5), 1.5) * w / unit)
            total = (total + min(max(sent, -largest), largest)) % modulus
        expected.append((total - modulus if total >= modulus // 2 else total) * unit)
    assert total_of(rows, weights, bits).value().tolist() == expected


def test_order_and_grouping_change_no_bit():
    rows, weights = addends()
    first = total_of(rows, weights, 20)
    for order, parts in (([6, 5, 4, 3, 2, 1, 0], 1), ([3, 1, 0, 6, 2, 5, 4], 3)):
        other = total_of(rows, weights, 20, order, parts)
        assert torch.equal(other.value(), first.value())
        assert torch.equal(other.figures.value(), first.figures.value())
    halves = [total_of(rows[part], weights[part], 20) for part in (slice(3), slice(3, None))]
    halves[0].merge(halves[1])
    assert torch.equal(halves[0].value(), first.value())
    assert torch.equal(halves[0].figures.value(), first.figures.value())


def test_the_largest_addends_of_all_clients_do_not_wrap_around():
    for bits, clients in ((4, 7), (8, 127), (16, 3), (53, 1000)):
        total = FixedPointSum(2, clip=0.1, bits=bits, max_weight=3.0, clients=clients)
        rows, weights = torch.tensor([[9.0, -9.0]]), torch.tensor([3.0])
        for _ in range(clients):
            total.add(rows, weights)
        assert total.value().tolist() == pytest.approx([0.3 * clients, -0.3 * clients])
        total.add(rows, weights)
        if clients + 1 > 2 ** (bits - 1) - 1:  # one more client than there is room for
            assert float(total.value()[0]) < 0


@pytest.mark.parametrize("clients", [1, 7, 8, 100, 2**20])
def test_too_few_bits_are_refused_and_the_message_names_enough(clients):
    needed = clients.bit_length() + 1
    assert largest_integer(needed, clients) >= 1
    with pytest.raises(FederationError, match=f"at least {needed}, "):
        largest_integer(needed - 1, clients)


def test_rows_are_not_changed():
    rows, weights = addends(torch.float64)
    before = rows.clone()
    total_of(rows, weights, 12)
    assert torch.equal(rows, before)
