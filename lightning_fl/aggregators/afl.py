"""Worst-case mixtures of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.client_part import ClientPart, MeanLosses
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.fairness import ascend_mixture, draw_from_mixture
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_choice, check_number
from lightning_fl.samplers import AFLSampler


class AFL(Aggregator):
    r"""Minimize the loss of the worst mixture of clients (agnostic FL; Mohri et al., 2019).

    AFL solves :math:`\min_x \max_{\lambda} \sum_k \lambda_k F_k(x)` over mixtures
    :math:`\lambda` of the :math:`N` clients, by gradient descent in :math:`x` and projected
    gradient ascent in :math:`\lambda`. :math:`F_k` is the loss of the received model on all
    training samples of client :math:`k`, before it trains. Both steps use the former
    :math:`\lambda`. There are two modes:

    - ``weights``: all clients train, and :math:`x \leftarrow x + \sum_{k \in S} \lambda_k (y_k - x)
      / \sum_{k \in S} \lambda_k`, where :math:`S` are the clients that returned. With one local
      step this is the gradient step of AFL. All their losses are used.
    - ``sampling``: as in DRFA (Deng et al., 2020), :math:`m` clients (``clients_per_round``) are
      drawn with replacement with probabilities :math:`\lambda`, and :math:`x` is the mean of the
      models of these draws; a client that was drawn twice counts twice. The losses are those of
      :math:`m` other clients, drawn uniformly without replacement: the losses of clients drawn with
      :math:`\lambda` would be biased. These train too, but their updates have no weight, so a round
      has up to :math:`2 m` clients. Requires the sampler
      :class:`~lightning_fl.samplers.AFLSampler`.

    With the losses of the clients :math:`U` that returned them, the ascent step is

    .. math:: \lambda_U \leftarrow \Pi\left(\lambda_U + \gamma \frac{N - 1}{\lvert U \rvert - 1}
        F_U\right),

    where :math:`\Pi` is the projection onto the non-negative vectors with the former sum of
    :math:`\lambda_U`. Other clients, such as dropped ones, keep their :math:`\lambda_k`. If all
    clients return, this is the step of AFL. If :math:`U` is a uniform sample, the step inside the
    simplex has the expectation of that of all clients, :math:`\gamma (F_k - \bar F)`. DRFA also has
    this expectation, but takes the losses of all other clients as 0, which decreases their
    :math:`\lambda_k`.

    ``gamma=0`` is :class:`FedAvg` in the mode ``weights``, bit for bit. A round that keeps the
    model keeps :math:`\lambda`. Attacks and update transforms change :math:`y_k - x`.

    Args:
        gamma: Step size :math:`\gamma` of the ascent. Losses are not normalized, so it depends on
            their scale; with 100 clients, 0.01 changes :math:`\lambda_k` by as much as its initial
            value if losses differ by 1.
        initial: Initial mixture: ``uniform``, or in proportion to the numbers of ``samples``.
        mode: ``weights`` or ``sampling``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if clients or sampler
            are not those of the mode, or the module returns no losses.

    Example:
        >>> from lightning_fl.types import Cohort
        >>> rule = AFL(gamma=0.1)
        >>> rule.setup(Federation(num_clients=2, sampling=Cohort(size=2, clients=2)))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor([[1.0], [3.0]]),
        ...     torch.tensor([8, 8]), extras={"loss_before": torch.tensor([1.0, 2.0])}))
        >>> rule.compute(), rule.mixture
        (tensor([2.]), tensor([0.4500, 0.5500], dtype=torch.float64))
    """

    needs = ("losses",)
    weights: Tensor
    losses: Tensor
    returned: Tensor
    total: VectorSum
    weight: VectorSum

    def __init__(
        self,
        gamma: float = 0.01,
        initial: Literal["uniform", "samples"] = "uniform",
        mode: Literal["weights", "sampling"] = "weights",
    ) -> None:
        super().__init__()
        self.gamma = check_number("gamma", gamma, min=0)
        self.initial = check_choice("initial", initial, "uniform", "samples")
        self.mode = check_choice("mode", mode, "weights", "sampling")
        # Not normalized, so that initial weights are integers: their sums are exact.
        self.register_buffer("weights", torch.zeros(0, dtype=torch.float64))
        #: Numbers of draws, and mask of the clients whose losses are used, ``[N]``; None is of all.
        self._draws: tuple[Tensor, Tensor] | None = None

    def setup(self, federation: Federation) -> None:
        """Refuse clients and samplers that are not those of the mode."""
        super().setup(federation)
        name, size = type(self).__name__, federation.sampling.size
        has_sampler = isinstance(federation.sampler, AFLSampler)
        if self.mode == "weights":
            if has_sampler or size < federation.num_clients:
                raise FederationError(
                    f"{name}(mode='weights') trains all {federation.num_clients} clients in every"
                    " round: leave out clients_per_round, client_fraction and AFLSampler, or set"
                    " mode='sampling'"
                )
            return
        federation.refuse_stage(self, "its sampler draws clients by its mixture")
        if federation.sampler is not None and not has_sampler:
            raise FederationError(
                f"{name}(mode='sampling') draws clients: set sampler=AFLSampler()"
            )
        if size < 2:
            raise FederationError(
                f"{name}(mode='sampling') compares the losses of clients: set clients_per_round to"
                f" at least 2, got {size}"
            )

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients evaluate the received model."""
        return [MeanLosses(after=False)]

    @property
    def mixture(self) -> Tensor:
        r"""Mixture :math:`\lambda` on the CPU, ``[N]``; empty before the first round."""
        weights = self.weights.cpu()
        return weights / weights.sum()

    def sampling_probabilities(self, num_samples: Tensor) -> Tensor | None:
        """Return the mixture in the mode ``sampling``; see :meth:`Aggregator`."""
        if self.mode == "weights":
            return None
        if len(self.weights):
            return self.mixture
        first = num_samples.double()
        if self.initial == "uniform":
            first = torch.ones_like(first)
        return first / first.sum()

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Repeat the draws of the sampler; send nothing."""
        if self.mode == "sampling":
            random = generator(plan.seed, RandomStream.COHORT, plan.round)
            count, device = self.known_federation.sampling.size, self.weights.device
            draws, evaluated = draw_from_mixture(self.mixture, count, random)
            self._draws = draws.to(device), evaluated.to(device)
        return {}

    def allocate(self, server: Tensor) -> None:
        """Declare the sums of a round, and the mixture."""
        federation = self.known_federation
        self.add_sum("total", len(server))
        self.add_sum("weight", 1)
        first = torch.ones(federation.num_clients, dtype=torch.float64, device=server.device)
        if self.initial == "samples" and federation.num_samples is not None:
            first = federation.num_samples.to(first)
        for name in ("losses", "returned"):  # each client returns to one process
            self.add_state(name, torch.zeros_like(first), dist_reduce_fx="sum")
        self.weights = first

    def update(self, clients: ClientUpdate) -> None:
        """Add weighted updates to their sum, and note the losses."""
        self.require_extras(clients, loss_before=())
        ids = clients.clients.to(self.weights.device)
        weights = (self.weights if self._draws is None else self._draws[0].double())[ids]
        add_rows(self.total, clients.delta, weights)
        add_rows(self.weight, weights[:, None])
        self.losses[ids] = clients.extras["loss_before"].to(self.losses)
        self.returned[ids] = 1.0

    def compute(self) -> Tensor:
        """Return the next model, and change the mixture."""
        weight, found = sum_value(self.weight), self.returned > 0
        if self._draws is not None:
            found &= self._draws[1]
        if found.any():
            losses = self.losses[found]
            agnostic = self.weights[found] @ losses / self.weights[found].sum().clamp(min=1e-300)
            self.weights = ascend_mixture(self.weights, self.losses, found, self.gamma)
            self.round_metrics = {
                "loss_max": float(losses.max()),
                "loss_mean": float(losses.mean()),
                "loss_mixture": float(agnostic),
                "mixture_max": float(self.mixture.max()),
            }
        if not weight > 0:  # nobody with a weight returned
            return self.server
        return (self.server + sum_value(self.total) / weight).to(self.server.dtype)
