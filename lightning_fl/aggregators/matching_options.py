"""Options of the neuron matching rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_fl.functional.networks import MatchingOptions, check_least, check_whole
from lightning_fl.types import FederationError


@dataclass(frozen=True)
class MatchingRuleOptions:
    """Options of all neuron matching rules; see ``NeuronMatching`` for their description.

    Raises:
        FederationError: If an option is out of range.
    """

    gamma: float | None
    client_variance: float | None
    prior_variance: float | None
    widths: Sequence[int] | None
    start: Literal["own", "server"]
    std: float | None
    bias_mean: float
    sweeps: int
    popularity: float
    cap: int | None
    max_width: int | None
    tolerance: float
    seed: int | None
    accept: Literal["always", "improvement"]

    def __post_init__(self) -> None:
        widths = self.widths
        searched = {
            "gamma": self.gamma,
            "client_variance": self.client_variance,
            "prior_variance": self.prior_variance,
        }
        for name, value in searched.items():
            is_number = isinstance(value, int | float)
            if value is not None and not (is_number and 0 < value < math.inf):
                raise FederationError(f"{name} must be positive and finite, or null, got {value!r}")
        if widths is not None and not (isinstance(widths, list | tuple) and widths):
            raise FederationError(f"widths must be a non-empty list of numbers, got {widths!r}")
        for i, width in enumerate(widths or ()):
            check_whole(f"widths[{i}]", width)
        check_least("widths", min(widths) if widths else None, 1)
        check_least("std", self.std, 0)
        check_least("tolerance", self.tolerance, 0)
        if self.start not in ("own", "server"):
            raise FederationError(f"start must be own or server, got {self.start!r}")
        self.matching(1.0, 1.0, 1.0)  # validates the other options

    def matching(
        self, gamma: float, client_variance: float, prior_variance: float, round: int = 0
    ) -> MatchingOptions:
        """Return the options of a single matching.

        Args:
            gamma: Value of ``gamma``, given or from the search.
            client_variance: Value of ``client_variance``, given or from the search.
            prior_variance: Value of ``prior_variance``, given or from the search.
            round: Round index, from 0. Rounds after the first make at most three sweeps.
        """
        return MatchingOptions(
            client_variance,
            prior_variance,
            gamma,
            bias_mean=self.bias_mean,
            popularity=self.popularity,
            cap=self.cap,
            max_width=self.max_width,
            sweeps=self.sweeps if round == 0 else min(self.sweeps, 3),
            accept=self.accept,
        )
