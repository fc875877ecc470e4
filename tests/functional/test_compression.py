"""Compression: by hand, unbiased, and what it costs."""

import pytest
import torch

from lightning_fl.functional.compression import quantized, signs, top_k


def rand(p, seed=0):
    return torch.randn(p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_top_k_keeps_the_largest():
    x = rand(50)
    for count in (1, 7, 50):
        found = top_k(x, count)
        kept = sorted(range(50), key=lambda i: -abs(float(x[i])))[:count]
        for i in range(50):
            assert float(found[i]) == (float(x[i]) if i in kept else 0.0)
    assert top_k(torch.tensor([1.0, -1.0, 1.0]), 2).tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_quantized_is_unbiased_and_on_the_grid(bits):
    x, random = rand(20), torch.Generator().manual_seed(1)
    most = 2 ** (bits - 1) - 1
    scale = x.abs().max() / most
    total, count = torch.zeros(20).double(), 1000
    for _ in range(count):
        found = quantized(x, bits, torch.rand(20, generator=random, dtype=torch.float64))
        steps = found / scale
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-9)
        assert (steps.abs() <= most + 1e-9).all()
        assert ((found - x).abs() <= scale * (1 + 1e-9)).all()
        total += found
    # The variance of one rounding is at most s^2 / 4: five standard errors of the mean.
    assert ((total / count - x).abs() <= 5 * float(scale) / 2 / count**0.5).all()
    assert not quantized(torch.zeros(3), bits, torch.full((3,), 0.9)).any()


def test_signs_have_the_same_sum_of_magnitudes():
    x = rand(9)
    found = signs(x)
    assert float(found.abs().sum()) == pytest.approx(float(x.abs().sum()))
    assert torch.equal(found.sign(), x.sign())
    assert found.unique().numel() == 2
