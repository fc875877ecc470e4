"""Base class of asynchronous aggregation rules, with the models that clients started from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.staleness import StalenessFunction, staleness_weight
from lightning_fl.options import check_choice, check_integer, check_number
from lightning_fl.samplers import AsynchronousSampler


class AsynchronousAggregator(Aggregator):
    r"""Base class of rules for clients that started from earlier versions of the global model.

    Version :math:`t` of the global model is the one at the start of round :math:`t`, counted from
    0. The :class:`~lightning_fl.samplers.AsynchronousSampler` of the run knows from which version
    each client of a round started. The rule keeps these versions as long as a client that started
    from them is in training: at most ``concurrency`` models, which are saved in checkpoints.

    The staleness :math:`\tau` of an update is the number of the round minus the version from which
    the client started. A round that keeps the global model counts as a version, too.

    Args:
        staleness: Function :math:`s(\tau)` of the weights: ``constant``, ``polynomial`` or
            ``hinge``; see :func:`~lightning_fl.functional.staleness.staleness_weight`.
        exponent: Exponent :math:`a` of the polynomial.
        slope: Slope :math:`A` of the hinge.
        delay: Staleness :math:`b` up to which the hinge is 1.
        max_staleness: Maximum staleness of an update. Updates that are staler are dropped and
            counted in the column ``too_stale`` of the table of rounds. None accepts all.

    Raises:
        FederationError: If an option is out of range.
    """

    is_asynchronous = True
    grown: ClassVar[tuple[str, ...]] = ("models", "versions")
    models: Tensor
    versions: Tensor
    time: Tensor

    def __init__(
        self,
        staleness: StalenessFunction = "polynomial",
        exponent: float = 0.5,
        slope: float = 10.0,
        delay: float = 4.0,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__()
        self.staleness = check_choice("staleness", staleness, "constant", "polynomial", "hinge")
        self.exponent = check_number("exponent", exponent, min=0)
        self.slope = check_number("slope", slope, min=0)
        self.delay = check_number("delay", delay, min=0)
        self.max_staleness = check_integer("max_staleness", max_staleness, min=0, optional=True)
        self._sampler: AsynchronousSampler | None = None
        self._round = 0
        #: Version from which each client of the round started. Other clients start from the
        #: current one.
        self._started: Mapping[int, int] = {}
        #: Row of each version in ``models``.
        self._rows: Mapping[int, int] = {}

    def setup(self, federation: Federation) -> None:
        """Refuse samplers of synchronous rounds."""
        super().setup(federation)
        federation.refuse_stage(self, "it needs the models of all rounds")
        name, sampler = type(self).__name__, federation.sampler
        if federation.trainer is not None and not isinstance(sampler, AsynchronousSampler):
            raise FederationError(
                f"{name} aggregates asynchronous rounds, and {type(sampler).__name__} samples"
                " clients that all start from the current model: set sampler to"
                " AsynchronousSampler(concurrency=...), or use another aggregator, such as"
                " FedAvg(weighting='uniform')"
            )
        self._sampler = sampler
        self._started = {}

    def allocate(self, server: Tensor) -> None:
        """Declare the weighted sum of a round, the number of updates, and the earlier models."""
        self.add_sum("total", len(server))
        self.add_counts("count")
        #: Earlier versions of the model that clients in training started from, ``[v, P]``.
        self.register_buffer("models", server.new_zeros(0, len(server)))
        #: Their numbers, ``[v]``.
        self.register_buffer("versions", torch.zeros(0, dtype=torch.int64, device=server.device))
        #: Virtual time at the end of the last round.
        self.register_buffer("time", torch.zeros((), dtype=torch.float64))

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round; see :meth:`Aggregator.start`."""
        super().start(server, trained)
        self._started = {}

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Look up from which versions the clients of the round started; send nothing more."""
        if self._sampler is None:
            return {}
        versions: list[int] = self.versions.tolist()
        if plan.round:
            before = self._sampler.flush(plan.round - 1)
            if (before.time, list(before.in_use)) != (float(self.time), versions):
                raise FederationError(
                    "the virtual clock differs from that of the checkpoint, so clients in training"
                    f" started from other models: round {plan.round} ended after"
                    f" {float(self.time):g} s there, and after {before.time:g} s here. To resume,"
                    " restore clients_per_round, the policy, and the options of"
                    " AsynchronousSampler and ClientFaults; to start a new run, remove ckpt_path"
                )
        self._round, flush = plan.round, self._sampler.flush(plan.round)
        self._started = dict(zip(flush.clients, flush.started, strict=True))
        self._rows = {version: row for row, version in enumerate(versions)}
        return {}

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the model from which each client started, ``[k, P]``."""
        versions = [self._started.get(client, self._round) for client in clients.tolist()]
        if all(version == self._round for version in versions):
            return self.server.expand(len(clients), -1)
        return torch.stack([self._model(version) for version in versions])

    def _model(self, version: int) -> Tensor:
        return self.server if version == self._round else self.models[self._rows[version]]

    def staleness_of(self, clients: Tensor) -> Tensor:
        r"""Return the staleness :math:`\tau` of the updates of clients, ``[k]``.

        Args:
            clients: Client indices, ``[k]``.
        """
        started = [self._started.get(client, self._round) for client in clients.tolist()]
        return self._round - torch.tensor(started, dtype=torch.int64)

    def rejected(self, clients: Tensor) -> Mapping[int, str]:
        """Return the clients whose staleness is above ``max_staleness``."""
        if self.max_staleness is None:
            return {}
        found = clients[self.staleness_of(clients) > self.max_staleness]
        return dict.fromkeys(found.tolist(), "too_stale")

    def weights(self, clients: Tensor) -> Tensor:
        r"""Return the weights :math:`s(\tau)` of the updates of clients, ``[k]`` in float64.

        Args:
            clients: Client indices, ``[k]``.
        """
        options = (self.staleness, self.exponent, self.slope, self.delay)
        return staleness_weight(self.staleness_of(clients), *options).to(self.server.device)

    def moves(self, clients: ClientUpdate) -> Tensor:
        """Return the local models minus the current global model, ``[k, P]`` in float64.

        Args:
            clients: Client updates.
        """
        away = self.models_for(clients.clients).double() - self.server.double()
        return away + clients.delta.double()

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round, and keep the models that clients in training started from."""
        model = super().conclude(returned, min_clients)
        if self._sampler is not None:
            flush = self._sampler.flush(self._round)
            kept = [self._model(version) for version in flush.in_use]
            self.models = torch.stack(kept) if kept else self.models[:0]
            self.versions = self.versions.new_tensor(flush.in_use)
            self.time.fill_(flush.time)
        return model
