"""Figures of a split."""

import pytest
import torch

from lightning_fl.partition import label_drift, summary


def test_drift_is_half_the_sum_of_differences():
    # Overall 7/12, 3/12 and 2/12; the first client has 2/12 more, 0 more and 2/12 less.
    found = label_drift(torch.tensor([[6, 2, 0], [1, 1, 2]]))
    assert found.tolist() == pytest.approx([2 / 12, 4 / 12], abs=1e-7)
    assert label_drift(torch.ones(3, 4)).tolist() == [0, 0, 0]


def test_a_split_without_classes_is_described_by_its_sizes():
    text = summary([1200, 3400, 10])
    assert text.splitlines() == [
        "clients             3",
        "samples             4,610",
        "samples per client  10 to 3,400, median 1,200",
    ]


def test_only_the_first_names_are_listed():
    assert "(a, b, c, d, e, ...)" in summary([1] * 7, names=list("abcdefg"))
