"""Options of the neuron matching rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_fl.functional.networks import MatchingOptions
from lightning_fl.options import check_choice, check_integer, check_number
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
        check_number("gamma", self.gamma, above=0, optional=True)
        check_number("client_variance", self.client_variance, above=0, optional=True)
        check_number("prior_variance", self.prior_variance, above=0, optional=True)
        if widths is not None and not (isinstance(widths, list | tuple) and widths):
            raise FederationError(f"widths must be a non-empty list of numbers, got {widths!r}")
        for i, width in enumerate(widths or ()):
            check_integer(f"widths[{i}]", width, min=1)
        check_number("std", self.std, min=0, optional=True)
        check_number("tolerance", self.tolerance, min=0)
        check_integer("seed", self.seed, min=0, optional=True)
        check_choice("start", self.start, "own", "server")
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
