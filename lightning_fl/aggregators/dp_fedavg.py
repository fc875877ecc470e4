"""Client-level differential privacy."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn import functional

from lightning_fl.aggregators.fedopt import FedOpt
from lightning_fl.aggregators.privacy_checks import check_monitors, check_run
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import Cohort
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.privacy import (
    check_delta,
    clipped_update,
    epsilon,
    next_clip,
    noise_beside_a_count,
)
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.functional.summation import add_rows, sum_value
from lightning_fl.options import check_choice, check_number


class DPFedAvg(FedOpt):
    r"""Federated averaging with client-level differential privacy (McMahan et al., 2018).

    .. math:: w^{t+1} = w^t + \frac{1}{m} \Bigl( \sum_{k \in S_t} \Delta_k
        \min\bigl(1, \tfrac{C}{\|\Delta_k\|}\bigr) + N(0, z^2 C^2 I) \Bigr)

    where :math:`m` is the expected number of clients per round, independent of the number of
    updates received. All clients have equal weight. The metric ``epsilon`` is the privacy loss of
    all rounds so far (see :func:`~lightning_fl.functional.privacy.epsilon` for the guarantee),
    ``clip_norm`` is :math:`C`, and ``noise`` is the standard deviation of the noise on each entry
    of the mean.

    With a ``quantile`` the clipping norm adapts to the updates (Andrew et al., 2021). Each round
    then also releases a noisy count of the updates within the norm. The noise on the updates is
    increased so that the total privacy loss is unchanged
    (:func:`~lightning_fl.functional.privacy.next_clip`,
    :func:`~lightning_fl.functional.privacy.noise_beside_a_count`).

    The guarantee covers the models of all rounds, against an observer who knows neither the seed of
    the run, which determines noise and cohorts, nor the sampled clients. It does not cover metrics
    that clients report (``train_loss``, numbers of samples), per-client tables, or the
    communication between clients and server. Noise is drawn in float64 from a generator that is not
    cryptographically secure: use this rule to simulate a private federation, not to protect real
    data.

    Buffers are not updated: networks with BatchNorm require ``buffers: server``. Parameters that
    are not trained get no noise. ``min_clients`` above 1 is not allowed: every round releases a
    model, of noise alone if no client returned. Policies that learn from reports of single clients
    are not allowed either.

    With ``noise_by="clients"`` each client adds noise of variance :math:`z^2 C^2 / m` to its
    clipped update, so that under :class:`SecureAggregation` nobody sees an update without noise.
    The sum has the same distribution if all :math:`m` clients return. Noise of clients that drop
    out is missing: with :math:`r` updates the round counts in epsilon with the noise multiplier
    :math:`z \sqrt{r / m}`, and a round without updates releases nothing. Whether a client drops
    out must not depend on its data, and a client whose data are removed still adds its noise. The
    analysis leaves out that :class:`SecureAggregation` clips and rounds noisy updates before it
    adds them: choose a range that clips none, and integers whose steps are much smaller than the
    noise.

    Args:
        noise_multiplier: Noise multiplier :math:`z`. 0 gives no privacy.
        clip_norm: Clipping norm :math:`C`. With a ``quantile``, the norm of the first round.
        delta: :math:`\delta` of the guarantee. None means :math:`N^{-1.1}` for :math:`N` clients.
        quantile: Target fraction :math:`\gamma` of updates that are not clipped. None keeps the
            norm fixed.
        clip_lr: Learning rate :math:`\eta_C` of the clipping norm.
        count_noise: Standard deviation :math:`\sigma_b` of the noise on the count. None means
            :math:`m / 20`.
        optimizer: Function that creates the server optimizer, which takes one step per noisy mean.
            None means SGD with learning rate 1.
        noise_by: Whether the ``server`` adds noise to the sum, or the ``clients`` to their updates.
            The second one needs a known number of clients per round and no ``quantile``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if clients would
            change buffers, ``min_clients`` is more than 1, ``delta`` is not less than 1 divided by
            the number of clients, the accountant does not support the client sampling,
            dp-accounting is not installed, or the checkpoint was saved with another client
            sampling.

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
        noise_by: Literal["server", "clients"] = "server",
    ) -> None:
        super().__init__(optimizer, "uniform")
        self.noise_by = check_choice("noise_by", noise_by, "server", "clients")
        if quantile is not None and noise_by == "clients":
            raise FederationError(
                "the count of updates within the norm has no noise of clients: set quantile=None,"
                " or noise_by='server'"
            )
        self.noise_multiplier = float(check_number("noise_multiplier", noise_multiplier, min=0))
        self.clip_norm = float(check_number("clip_norm", clip_norm, above=0))
        self.delta = check_number("delta", delta, above=0, below=1, optional=True)
        self.quantile = check_number("quantile", quantile, min=0, max=1, optional=True)
        hint = "the paper uses 0.2"
        self.clip_lr = check_number("clip_lr", clip_lr, above=0, max=10, hint=hint)
        self.count_noise = check_number("count_noise", count_noise, above=0, optional=True)
        if quantile is not None and count_noise is not None:
            noise_beside_a_count(noise_multiplier, count_noise)
        self.register_buffer("clip", torch.tensor(self.clip_norm, dtype=torch.float64))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))
        #: Pairs of a noise multiplier and the number of rounds with it.
        self.ledger: list[tuple[float, int]] = []

    def setup(self, federation: Federation) -> None:
        """Raise an error if the run would reveal data of single clients."""
        super().setup(federation)
        name = type(self).__name__
        federation.refuse_stage(self, "the privacy loss of other stages would not be counted")
        check_run(name, federation)
        if self.noise_by == "clients" and self._drawn.drawn == "poisson" and self._drawn.is_sampled:
            raise FederationError(
                f"{name}(noise_by='clients') divides the noise by the number of clients, which"
                " PoissonSampler draws: use UniformSampler, or noise_by='server'"
            )

    def check_metrics(self, of_clients: Collection[str]) -> None:
        """Raise an error if a callback, scheduler or policy monitors client metrics."""
        if self.federation is not None and self.federation.trainer is not None:
            check_monitors(type(self).__name__, self.federation, of_clients)

    def allocate(self, server: Tensor) -> None:
        """Check delta and count_noise, and declare states; see :meth:`FedOpt.allocate`."""
        check_delta(self._delta, self._drawn.clients, "clients")
        epsilon([], self._delta, self._drawn)  # raises early if dp-accounting is missing
        if self.quantile is not None:
            noise_beside_a_count(self.noise_multiplier, self._count_noise)
            hint = "the maximum is the number of clients per round"
            size = self._drawn.size
            check_number("count_noise", self._count_noise, above=0, max=size, hint=hint)
        super().allocate(server)
        self.add_counts("below")  # halves, which are exact, too

    @property
    def _drawn(self) -> Cohort:
        return self.known_federation.sampling

    @property
    def _delta(self) -> float:
        return float(self._drawn.clients**-1.1) if self.delta is None else self.delta

    @property
    def _count_noise(self) -> float:
        return self._drawn.size / 20 if self.count_noise is None else self.count_noise

    @property
    def _norm(self) -> float:
        """Clipping norm of this round: the option if fixed, the adapted norm otherwise."""
        return self.clip_norm if self.quantile is None else float(self.clip)

    def update(self, clients: ClientUpdate) -> None:
        """Add clipped updates, and count the updates within the norm."""
        mask, norm = self._mask(), self._norm
        n = len(mask)
        # Row by row: a float64 copy of all would double the memory.
        for client, row in zip(clients.clients.tolist(), clients.delta[:, :n], strict=True):
            # Frozen parameters that the module changes, such as a moving average, are not released.
            short, is_below = clipped_update(row.double() * mask, norm)
            if self.noise_by == "clients":
                share = self.noise_multiplier * norm / self._drawn.size**0.5
                drawn = torch.randn(n, generator=self._random(client), dtype=torch.float64)
                short += share * drawn.to(short) * mask
            buffers = clients.delta.shape[1] - n
            add_rows(self.total, functional.pad(short, (0, buffers))[None])
            self.below += is_below.double() - 0.5
        self.weight += len(clients.delta)

    def _mask(self) -> Tensor:
        """Return the mask of trained parameters, without buffers."""
        if self.trained is not None:
            return self.trained
        return torch.ones_like(self.server[: self.num_parameters], dtype=torch.bool)

    def _random(self, *client: int) -> torch.Generator:
        """Return the generator of the noise of a round, of the server or of a client."""
        # Runs with other options draw other noise, or it would cancel in the difference of models.
        key = hashlib.sha256(self.known_federation.configuration.encode()).digest()[:7]
        stream = RandomStream.NOISE, int(self.round), int.from_bytes(key, "big")
        return generator(self.known_federation.seed, *stream, *client)

    def compute(self) -> Tensor:
        """Return the global model after one optimizer step with the noisy mean."""
        size, noise, mask = self._drawn.size, self.noise_multiplier, self._mask()
        random = self._random()
        if self.quantile is not None:
            noise = noise_beside_a_count(noise, self._count_noise)
        total = sum_value(self.total)[: len(mask)]
        if self.noise_by == "clients":
            noise *= (int(self.weight) / size) ** 0.5  # which the sum has already
        deviation = noise * self._norm
        if self.noise_by == "server":
            drawn = torch.randn(len(mask), generator=random, dtype=torch.float64)
            total += deviation * drawn.to(total.device)
        mean = total / size
        self.round_metrics = {"clip_norm": self._norm, "noise": deviation / size}
        if self.quantile is not None:
            count = float(torch.randn((), generator=random, dtype=torch.float64))
            count *= self._count_noise if noise else 0.0
            below = 0.5 + (float(self.below) + count) / size
            self.clip.fill_(next_clip(self._norm, below, self.quantile, self.clip_lr))
        self.round += 1
        self._pay(noise if self.noise_by == "clients" else self.noise_multiplier)
        # Buffers and parameters that are not trained stay.
        move = functional.pad(mean * mask.to(mean), (0, len(self.server) - len(mask)))
        return self._stepped(move[None], move)

    def _pay(self, noise: float) -> None:
        """Add the round to the privacy ledger, unless no client has sent a noisy update."""
        if self.noise_by == "server" or self.weight:
            count = 0
            if self.ledger and self.ledger[-1][0] == noise:
                noise, count = self.ledger.pop()
            self.ledger.append((noise, count + 1))
        self.round_metrics["epsilon"] = epsilon(self.ledger, self._delta, self._drawn)
        self.round_metrics["delta"] = self._delta

    def conclude(self, returned: int, min_clients: int) -> Tensor:
        """Return a new model in every round; keeping the model would reveal the client count."""
        model: Tensor = self.compute()
        return model

    def get_extra_state(self) -> dict[str, Any]:
        """Return the privacy ledger and the optimizer state for the checkpoint."""
        state = super().get_extra_state() | {"ledger": [list(entry) for entry in self.ledger]}
        if self.federation is not None:
            state |= {"drawn": self._drawn.drawn, "size": self._drawn.size}
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the privacy ledger, which is valid only for the same client sampling."""
        super().set_extra_state(state)
        self.ledger = [(noise, count) for noise, count in state["ledger"]]
        was, now = (state.get("drawn"), state.get("size")), (self._drawn.drawn, self._drawn.size)
        if self.ledger and was != now:
            raise FederationError(
                f"the checkpoint was saved with {was[0]!s:.20} cohorts of {was[1]!s:.20} clients,"
                f" and the current cohorts are {now[0]}, of {now[1]} clients: their privacy losses"
                " cannot be added. Use the same sampler and number of clients per round"
            )
