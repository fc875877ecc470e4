import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.functional import weighted_mean


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=6),
    data=st.data(),
)
def test_it_is_numpys_average(rows, data):
    k = len(rows)
    weights = data.draw(st.lists(st.floats(0.1, 100), min_size=k, max_size=k))
    found = weighted_mean(torch.tensor(rows, dtype=torch.float64), torch.tensor(weights))
    expected = np.average(rows, axis=0, weights=torch.tensor(weights).double())
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_a_row_of_weight_zero_does_not_count():
    rows = torch.tensor([[1.0], [99.0]])
    assert weighted_mean(rows, torch.tensor([2, 0])).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_has_the_rows_dtype_and_the_inputs_stay(dtype):
    rows, weights = torch.ones(2, 3, dtype=dtype), torch.tensor([1, 3])
    assert weighted_mean(rows, weights).dtype == dtype
    assert rows.eq(1).all()
    assert weights.tolist() == [1, 3]
