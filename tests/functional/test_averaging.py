import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.functional.averaging import weighted_mean


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
