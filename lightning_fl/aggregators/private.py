"""Differential privacy of clients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fl.aggregators.fedopt import FedOpt
from lightning_fl.aggregators.privacy_checks import check_monitors, check_run, noise_key
from lightning_fl.federation.context import Federation
from lightning_fl.functional.privacy import clipped_update, epsilon, next_clip, noise_beside_a_count
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.functional.summation import add_rows, sum_value
from lightning_fl.types import ClientUpdate, Cohort, FederationError


class DPFedAvg(FedOpt):
    r"""Averaging that is differentially private for each client (McMahan et al., 2018).

    .. math:: w^{t+1} = w^t + \frac{1}{m} \Bigl( \sum_{k \in S_t} \Delta_k
        \min\bigl(1, \tfrac{C}{\|\Delta_k\|}\bigr) + N(0, z^2 C^2 I) \Bigr)

    with :math:`m` the number of clients in a round that is expected, whoever returns. Every client
    counts once. After each round column ``epsilon`` says what all rounds so far have cost
    (:func:`~lightning_fl.functional.privacy.epsilon`, which says what is promised);
    ``clip_norm`` is :math:`C`, ``noise`` the standard deviation on each number of the mean.

    With a ``quantile`` the norm follows the updates (Andrew et al., 2021): a round also releases,
    with noise, how many were not longer, and the noise of updates grows so that both together cost
    what they did (:func:`~lightning_fl.functional.privacy.next_clip`,
    :func:`~lightning_fl.functional.privacy.noise_beside_a_count`).

    What is protected is the model, of every round, against anyone who sees it and does not know the
    run's seed, from which noise and cohorts follow, nor who took part. Not protected are figures
    that clients report (``train_loss``, numbers of samples), tables of clients, and what happens on
    a client's way to the server. Noise is drawn in float64 from a generator that is not
    cryptographic: this is a simulation of a private federation, not a guard of real secrets.

    Buffers stay the server's: BatchNorm wants ``buffers: server``, or another network. What is not
    trained has no noise. ``min_clients`` is refused: each round has its answer, of noise alone
    where nobody returned. So are policies that learn from what single clients report.

    Args:
        noise_multiplier: :math:`z`; 0 is no privacy.
        clip_norm: :math:`C`; with a ``quantile``, of the first round.
        delta: :math:`\delta`; None is :math:`N^{-1.1}` of :math:`N` clients.
        quantile: :math:`\gamma`, the part of updates that the norm shall not shorten; None keeps it
            fixed.
        clip_lr: :math:`\eta_C`, how fast the norm follows.
        count_noise: :math:`\sigma_b`, the noise of the count; None is :math:`m / 20`.
        optimizer: Of the server, a step for each noisy mean; None is SGD with learning rate 1.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if clients would
            change buffers, ``min_clients`` is more than 1, delta is not less than one client's
            part, cohorts are drawn in a way that no accountant knows, dp-accounting is not
            installed, or a checkpoint's cohorts were drawn otherwise.

    Example:
        >>> rule = DPFedAvg(noise_multiplier=0.0, clip_norm=1.0)
        >>> rule.setup(Federation(num_clients=2, sampling=Cohort(size=2, clients=2)))
        >>> rule.start(torch.zeros(2))
        >>> rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> rule.update(ClientUpdate(torch.arange(2), rows, torch.tensor([1, 9])))
        >>> rule.compute(), rule.metrics()["epsilon"]
        (tensor([0.3000, 0.4000]), inf)
    """

    below: Tensor
    clip: Tensor
    round: Tensor

    def __init__(
        self,
        noise_multiplier: float = 1.0,
        clip_norm: float = 1.0,
        delta: float | None = None,
        quantile: float | None = None,
        clip_lr: float = 0.2,
        count_noise: float | None = None,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__(optimizer, "uniform")
        infinity = float("inf")
        if not 0 <= noise_multiplier < infinity:
            raise FederationError(f"noise_multiplier must be at least 0, got {noise_multiplier}")
        if delta is not None and not 0 < delta < 1:
            raise FederationError(f"delta must be between 0 and 1, got {delta}")
        if quantile is not None and not 0 <= quantile <= 1:
            raise FederationError(f"quantile must be from 0 to 1, or None, got {quantile}")
        for name, value in (
            ("clip_norm", clip_norm),
            ("clip_lr", clip_lr),
            ("count_noise", count_noise),
        ):
            if value is not None and not 0 < value < infinity:
                raise FederationError(f"{name} must be positive and finite, got {value}")
        if clip_lr > 10:
            raise FederationError(f"clip_lr must be at most 10, got {clip_lr}: the paper has 0.2")
        if quantile is not None and count_noise is not None:
            noise_beside_a_count(noise_multiplier, count_noise)
        self.noise_multiplier, self.clip_norm = float(noise_multiplier), float(clip_norm)
        self.delta = delta
        self.quantile, self.clip_lr, self.count_noise = quantile, clip_lr, count_noise
        self.register_buffer("clip", torch.tensor(self.clip_norm, dtype=torch.float64))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))
        #: Noise multipliers of the rounds so far, and of how many rounds each.
        self.ledger: list[tuple[float, int]] = []
        self._figures: dict[str, float] = {}
        self._noise_key = 0
        self._trained: Tensor | None = None

    def setup(self, federation: Federation) -> None:
        """Refuse a run that reveals single clients."""
        super().setup(federation)
        name = type(self).__name__
        if not federation.is_rule(self):
            raise FederationError(
                f"{name} cannot be a stage of {type(federation.aggregator).__name__}: what other"
                " stages reveal would not be counted. Use it alone"
            )
        check_run(name, federation)
        self._noise_key = noise_key(federation)

    def check_metrics(self, of_clients: Collection[str]) -> None:
        """Refuse decisions that follow metrics of clients, which have no noise."""
        if self.federation is not None and self.federation.trainer is not None:
            check_monitors(type(self).__name__, self.federation.trainer, of_clients)

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round; see :meth:`Aggregator.start`."""
        super().start(server, trained)
        self._trained = trained

    def allocate(self, server: Tensor) -> None:
        """Refuse what cannot be private; see :meth:`FedOpt.allocate`."""
        n = self._drawn.clients
        if not self._delta < 1 / n:
            raise FederationError(
                f"delta={self._delta:g} lets one of {n} clients be given away whole: it must be"
                f" less than {1 / n:g}"
            )
        epsilon([], self._delta, self._drawn)  # says now that the library is missing
        if self.quantile is not None:
            noise_beside_a_count(self.noise_multiplier, self._count_noise)
            if self._count_noise > (size := self._drawn.size):
                raise FederationError(
                    f"count_noise={self._count_noise:g} drowns a count of {size} clients: lower it"
                )
        super().allocate(server)
        zero = torch.zeros((), dtype=torch.float64, device=server.device)
        self.add_state("below", zero, dist_reduce_fx="sum")

    @property
    def _drawn(self) -> Cohort:
        if self.federation is None:
            raise FederationError(
                f"{type(self).__name__} needs to know how clients are drawn: use it in a"
                " FederatedLoop, or call its setup"
            )
        return self.federation.sampling

    @property
    def _delta(self) -> float:
        return float(self._drawn.clients**-1.1) if self.delta is None else self.delta

    @property
    def _count_noise(self) -> float:
        return self._drawn.size / 20 if self.count_noise is None else self.count_noise

    @property
    def _norm(self) -> float:
        """The norm of this round: an option that is given anew counts, what was learned goes on."""
        return self.clip_norm if self.quantile is None else float(self.clip)

    def update(self, clients: ClientUpdate) -> None:
        """Add clipped updates, and count those that were short enough."""
        n, norm = len(self._mask()), self._norm
        for row in clients.delta[:, :n]:  # a copy of all in float64 would be twice their memory
            short, is_below = clipped_update(row.double(), norm)
            add_rows(self.total[:, :n], short[None])
            self.below += is_below.double() - 0.5
        self.weight += len(clients.delta)

    def _mask(self) -> Tensor:
        """Return of which parameters clients train; buffers are not among them."""
        if self._trained is not None:
            return self._trained
        return torch.ones_like(self.server[: self.num_parameters], dtype=torch.bool)

    def compute(self) -> Tensor:
        """Return the server's model after a step for the noisy mean."""
        assert self.federation is not None  # as _drawn has checked
        size, noise, mask = self._drawn.size, self.noise_multiplier, self._mask()
        key = (self.federation.seed, RandomStream.NOISE, int(self.round), self._noise_key)
        random = generator(*key)
        if self.quantile is not None:
            noise = noise_beside_a_count(noise, self._count_noise)
        deviation = noise * self._norm
        drawn = torch.randn(len(mask), generator=random, dtype=torch.float64)
        total = sum_value(self.total[:, : len(mask)])
        mean = (total + deviation * drawn.to(total.device)) / size
        self._figures = {"clip_norm": self._norm, "noise": deviation / size}
        if self.quantile is not None:
            count = float(torch.randn((), generator=random, dtype=torch.float64))
            count *= self._count_noise if noise else 0.0
            below = 0.5 + (float(self.below) + count) / size
            self.clip.fill_(next_clip(self._norm, below, self.quantile, self.clip_lr))
        self.round += 1
        self._pay()
        step = self._stepped((mean * mask.to(mean))[None])
        step[len(mask) :] = self.server[len(mask) :]
        return step

    def _pay(self) -> None:
        """Note the round in the ledger."""
        noise, count = self.noise_multiplier, 0
        if self.ledger and self.ledger[-1][0] == noise:
            noise, count = self.ledger.pop()
        self.ledger.append((noise, count + 1))
        self._figures["epsilon"] = epsilon(self.ledger, self._delta, self._drawn)
        self._figures["delta"] = self._delta

    def conclude(self, returned: int, min_clients: int) -> Tensor:
        """Return a new model, whoever returned: keeping the model would reveal their number."""
        model: Tensor = self.compute()
        return model

    def metrics(self) -> dict[str, float]:
        """Return what was spent so far, the norm, and the noise on each number of the mean."""
        return self._figures

    def get_extra_state(self) -> dict[str, Any]:
        """Return what was spent, for the checkpoint."""
        spent = [list(entry) for entry in self.ledger]
        if self.federation is None:
            return {**super().get_extra_state(), "ledger": spent}
        now = {"drawn": self._drawn.drawn, "size": self._drawn.size}
        return {**super().get_extra_state(), "ledger": spent, **now}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what was spent; it cannot be added up with cohorts that are drawn otherwise."""
        super().set_extra_state({k: state[k] for k in ("kind", "state") if k in state})
        ledger = state.get("ledger")
        if not isinstance(ledger, list) or not all(map(_is_entry, ledger)):
            raise FederationError(
                f"the checkpoint says that {ledger!s:.100} was spent: it must be pairs of a noise"
                " multiplier and a number of rounds"
            )
        self.ledger = [(float(noise), count) for noise, count in ledger]
        was, now = (state.get("drawn"), state.get("size")), (self._drawn.drawn, self._drawn.size)
        if self.ledger and was != now:
            raise FederationError(
                f"the checkpoint's cohorts were {was[0]!s:.20}, of {was[1]!s:.20} clients, now they"
                f" are {now[0]}, of {now[1]}: what both spent cannot be added up. Go back to the"
                " former sampler and number of clients per round"
            )


def _is_entry(entry: Any) -> bool:
    """Say whether something is a noise multiplier and a number of rounds."""
    if not isinstance(entry, list | tuple) or [*map(type, entry)] != [float, int]:
        return False
    return bool(entry[0] >= 0 and entry[1] >= 0)
