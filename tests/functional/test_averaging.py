import pytest
import torch

from lightning_fl.functional import weighted_mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_has_the_rows_dtype_and_the_inputs_stay(dtype):
    rows, weights = torch.ones(2, 3, dtype=dtype), torch.tensor([1, 3])
    assert weighted_mean(rows, weights).dtype == dtype
    assert rows.eq(1).all()
    assert weights.tolist() == [1, 3]
