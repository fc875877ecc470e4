"""Faster products of matrices: only where they are as exact, and never for good."""

import pytest
import torch

from lightning_fl.runners import matmul
from lightning_fl.runners.matmul import MOST_ERROR, allow_fast_matmul, matmul_error

SHAPES, CPU = [(20, 30)], torch.device("cpu")


@pytest.fixture
def setting():
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    yield lambda: backend.fp32_precision
    backend.fp32_precision = before


def test_the_error_of_single_precision_is_small():
    assert 0 < matmul_error(SHAPES) < MOST_ERROR
    assert matmul_error([(3, 0), (0, 2)]) == 0


def test_the_setting_holds_until_it_is_put_back(setting):
    before = setting()
    with allow_fast_matmul(True, SHAPES, CPU):
        assert setting() == "bf16"
    assert setting() == before


@pytest.mark.parametrize(("error", "expected"), [(1e-7, "bf16"), (1e-3, "none")])
def test_auto_looks_at_the_error(setting, monkeypatch, error, expected):
    monkeypatch.setattr(matmul, "matmul_error", lambda shapes: error)
    with allow_fast_matmul("auto", SHAPES, CPU):
        assert setting() == expected
    assert setting() == "none"


def test_a_comparison_that_fails_leaves_the_setting(setting, monkeypatch):
    def fails(shapes):
        raise MemoryError

    monkeypatch.setattr(matmul, "matmul_error", fails)
    with pytest.raises(MemoryError), allow_fast_matmul("auto", SHAPES, CPU):
        pass
    assert setting() == "none"


def test_nothing_is_set_where_nobody_wants_it(setting):
    for option, device in ((False, CPU), ("auto", torch.device("meta"))):
        with allow_fast_matmul(option, SHAPES, device):
            assert setting() == "none"


def test_auto_leaves_the_users_own_choice(setting):
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    with allow_fast_matmul("auto", SHAPES, CPU):
        assert setting() == "ieee"
