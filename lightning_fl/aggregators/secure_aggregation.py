"""Secure aggregation, simulated: a rule sees the sum of fixed-point integers only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.fixed_point import FixedPointSum
from lightning_fl.functional.summation import sum_value
from lightning_fl.options import check_integer, check_number


class SecureAggregation(Aggregator):
    r"""Let a rule compute from the sums that secure aggregation would reveal.

    In secure aggregation (Bonawitz et al., 2017) clients send masked integers whose masks cancel in
    the sum modulo :math:`2^b`. This rule computes the same sum without masks: **it hides nothing**.
    It shows which model a rule finds from clipped and rounded updates. Each client clips the
    entries of its update to :math:`[-c, c]`, multiplies it by its weight, and rounds it to an
    integer (:mod:`~lightning_fl.functional.fixed_point`); the server adds the integers modulo
    :math:`2^b`, and the wrapped rule reads the sum. For weights :math:`n_k`, the mean of the
    updates of clients :math:`S`, none of which is clipped, has an error of at most

    .. math:: \frac{|S|\, c \max_k n_k}{2\, q_{\max} \sum_{k \in S} n_k}, \qquad
        q_{\max} = \Bigl\lfloor \frac{2^{b-1} - 1}{M} \Bigr\rfloor,

    for at most :math:`M` clients in a round: all clients, if their number is drawn.

    The sum does not depend on the order of the clients or on the number of processes, and cannot
    wrap around. Sums of single numbers, such as numbers of samples, are exact, unless the model has
    a single parameter.

    The table of rounds has the bits per value (``secure_bits``), the share of clipped entries
    (``secure_clipped``), and the norm of the errors of rounding relative to that of what was
    rounded (``secure_rounding``), over all clients. Every client sends all trained parameters with
    :math:`b` bits, also after :class:`~lightning_fl.transforms.TopK`.

    Supported are rules that need sums only: :class:`FedAvg`, server optimizers, :class:`Scaffold`,
    :class:`FedDyn`, :class:`FedNova`, :class:`FedExP`, :class:`NormClipping`, :class:`DPFedAvg`,
    and with a ``max_weight`` :class:`FedCM`. What a rule does before it adds, such as clipping a
    norm, is done by the clients. With ``DPFedAvg(noise_by="clients")`` no party sees an update
    without noise.

    Args:
        aggregator: The rule; None means :class:`FedAvg`.
        clip: Bound :math:`c` on the entries of an update.
        bits: Number :math:`b` of bits per value, at most 53.
        max_weight: Largest weight of a client. None means 1 for a rule with
            ``weighting="uniform"``, and the largest number of samples of a client otherwise.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the rule needs the
            updates of single clients, as the policy may, if clients change integer buffers, or if
            the sum does not fit into the bits.

    Example:
        >>> from lightning_fl.types import Cohort
        >>> rule = SecureAggregation(bits=16)
        >>> samples = torch.tensor([3, 1])
        >>> rule.setup(Federation(2, Cohort(size=2, clients=2), num_samples=samples))
        >>> rule.start(torch.zeros(2))
        >>> rows = torch.tensor([[0.0, 0.5], [4.0, -0.5]])
        >>> rule.update(ClientUpdate(torch.arange(2), rows, samples))
        >>> rule.compute(), rule.metrics()["secure_clipped"]  # 4 is clipped to 1
        (tensor([0.2500, 0.2500]), 0.25)
    """

    def __init__(
        self,
        aggregator: Aggregator | None = None,
        clip: float = 1.0,
        bits: int = 32,
        max_weight: float | None = None,
    ) -> None:
        super().__init__()
        self.aggregator = FedAvg() if aggregator is None else aggregator
        self.clip = float(check_number("clip", clip, above=0))
        self.bits = self.sent_bits = check_integer("bits", bits, min=2, max=53)
        self.max_weight = check_number("max_weight", max_weight, above=0, optional=True)
        self.needs_trained_mask = self.aggregator.needs_trained_mask

    def setup(self, federation: Federation) -> None:
        """Set up the rule; refuse what reads more than sums beside it."""
        super().setup(federation)
        name = type(self).__name__
        federation.refuse_stage(self, "its messages have another size than those of other stages")
        policy, layout = federation.policy, federation.layout
        if policy is not None and "contributions" in policy.learns_from:
            raise FederationError(
                f"{type(policy).__name__} learns from the updates of single clients, and {name}"
                " reveals their sum only: let the policy learn from losses, or use a Schedule"
            )
        if layout is not None and layout.num_counters and federation.buffers != "server":
            raise FederationError(
                f"clients change integer buffers (num_batches_tracked of BatchNorm), of which the"
                f" server takes the maximum, and {name} reveals sums only: set buffers='server'"
            )
        self.aggregator.setup(replace(federation, aggregator=self.aggregator))

    def allocate(self, server: Tensor) -> None:
        """Declare the states of the rule, with sums of integers; refuse a rule of other states."""
        rule, cohort = self.aggregator, self.known_federation.sampling
        rule.allocate(server)
        rule.server = server
        rule.to(server.device)
        if (single := rule.not_sums()) or not rule._sums:
            raise FederationError(
                f"{type(rule).__name__} needs more than sums over clients"
                f" ({', '.join(single) or 'other rules'}), and {type(self).__name__} reveals sums"
                " only: use a rule such as FedAvg, FedOpt, Scaffold or DPFedAvg"
            )
        options: dict[str, Any] = {
            "clip": self.clip,
            "bits": self.bits,
            "max_weight": self._largest_weight(),
            "clients": cohort.size if cohort.drawn == "fixed" else cohort.clients,
        }
        for name, total in rule._sums.items():
            if total.length != 1 or len(server) == 1:
                rule._sums[name] = FixedPointSum(total.length, server.device, **options)
        rule.reset()

    def _largest_weight(self) -> float:
        """Return the largest weight of a client."""
        samples = self.known_federation.num_samples
        if self.max_weight is not None:
            return self.max_weight
        if getattr(self.aggregator, "weighting", None) == "uniform":
            return 1.0
        if samples is None:
            raise FederationError(
                f"{type(self).__name__} needs the largest weight of a client, which is unknown"
                " outside of a fit: set max_weight"
            )
        return float(samples.max())

    # --- the rule ---------------------------------------------------------------------------------

    def client_parts(self) -> Sequence[ClientPart]:
        """Return the client-side hooks of the rule."""
        return self.aggregator.client_parts()

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round."""
        super().start(server, trained)
        self.aggregator.start(server, trained)

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return the tensors that the rule sends to clients."""
        return self.aggregator.broadcast(plan)

    def update(self, clients: ClientUpdate) -> None:
        """Add the integers of one or more clients."""
        self.aggregator.update(clients)

    def compute(self) -> Tensor:
        """Return the new global model, from the sums."""
        self._note()
        model: Tensor = self.aggregator.compute()
        return model

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round of the rule; see :meth:`Aggregator.conclude`."""
        self._note()
        return self.aggregator.conclude(returned, min_clients)

    def _note(self) -> None:
        """Note what clipping and rounding did, on all processes."""
        found = [t.figures for t in self.aggregator._sums.values() if isinstance(t, FixedPointSum)]
        if self.distributed_available_fn():
            found = [each.all_reduced(self.process_group) for each in found]
        clipped, count, errors, squares = torch.stack([sum_value(t) for t in found]).sum(0).tolist()
        self.round_metrics = {
            "secure_bits": self.bits,
            "secure_clipped": clipped / max(count, 1),
            "secure_rounding": (errors / squares) ** 0.5 if squares else 0.0,
        }

    def check_metrics(self, of_clients: Collection[str]) -> None:
        """Let the rule reject callbacks and schedulers; see :meth:`Aggregator.check_metrics`."""
        self.aggregator.check_metrics(of_clients)

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the initial model of each client, ``[k, P]``."""
        return self.aggregator.models_for(clients)

    def unused_entries(self, clients: Tensor) -> Tensor:
        """Return the number of trained entries that clients do not exchange, ``[k]``."""
        return self.aggregator.unused_entries(clients)

    def metrics(self) -> dict[str, float]:
        """Return the bits, the share of clipped entries, the error, and the rule's metrics."""
        return self.round_metrics | self.aggregator.metrics()
