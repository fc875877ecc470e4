"""Arguments for which a function would return numbers that mean nothing."""

import pytest
import torch

from lightning_fl.functional.compression import quantized
from lightning_fl.functional.drift import effective_steps
from lightning_fl.functional.mixing import adjacency
from lightning_fl.functional.representation import matching_error
from lightning_fl.functional.robust import krum_scores, trimmed_mean
from lightning_fl.functional.staleness import staleness_weight
from lightning_fl.types import FederationError

ROWS = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adjacency("torus", 4, 0.5, torch.Generator()), "graph must be ring, .*'torus'"),
        (lambda: effective_steps(ROWS[0], 0.5, ROWS[0]), "pull requires momentum=0, got .*0.5"),
        (lambda: krum_scores(ROWS, 2), r"attackers must be an integer in \[0, 1\], got 2"),
        (lambda: matching_error(ROWS, ROWS, "max"), "reduction must be sum or mean, got 'max'"),
        (lambda: quantized(ROWS[0], 1, ROWS[0]), "bits must be an integer of at least 2, got 1"),
        (lambda: staleness_weight(ROWS, "linear"), "function must be constant, .*'linear'"),
        (lambda: trimmed_mean(ROWS, -1), r"trim must be an integer in \[0, 1\], got -1"),
        (lambda: trimmed_mean(ROWS, 2), r"trim must be an integer in \[0, 1\], got 2"),
    ],
)
def test_arguments_without_a_result_are_refused_by_name(call, message):
    with pytest.raises(FederationError, match=message):
        call()
