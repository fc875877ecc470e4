"""Reads and writes are noted under whatever alias."""

import pytest
import torch

from lightning_fl.runners.watch import Watch


def assign(tensor):
    tensor.data = tensor.data * 2


@pytest.mark.parametrize(
    ("act", "read", "written"),
    [
        (lambda w: w.sum(), True, False),
        (lambda w: w.view(-1)[1] + 1, True, False),
        (lambda w: (w.shape, w.dtype, w.detach()), False, False),
        (lambda w: w.data.mul_(2), False, True),
        (lambda w: w.detach().view(-1)[:1].zero_(), False, True),
        (lambda w: torch._foreach_add_([w.data], 1), False, True),
        (assign, True, True),
    ],
)
def test_what_is_read_and_written_is_noted(act, read, written):
    w, other = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with Watch({"w": w, "other": other}) as watch:
        act(w)
    assert (watch.read == {"w"}, watch.written == {"w"}) == (read, written)
    assert "other" not in watch.read | watch.written
