"""What every aggregation rule is."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_fl.federation.context import Federation
from lightning_fl.federation.exchange import ClientPart
from lightning_fl.functional.summation import all_reduced, empty_sum, merged_sums
from lightning_fl.types import ClientUpdate, RoundPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Aggregator(Metric, ABC):
    """Aggregate client updates into the next global model; a metric over client updates.

    A fit begins with ``setup(federation)``. A round is ``start(server)``, ``broadcast(plan)``,
    ``update(clients)`` as often as clients return, and ``conclude(returned, min_clients)``, which
    calls ``compute()``.

    What belongs to a round is a state, declared in :meth:`allocate` with its ``dist_reduce_fx``.
    What outlives it is a buffer, saved with the checkpoint. :meth:`update` copies what it keeps of
    an update.
    """

    full_state_update = False
    #: The run; None outside a fit.
    federation: Federation | None = None
    server: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("server", torch.zeros(0), persistent=False)

    def setup(self, federation: Federation) -> None:
        """Learn what the run is, once at the start of a fit, before the first :meth:`start`.

        A rule that does not fit the run raises a ``FederationError`` here.

        Args:
            federation: The run.
        """
        self.federation = federation
        # Where processes share the samples of a client, each of them has all updates already.
        self.distributed_available_fn = (
            _never if federation.shares_samples else jit_distributed_available
        )

    @property
    def num_parameters(self) -> int | None:
        """Length of the vector's part that parameters take, buffers follow; None is all of it."""
        return None if self.federation is None else self.federation.num_parameters

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round.

        Args:
            server: The global model, ``[P]``.
            trained: Mask of the parameters that clients train in this round,
                ``[num_parameters]``; None means all.
        """
        if self.server.shape != server.shape:
            # In full and on every process: one without clients has to gather the same shape.
            self.allocate(server)
            self.to(server.device)  # also what a rule has made on the CPU
        self.reset()
        self.server = server

    def client_parts(self) -> Sequence[ClientPart]:
        """Return what clients do for this rule besides training; asked once, after :meth:`setup`.

        See :class:`~lightning_fl.federation.exchange.ClientPart`.
        """
        return ()

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return what every client of a round gets besides the model, by name.

        Args:
            plan: The plan of the round.
        """
        return {}

    @abstractmethod
    def allocate(self, server: Tensor) -> None:
        """Declare states and buffers for parameters of this shape, dtype and device."""

    @abstractmethod
    def update(self, clients: ClientUpdate) -> None:
        """Take in the updates of one or more clients."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the server's new parameters, ``[P]``."""

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round: return the new global model, or None to keep the present one.

        Args:
            returned: Number of clients whose updates were taken in, on all processes.
            min_clients: Minimum number that changes the model; an option of the loop.
        """
        if returned < min_clients:
            self.on_round_skipped()
            return None
        return self.compute()

    def add_sum(self, name: str, *shape: int) -> None:
        """Declare a sum over clients that does not depend on their order, nor on the processes.

        See :mod:`lightning_fl.functional.summation`, whose ``add_rows`` and ``sum_value`` belong to
        it. A plain state with ``dist_reduce_fx="sum"`` is as good for whole numbers only.

        Args:
            name: Of the state.
            shape: Of an addend.
        """
        self.add_state(name, empty_sum(shape, self.device), dist_reduce_fx=merged_sums)

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        """Put the states of all processes together, of which some may have had no client.

        torchmetrics gathers an empty list as a float32 vector, which the lists of the others are
        not: here it has their type and shape. Sums are merged without a copy for each process.
        """
        group = process_group or self.process_group
        reductions = self._reductions
        self._type_empty_lists(group)
        for name in (name for name, reduce in reductions.items() if reduce is merged_sums):
            setattr(self, name, all_reduced(getattr(self, name), group))
        try:
            self._reductions = {k: v for k, v in reductions.items() if v is not merged_sums}
            super()._sync_dist(dist_sync_fn, process_group)
        finally:
            self._reductions = reductions

    def _type_empty_lists(self, group: Any) -> None:
        """Give empty list states the dtype and the row shape that other processes have."""
        lists = {name: getattr(self, name) for name, first in self._defaults.items() if first == []}
        if not lists:
            return
        own = {k: (rows[0].dtype, rows[0].shape[1:]) for k, rows in lists.items() if len(rows)}
        every: list[dict[str, Any]] = [{}] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(every, own, group=group)
        for name, rows in lists.items():
            known = [kinds[name] for kinds in every if name in kinds]
            if known and not len(rows):
                dtype, shape = known[0]
                rows.append(torch.zeros(0, *shape, dtype=dtype, device=self.device))

    def on_round_skipped(self) -> None:
        """Let a round pass in which too few clients returned, for a rule that counts rounds."""

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        value = super()._wrap_compute(compute)

        def wrapped() -> Tensor:
            with warnings.catch_warnings():  # A process may have no client of its own.
                warnings.filterwarnings("ignore", ".* was called before the ``update`` method")
                server: Tensor = value()
            return server.reshape(-1)  # torchmetrics makes a scalar of one parameter, [1].

        return wrapped

    def prepare(self, module: LightningModule, example: Callable[[], Any] | None = None) -> None:
        """Look at a module before a checkpoint is loaded, for a rule that replaces its network.

        Args:
            module: The user's module, with the shapes that clients train.
            example: Returns two training samples as the module gets them; None where nothing is
                trained.
        """

    def load_client_network(self) -> None:
        """Give the module the network that clients train."""

    def load_global_network(self, score: Callable[[], float] | None = None) -> None:
        """Give the module the network that is validated, tested and saved.

        Args:
            score: Returns the training accuracy of the module as it is.
        """

    def gather_by_client(self, *names: str) -> list[Tensor]:
        """Return lists that were kept of a round's clients, each as one tensor, by client.

        Processes return their clients in another order than one process does.

        Args:
            names: Of states; the first holds the clients' numbers.

        Returns:
            A tensor each; nothing where nobody returned.
        """
        # Lists, or what torchmetrics has gathered of them.
        states: list[Any] = [getattr(self, name) for name in names]
        if not len(states[0]):
            return []
        tensors = [torch.cat(state) if isinstance(state, list) else state for state in states]
        order = tensors[0].argsort()
        return [tensor[order] for tensor in tensors]

    def check_metrics(self, of_clients: Collection[str]) -> None:
        """Refuse decisions that follow certain metrics, for a rule that hides clients.

        Called at the end of each round, when its metrics are logged and nothing has acted on them.

        Args:
            of_clients: Names of the metrics that the loop logs of clients.
        """

    def metrics(self) -> dict[str, float]:
        """Return what is worth knowing after a round: it is logged, and put into the table."""
        return {}

    def plot(self) -> Figure | None:
        """Draw what a picture shows best; None if nothing."""
        return None

    def models_for(self, clients: Tensor) -> Tensor:
        """Return what each client starts from, ``[k, P]``."""
        return self.server.expand(len(clients), -1)


def _never() -> bool:
    """Say that processes need not talk to each other."""
    return False
