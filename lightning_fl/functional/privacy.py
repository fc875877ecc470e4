"""Differential privacy of clients: what noise costs, and what it buys."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_fl.types import Cohort, FederationError

#: A noise multiplier that protects nobody.
_LEAST_NOISE = 0.1


def epsilon(releases: Sequence[tuple[float, int]], delta: float, cohort: Cohort) -> float:
    r"""Return the :math:`\varepsilon` of :math:`(\varepsilon, \delta)`-differential privacy.

    Each release is a sum over a round's cohort of vectors no longer than :math:`C`, with normal
    noise of standard deviation :math:`z C` on each coordinate. The accountant is Google's
    ``dp_accounting`` (Renyi differential privacy: Mironov et al., 2019; Wang et al., 2019). What
    two neighboring federations are depends on how cohorts are drawn:

    - ``poisson``: one has one client more; releases are amplified by sampling;
    - ``fixed``, drawn without replacement: one client is another. A sum then differs by up to
      :math:`2 C`, so this is a much weaker promise for the same noise. Where it is less, the price
      without any amplification by sampling;
    - everyone in each round: one has one client more; nothing is amplified.

    Args:
        releases: Pairs of a noise multiplier :math:`z` and the number of rounds that had it.
        delta: :math:`\delta`.
        cohort: How clients are drawn.

    Returns:
        Infinity where a round had no noise, 0 before the first.

    Raises:
        FederationError: If ``dp_accounting`` is not installed, or a part of the clients is drawn
            in a way of which nothing is known.

    Example:
        >>> cohort = Cohort(size=50, clients=1000, drawn="poisson")
        >>> round(epsilon([(1.0, 100)], delta=1e-5, cohort=cohort), 2)
        4.04
    """
    _, made = _accountants(cohort)
    rounds = [(noise, count) for noise, count in releases if count]
    if not rounds:
        return 0.0
    if any(noise == 0 for noise, _ in rounds):
        return math.inf
    found = []
    with _quiet():
        for make, event in made:
            accountant = make()
            for noise, count in rounds:
                accountant.compose(event(noise), count)
            found.append(float(accountant.get_epsilon(delta)))
    return min(found)


def noise_multiplier(target: float, delta: float, rounds: int, cohort: Cohort) -> float:
    r"""Return the smallest noise multiplier that keeps :func:`epsilon` at a target.

    Args:
        target: :math:`\varepsilon`.
        delta: :math:`\delta`.
        rounds: Of the run.
        cohort: How clients are drawn.

    Raises:
        FederationError: If ``dp_accounting`` is not installed, or a number is out of range.

    Example:
        >>> cohort = Cohort(size=50, clients=1000, drawn="poisson")
        >>> round(noise_multiplier(4.0, delta=1e-5, rounds=100, cohort=cohort), 2)
        1.0
    """
    if not 0 < target < math.inf:
        raise FederationError(f"the target epsilon must be positive and finite, got {target}")
    if not 0 < delta < 1:
        raise FederationError(f"delta must be between 0 and 1, got {delta}")
    if rounds < 1:
        raise FederationError(f"rounds must be at least 1, got {rounds}")
    if epsilon([(_LEAST_NOISE, rounds)], delta, cohort) <= target:
        raise FederationError(f"epsilon {target:g} asks for no noise to speak of: lower it")
    dp, made = _accountants(cohort)
    with _quiet():
        found = [
            dp.calibrate_dp_mechanism(
                make,
                lambda noise, event=event: dp.SelfComposedDpEvent(event(noise), rounds),
                target,
                delta,
                dp.LowerEndpointAndGuess(_LEAST_NOISE, 1.0),
            )
            for make, event in made
        ]
    return float(min(found))


def next_clip(clip: float, below: float, quantile: float, lr: float) -> float:
    r"""Move a clipping norm towards a quantile of the updates' norms (Andrew et al., 2021).

    .. math:: C \leftarrow C \exp(-\eta (\tilde b - \gamma))

    Args:
        clip: :math:`C`.
        below: :math:`\tilde b`, the part of updates that are not longer, with noise.
        quantile: :math:`\gamma`.
        lr: :math:`\eta`.

    Example:
        >>> next_clip(1.0, below=0.5, quantile=0.5, lr=0.2)
        1.0
    """
    return clip * math.exp(-lr * (below - quantile))


def noise_beside_a_count(noise: float, count_noise: float) -> float:
    r"""Return the noise multiplier of updates that leaves room for a count (Andrew et al., 2021).

    .. math:: z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}

    The updates with :math:`z_\Delta` and the count of those below the norm, each of which adds
    :math:`\pm 1/2`, with :math:`\sigma_b` together cost what the updates alone do with :math:`z`.

    Args:
        noise: :math:`z`.
        count_noise: :math:`\sigma_b`.

    Raises:
        FederationError: If the count alone costs as much.

    Example:
        >>> round(noise_beside_a_count(1.0, count_noise=1.0), 4)
        1.1547
    """
    if noise == 0:
        return 0.0
    if not 2 * count_noise > noise:
        raise FederationError(
            f"the noise of the count is {count_noise:g}: it must be more than half of the noise"
            f" multiplier, {noise:g}, or nothing is left for the updates"
        )
    return 1 / math.sqrt(noise**-2 - (2 * count_noise) ** -2)


def clipped_update(update: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\Delta \min(1, C / \|\Delta\|)`, and whether the update is not longer.

    Args:
        update: ``[P]`` in float64: a float32 vector may be longer than its norm in float32.
        clip: :math:`C`.

    Example:
        >>> import torch
        >>> clipped_update(torch.tensor([3.0, 4.0], dtype=torch.float64), clip=1.0)
        (tensor([0.6000, 0.8000], dtype=torch.float64), tensor(False))
    """
    norm = update.norm()
    # A norm of 0 makes it infinite, which is more than 1.
    return update * (clip / norm).clamp(max=1.0), norm <= clip


def _accountants(cohort: Cohort) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the library, and by each way to account for a round what adds up and what a round is.

    All are upper bounds.
    """
    try:
        import dp_accounting as dp
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise FederationError(
            "privacy is accounted for by dp-accounting, which is not installed: pip install"
            " 'lightning_fl[privacy]'"
        ) from error
    one_more, another = (
        partial(RdpAccountant, neighboring_relation=relation)
        for relation in (
            dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
            dp.NeighboringRelation.REPLACE_ONE,
        )
    )
    m, n = cohort.size, cohort.clients
    if not cohort.is_sampled:
        return dp, [(one_more, dp.GaussianDpEvent)]
    if cohort.drawn == "poisson":
        return dp, [(one_more, lambda z: dp.PoissonSampledDpEvent(m / n, dp.GaussianDpEvent(z)))]
    if cohort.drawn == "fixed":  # half the noise: a sum differs by twice the norm

        def drawn(z: float) -> Any:
            return dp.SampledWithoutReplacementDpEvent(n, m, dp.GaussianDpEvent(z / 2))

        return dp, [(another, drawn), (another, lambda z: dp.GaussianDpEvent(z / 2))]
    raise FederationError(
        f"{m} of {n} clients are drawn in a way of which no accountant knows what it hides: use"
        " PoissonSampler, UniformSampler, or client_fraction=1.0"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from warning of orders that it leaves out: the others are bounds, too."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
