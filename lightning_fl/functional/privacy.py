"""Client-level differential privacy: accounting, noise and clipping."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_fl.contracts.plan import Cohort
from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.hooks import quiet
from lightning_fl.options import check_integer, check_number

#: Silences warnings about skipped Renyi orders; the other orders are valid bounds.
_quiet = partial(quiet, "absl", logging.ERROR)
#: Smallest noise multiplier of the calibration; smaller values give no useful privacy.
_LEAST_NOISE = 0.1


def epsilon(releases: Sequence[tuple[float, int]], delta: float, cohort: Cohort) -> float:
    r"""Return the :math:`\varepsilon` of :math:`(\varepsilon, \delta)`-differential privacy.

    Each release is a sum over the cohort of a round of vectors with norm at most :math:`C`, plus
    normal noise of standard deviation :math:`z C` on each coordinate. The accountant is Google's
    ``dp_accounting`` (Renyi differential privacy: Mironov et al., 2019; Wang et al., 2019). The
    neighboring relation of federations depends on the client sampling:

    - ``poisson``: add or remove one client; with privacy amplification by sampling.
    - ``fixed``, without replacement: replace one client. A sum then differs by up to :math:`2 C`,
      so the guarantee is much weaker for the same noise. The result is the minimum of the bounds
      with and without amplification by sampling.
    - all clients in each round: add or remove one client; without amplification.

    Args:
        releases: Pairs of a noise multiplier :math:`z` and the number of rounds with it.
        delta: :math:`\delta` of the guarantee.
        cohort: Client sampling.

    Returns:
        :math:`\varepsilon`. It is infinity if a round had no noise, and 0 before the first round.

    Raises:
        FederationError: If ``dp_accounting`` is not installed, or the accountant does not support
            the client sampling.

    Example:
        >>> cohort = Cohort(size=50, clients=1000, drawn="poisson")
        >>> round(epsilon([(1.0, 100)], delta=1e-5, cohort=cohort), 2)
        4.04
    """
    _, accountants = _accountants(cohort)
    rounds = [(noise, count) for noise, count in releases if count]
    if not rounds:
        return 0.0
    if any(noise == 0 for noise, _ in rounds):
        return math.inf
    bounds = []
    with _quiet():
        for make, event in accountants:
            accountant = make()
            for noise, count in rounds:
                accountant.compose(event(noise), count)
            bounds.append(float(accountant.get_epsilon(delta)))
    return min(bounds)


def noise_multiplier(target: float, delta: float, rounds: int, cohort: Cohort) -> float:
    r"""Return the smallest noise multiplier with :func:`epsilon` at most a target.

    Args:
        target: Target :math:`\varepsilon`.
        delta: :math:`\delta` of the guarantee.
        rounds: Number of rounds.
        cohort: Client sampling.

    Raises:
        FederationError: If ``dp_accounting`` is not installed, or a number is out of range.

    Example:
        >>> cohort = Cohort(size=50, clients=1000, drawn="poisson")
        >>> round(noise_multiplier(4.0, delta=1e-5, rounds=100, cohort=cohort), 2)
        1.0
    """
    check_number("the target epsilon", target, above=0)
    check_number("delta", delta, above=0, below=1)
    check_integer("rounds", rounds, min=1)
    if epsilon([(_LEAST_NOISE, rounds)], delta, cohort) <= target:
        raise FederationError(
            f"the target epsilon {target:g} requires almost no noise: use a smaller target"
        )
    dp, accountants = _accountants(cohort)
    with _quiet():
        multipliers = [
            dp.calibrate_dp_mechanism(
                make,
                lambda noise, event=event: dp.SelfComposedDpEvent(event(noise), rounds),
                target,
                delta,
                dp.LowerEndpointAndGuess(_LEAST_NOISE, 1.0),
            )
            for make, event in accountants
        ]
    return float(min(multipliers))


def next_clip(clip: float, below: float, quantile: float, lr: float) -> float:
    r"""Return the next clipping norm, adapted to a quantile of update norms (Andrew et al., 2021).

    .. math:: C \leftarrow C \exp(-\eta (\tilde b - \gamma))

    Args:
        clip: Clipping norm :math:`C`.
        below: Noisy fraction :math:`\tilde b` of updates with a norm of at most :math:`C`.
        quantile: Target fraction :math:`\gamma`.
        lr: Learning rate :math:`\eta`.

    Example:
        >>> next_clip(1.0, below=0.5, quantile=0.5, lr=0.2)
        1.0
    """
    return clip * math.exp(-lr * (below - quantile))


def noise_beside_a_count(noise: float, count_noise: float) -> float:
    r"""Return the noise multiplier of updates released with a noisy count (Andrew et al., 2021).

    .. math:: z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}

    Releasing the updates with :math:`z_\Delta` and the count of updates within the norm with
    :math:`\sigma_b` has the same privacy loss as releasing only the updates with :math:`z`. Each
    update contributes :math:`\pm 1/2` to the count.

    Args:
        noise: Total noise multiplier :math:`z`.
        count_noise: Standard deviation :math:`\sigma_b` of the noise on the count.

    Raises:
        FederationError: If the privacy loss of the count alone is at least as large.

    Example:
        >>> round(noise_beside_a_count(1.0, count_noise=1.0), 4)
        1.1547
    """
    if noise == 0:
        return 0.0
    if not 2 * count_noise > noise:
        raise FederationError(
            f"count_noise must be more than half of the noise multiplier {noise:g}, got"
            f" {count_noise:g}: increase count_noise"
        )
    return 1 / math.sqrt(noise**-2 - (2 * count_noise) ** -2)


def check_delta(delta: float, count: int, kind: str) -> None:
    r"""Check that :math:`\delta < 1/n`, beyond which one of :math:`n` may be revealed entirely.

    Args:
        delta: Probability :math:`\delta` with which the bound on the privacy loss may fail.
        count: Number :math:`n` of clients or samples.
        kind: What they are, for the message.

    Raises:
        FederationError: If it is not.

    Example:
        >>> check_delta(1e-5, 1000, "clients")
    """
    if not delta < 1 / count:
        raise FederationError(
            f"delta={delta:g} would allow revealing one of {count} {kind} entirely: delta must be"
            f" less than {1 / count:g}"
        )


def clipped_update(update: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\Delta \min(1, C / \|\Delta\|)`, and True if the norm is at most :math:`C`.

    Args:
        update: Client update :math:`\Delta`, ``[P]``. For privacy, it must be in float64: a norm in
            float32 may round to less than the true norm.
        clip: Clipping norm :math:`C`.

    Example:
        >>> import torch
        >>> clipped_update(torch.tensor([3.0, 4.0], dtype=torch.float64), clip=1.0)
        (tensor([0.6000, 0.8000], dtype=torch.float64), tensor(False))
    """
    norm = update.norm()
    # A norm of 0 gives infinity, which is clamped to 1.
    return update * (clip / norm).clamp(max=1.0), norm <= clip


