"""Functions of float16, in which a constant or a square is 0 or infinite, are as in float64."""

import pytest
import torch

from lightning_fl.functional.calibration import balanced_logits
from lightning_fl.functional.contrastive import model_contrastive_loss
from lightning_fl.functional.decorrelation import correlation_penalty
from lightning_fl.functional.sharpness import ascent

DEAD, EQUAL = torch.tensor([[1.0, 0.0], [3.0, 0.0], [4.0, 0.0]]), torch.ones(1000)
CASES = {
    "a unit without variance": lambda t: correlation_penalty(t(DEAD)),
    "features of 0": lambda t: model_contrastive_loss(*map(t, (0 * DEAD, DEAD, -DEAD)), 0.5),
    "small": lambda t: ascent({"w": t(EQUAL)}, {"w": t(1e-4 * EQUAL)}, 0.1, None)["w"],
    "counts": lambda t: balanced_logits(t(DEAD[0]), t(290 + DEAD[1]), 9.0).softmax(0),
}


@pytest.mark.parametrize("call", CASES.values(), ids=CASES)
def test_float16_is_as_float64(call):
    narrow, wide = call(torch.Tensor.half).double(), call(torch.Tensor.double)
    torch.testing.assert_close(narrow, wide, rtol=0.05, atol=1e-4)
