"""Arguments for which a function would return numbers that mean nothing."""

import pytest
import torch

from lightning_fl.functional.drift import effective_steps
from lightning_fl.functional.robust import krum_scores, trimmed_mean
from lightning_fl.types import FederationError

ROWS = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_steps(ROWS[0], 0.5, ROWS[0]), "pull requires momentum=0, got .*0.5"),
        (lambda: krum_scores(ROWS, 2), r"attackers must be an integer in \[0, 1\], got 2"),
        (lambda: trimmed_mean(ROWS, -1), r"trim must be an integer in \[0, 1\], got -1"),
        (lambda: trimmed_mean(ROWS, 2), r"trim must be an integer in \[0, 1\], got 2"),
    ],
)
def test_arguments_without_a_result_are_refused_by_name(call, message):
    with pytest.raises(FederationError, match=message):
        call()