def clipped_sum(gradients: Mapping[str, Tensor], clip: float) -> dict[str, Tensor]:
    r"""Return :math:`\sum_i g_i \min(1, C / \|g_i\|)` of the gradients of samples.

    Args:
        gradients: Gradients by name, ``[samples, *shape]``; a norm is over all names.
        clip: Clipping norm :math:`C`.

    Example:
        >>> clipped_sum({"w": torch.tensor([[3.0], [0.5]]), "b": torch.tensor([4.0, 0.0])}, 1.0)
        {'w': tensor([1.1000]), 'b': tensor(0.8000)}
    """
    norm = torch.linalg.vector_norm  # at least in float32: float64 takes ten times as long
    parts = [
        norm(g.reshape(len(g), -1), dim=1, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients.values()
    ]
    scale = (clip / norm(torch.stack(parts), dim=0)).clamp(max=1.0)
    return {name: torch.tensordot(scale.to(g), g, 1) for name, g in gradients.items()}


def sample_epsilon(steps: Mapping[tuple[float, float], int], delta: float) -> float:
    r"""Return :math:`\varepsilon` of DP-SGD steps with Poisson sampling, by Opacus' accountant.

    The neighboring relation is to add or remove one sample.

    Args:
        steps: Number of steps by noise multiplier and sampling rate.
        delta: :math:`\delta` of the guarantee.

    Returns:
        :math:`\varepsilon`. It is infinity if a step had no noise, and 0 without steps.

    Raises:
        FederationError: If Opacus is not installed.

    Example:
        >>> sample_epsilon({}, delta=1e-5)  # doctest: +SKIP
        0.0
        >>> round(sample_epsilon({(1.0, 0.1): 100}, delta=1e-5), 2)  # doctest: +SKIP
        7.9
    """
    opacus: Any = imported("opacus.accountants", user="DPSGD", extra="privacy")
    taken = {kind: count for kind, count in steps.items() if count}
    if not all(noise for noise, _ in taken):
        return math.inf
    if not taken:
        return 0.0
    losses = sum(count * _loss_of_step(*kind) for kind, count in taken.items())
    orders = opacus.RDPAccountant.DEFAULT_ALPHAS
    with warnings.catch_warnings():  # of orders at the end of the list, which are bounds, too
        warnings.simplefilter("ignore")
        spent = opacus.analysis.rdp.get_privacy_spent(orders=orders, rdp=losses, delta=delta)
    return float(spent[0])


@cache
def _loss_of_step(noise: float, rate: float) -> Any:
    """Return the Renyi differential privacy of a step at Opacus' orders, which adds up."""
    opacus: Any = imported("opacus.accountants", user="DPSGD", extra="privacy")
    orders = opacus.RDPAccountant.DEFAULT_ALPHAS
    return opacus.analysis.rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


def _accountants(cohort: Cohort) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return dp_accounting, and pairs of an accountant factory and an event factory.

    Each pair gives an upper bound on the privacy loss.
    """
    dp = imported("dp_accounting", user="privacy accounting", extra="privacy")
    relations = dp.NeighboringRelation
    one_more = partial(dp.rdp.RdpAccountant, neighboring_relation=relations.ADD_OR_REMOVE_ONE)
    another = partial(dp.rdp.RdpAccountant, neighboring_relation=relations.REPLACE_ONE)
    m, n = cohort.size, cohort.clients
    if not cohort.is_sampled:
        return dp, [(one_more, dp.GaussianDpEvent)]
    if cohort.drawn == "poisson":
        return dp, [(one_more, lambda z: dp.PoissonSampledDpEvent(m / n, dp.GaussianDpEvent(z)))]
    if cohort.drawn == "fixed":  # half the noise, because a sum differs by twice the norm

        def drawn(z: float) -> Any:
            return dp.SampledWithoutReplacementDpEvent(n, m, dp.GaussianDpEvent(z / 2))

        return dp, [(another, drawn), (another, lambda z: dp.GaussianDpEvent(z / 2))]
    raise FederationError(
        f"no privacy accountant supports this sampling of {m} of {n} clients: use"
        " PoissonSampler, UniformSampler, or client_fraction=1.0"
    )
