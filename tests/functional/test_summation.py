import math
from fractions import Fraction

import pytest
import torch

import lightning_fl.functional.summation as summation
from lightning_fl.functional.summation import VectorSum, add_rows, empty_sum, merged_sums, sum_value


def addends(count=24, size=40, seed=0):
    """Rows whose coordinates differ in scale by hundreds of orders, with zeros and cancellation."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, generator=random, dtype=torch.float64)
    each = torch.randint(-40, 40, (count, size), generator=random)  # within a coordinate
    scale = torch.linspace(-950, 950, size).round()  # from coordinate to coordinate
    rows = rows * 2.0 ** each.double() * 2.0 ** scale.double()
    rows[torch.rand(count, size, generator=random) < 0.2] = 0
    rows[count // 2 :, ::7] = -rows[: count - count // 2, ::7]  # their total is 0
    return rows


def total_of(rows, weights=None):
    total = empty_sum(rows.shape[1:])
    add_rows(total, rows, weights)
    return total


def exact(rows):
    return [sum(map(Fraction, column)) for column in rows.T.tolist()]


def check(value, rows):
    """Compare with exact arithmetic: right to 1e-15 of the sum of magnitudes, at least."""
    for found, right, column in zip(value.tolist(), exact(rows), rows.T.tolist(), strict=True):
        magnitude = sum(abs(Fraction(x)) for x in column)
        assert abs(Fraction(found) - right) <= magnitude / 2**53 + Fraction(5e-324)
        if not right:
            assert found == 0


@pytest.fixture(autouse=True, params=["CPU", "GPU", "graph"])
def _ways_to_add(request, monkeypatch):
    """A limit of 0 shifts the bins for all addends, as on a GPU; the graph is not compiled."""
    monkeypatch.setattr(summation, "_LIMIT", 0.0 if request.param == "GPU" else 2.0**31)
    monkeypatch.setattr(summation, "PIECE", 16)
    graph = summation._add_few if request.param == "graph" else None
    monkeypatch.setattr(summation, "_graph", graph)
    monkeypatch.setattr(summation, "GRAPH_COLUMNS", 1)


@pytest.mark.parametrize("_ways_to_add", ["CPU"], indirect=True)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_sums_are_the_same_bits():
    rows = torch.cat([addends(size=2), addends(size=100)], 1)  # the size is not a constant
    expected = total_of(rows)
    summation.compile_sums()
    for some in (slice(0, 2), slice(2, None)):
        found = total_of(rows[:, some])
        torch.testing.assert_close(sum_value(found), sum_value(expected[:, some]), rtol=0, atol=0)


def test_sum_is_exact_where_scales_differ_by_hundreds_of_orders():
    rows = addends()
    check(sum_value(total_of(rows)), rows)


def test_order_and_grouping_do_not_change_a_bit():
    rows = addends()
    expected = sum_value(total_of(rows))
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        order = torch.randperm(len(rows), generator=random)
        cuts = torch.randint(0, len(rows), (4,), generator=random).sort().values
        groups = [total_of(rows[part]) for part in order.tensor_split(cuts)]  # some are empty
        assert torch.equal(sum_value(merged_sums(torch.stack(groups))), expected)
        assert torch.equal(sum_value(total_of(rows[order])), expected)
    # A plain sum of these does depend on the order.
    assert not torch.equal(rows.cumsum(0)[-1], rows.flip(0).cumsum(0)[-1])


@pytest.mark.parametrize(
    "column",
    [
        [1e16, 1.0, -1e16],
        [1e300, 1.0, -1e300, 1e284],
        [5e-324, 5e-324, 1e-310],
        [1.7e308, 5e-324, -1.7e308],
        [0.1] * 1000,
        [2.0**32 - 0.5, -(2.0**31), 0.5, 2.0**-33],
        [-1.0, 2.0**-53, 2.0**-54, -(2.0**-90)],
        [1.0, -1.0 - 2.0**-52, 2.0**-60],
        [0.0, -0.0],
        [],
    ],
)
def test_hard_columns_are_summed_exactly(column):
    rows = torch.tensor(column, dtype=torch.float64)[:, None]
    expected = sum_value(total_of(rows))
    check(expected, rows)
    assert torch.equal(sum_value(total_of(rows.flip(0))), expected)


def test_halves_of_units_are_rounded_alike():
    """Ties at the edge of a bin: what a bin has so far does not decide how they are rounded."""
    units = [2.0 ** (32 * i - 1074) for i in range(28, 36)]
    column = [s * unit * f for unit in units for f in (0.5, 1.5, 1.0) for s in (1, -1, 1)]
    rows = torch.tensor(column, dtype=torch.float64)[:, None]
    expected = sum_value(total_of(rows))
    random = torch.Generator().manual_seed(0)
    for _ in range(30):
        order = torch.randperm(len(rows), generator=random)
        assert torch.equal(sum_value(total_of(rows[order])), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_updates_are_weighed_in_float64(dtype):
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 30, generator=random).to(dtype)
    weights = torch.randint(1, 10**6, (9,), generator=random)
    check(sum_value(total_of(rows, weights)), rows.double() * weights[:, None])


def test_inputs_are_left_as_they_are():
    rows = addends()
    copy = rows.clone()
    total_of(rows, torch.full((len(rows),), 3))
    assert torch.equal(rows, copy)


def test_what_is_not_finite_stays_in_its_coordinate():
    rows = torch.ones(3, 4)
    rows[1, 0], rows[2, 2] = torch.inf, torch.nan
    assert sum_value(total_of(rows)).isfinite().tolist() == [False, True, False, True]


def test_sum_of_millions_is_exact():
    total = total_of(torch.full((1, 1), 2.0**32 - 1, dtype=torch.float64))
    for _ in range(20):  # doubled by itself, which is as many addends as it may have
        total = merged_sums(torch.stack([total, total]))
    assert float(sum_value(total)) == (2.0**32 - 1) * 2**20


def test_a_sum_of_zero_keeps_the_window_of_its_addends():
    """What cancels still decides which small addends are dropped, in whatever call they come."""
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0**-120, 1.0]], dtype=torch.float64)
    total = empty_sum((2,))
    add_rows(total, rows[:2])
    add_rows(total, rows[2:])
    assert sum_value(total).tolist() == sum_value(total_of(rows)).tolist() == [0, 1]


# --- sums that keep few addends as they are -------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 24])
def test_few_addends_have_the_same_total_as_bins(count):
    rows, weights = addends()[:count], torch.arange(1.0, count + 1)
    total = VectorSum(40)
    for i in range(0, count, 2):
        add_rows(total, rows[i : i + 2], weights[i : i + 2])
    expected = sum_value(total_of(addends()[:count], weights))
    assert torch.equal(sum_value(total), expected)
    start, divisor = torch.randn(40), torch.tensor([3])
    assert torch.equal(total.mean_plus(start, divisor), (start + expected / divisor).float())
    assert torch.equal(sum_value(total.bins()), expected)
    total.reset()
    assert not sum_value(total).any()


def test_addends_are_kept_up_to_half_the_size_of_the_bins(monkeypatch):
    made = []
    empty = summation.empty_sum
    monkeypatch.setattr(
        summation, "empty_sum", lambda shape, *where: made.append(shape) or empty(shape, *where)
    )
    total = VectorSum(40)
    monkeypatch.setattr(summation, "WAITING", 0)
    for _ in range(4):
        add_rows(total, torch.ones(1, 40))
    assert not made
    add_rows(total, torch.ones(1, 40))
    assert made == [(40,)]
    total.reset()
    add_rows(total, torch.ones(9, 40))
    assert made == [(40,)]  # their memory is used again
    assert sum_value(total).tolist() == [9] * 40


@pytest.mark.parametrize("rows", [1, 9])
def test_what_becomes_of_an_addend_later_does_not_matter(rows):
    total, addend = VectorSum(3), torch.ones(rows, 3)
    add_rows(total, addend)
    addend.zero_()
    assert sum_value(total).tolist() == [rows] * 3


def test_merged_sums_have_the_addends_of_both():
    rows, one, two = addends(), VectorSum(40), VectorSum(40)
    add_rows(one, rows[:1])
    add_rows(two, rows[1:])
    one.merge(two)
    assert torch.equal(sum_value(one), sum_value(total_of(rows)))


def test_sum_of_typical_updates_equals_fsum():
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 20, generator=random).double() * 1e-3 + 1
    right = torch.tensor([math.fsum(column) for column in rows.T.tolist()], dtype=torch.float64)
    assert torch.equal(sum_value(total_of(rows)), right)


@pytest.mark.parametrize(
    ("size", "together"), [(1, [1] * 45), (7 * 320, [5] * 9), (2**30, [20, 20])]
)
def test_small_addends_wait_for_others(monkeypatch, size, together):
    added, add = [], summation.add_rows

    def noted(bins, rows, weights=None):
        added.append(len(rows))
        add(bins, rows, weights)

    monkeypatch.setattr(summation, "WAITING", size)
    monkeypatch.setattr(summation, "PIECE", 40)
    total = VectorSum(40)
    total.bins()
    monkeypatch.setattr(summation, "add_rows", noted)
    rows = addends(45)
    for row in rows:
        total.add(row[None])
    assert added == together
    assert torch.equal(total.value(), sum_value(total_of(rows)))
