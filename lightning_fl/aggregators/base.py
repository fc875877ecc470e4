"""Base class of all aggregation rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available
from torchmetrics.utilities.data import dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_fl.aggregators.local_training import check_training
from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import run_seed
from lightning_fl.functional.summation import VectorSum
from lightning_fl.functional.tables import make_place
from lightning_fl.options import check_that


class Aggregator(Metric, ABC):
    """Aggregate client updates into the next global model.

    An aggregator is a ``torchmetrics.Metric`` over client updates. ``setup(federation)`` is called
    once at the start of a fit. Each round calls ``start(server)``, ``broadcast(plan)``,
    ``update(clients)`` for each batch of client updates, and
    ``conclude(returned, min_clients)``, which calls ``compute()``.

    Declare data of a single round as a state, with ``dist_reduce_fx``, in :meth:`allocate`. Declare
    data that persists across rounds as a buffer; it is saved with the checkpoint. :meth:`update`
    must copy the tensors that it stores.
    """

    full_state_update = False
    #: Whether the rule supports updates of clients that started from earlier models.
    is_asynchronous = False
    #: Whether the result depends on which parameters the clients train; see
    #: :meth:`Aggregator.start`.
    needs_trained_mask = False
    #: What the rule needs of local training; see ``local_training.check_training``.
    needs: Collection[str] = ()
    #: Buffers that grow in a run, such as tables of clients; a checkpoint has larger ones.
    grown: ClassVar[tuple[str, ...]] = ()
    #: Bits per value of updates that are sent in full, whatever the update transforms are. None:
    #: as the transforms say.
    sent_bits: int | None = None
    #: Description of the run. None outside a fit.
    federation: Federation | None = None
    server: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("server", torch.zeros(0), persistent=False)
        #: Sums of :meth:`add_sum` over the clients of this process, by name.
        self._sums: dict[str, VectorSum] = {}
        #: Mask of the parameters that clients train in the round, ``[num_parameters]``, or None.
        self.trained: Tensor | None = None
        #: Metrics of the round, which :meth:`metrics` returns.
        self.round_metrics: dict[str, float] = {}

    def setup(self, federation: Federation) -> None:
        """Configure the rule for a run, once at the start of a fit, before :meth:`start`.

        A rule that is incompatible with the run raises a ``FederationError`` here.

        Args:
            federation: Description of the run.
        """
        self.federation = federation
        check_training(self, federation)
        # A Trainer of one process may run beside others, in processes that know each other. If
        # processes share the samples of a client, every process already has all updates.
        is_alone = federation.trainer is not None and federation.trainer.world_size == 1
        is_alone = is_alone or federation.shares_samples
        self.distributed_available_fn = _never if is_alone else jit_distributed_available

    @property
    def num_parameters(self) -> int | None:
        """Number of leading vector entries that are parameters, before buffers; None means all."""
        return None if self.federation is None else self.federation.num_parameters

    @property
    def known_federation(self) -> Federation:
        """Description of the run, for rules that do not work outside of one."""
        if self.federation is None:
            raise FederationError(
                f"{type(self).__name__} requires the number of clients: use it in a FederatedLoop,"
                " or call its setup"
            )
        return self.federation

    def seed_of(self, seed: int | None) -> int:
        """Return a given seed, else that of the run, which a resumed run takes from its checkpoint.

        Outside of a fit, it is that of ``seed_everything``, or 0.

        Args:
            seed: Seed, or None.
        """
        known = self.federation if seed is None else None
        return run_seed(seed if known is None else known.seed)

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round.

        Args:
            server: Global model, ``[P]``.
            trained: Mask of the parameters that clients train in this round,
                ``[num_parameters]``. None means all.
        """
        if self.server.shape != server.shape:
            # Allocate on every process: a process without clients must gather the same shapes.
            self.allocate(server)
            self.to(server.device)  # move tensors that a rule created on the CPU
        if self.federation is not None:  # a scheduler may have changed the optimizer
            check_training(self, self.federation)
        self.reset()
        self.server, self.trained = server, trained
        self.round_metrics = {}

    def client_parts(self) -> Sequence[ClientPart]:
        """Return the client-side hooks of this rule. Called once, after :meth:`setup`.

        See :class:`~lightning_fl.contracts.client_part.ClientPart`.
        """
        return ()

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return named tensors to send to all clients of the round, in addition to the model.

        Args:
            plan: Plan of the round.
        """
        return {}

    def sampling_probabilities(self, num_samples: Tensor) -> Tensor | None:
        """Return the probabilities with which a sampler may draw the clients of the next round.

        They must depend on saved state only. None, the default, if the rule has none.

        Args:
            num_samples: Number of training samples per client, ``[num_clients]``.
        """
        return None

    def known_losses(self) -> Tensor | None:
        """Return the losses of clients by which a sampler may draw the next round, ``[N]``.

        They are infinite for clients that have not trained, and empty before the first round. None,
        the default, if the rule notes none.
        """
        return None

    @abstractmethod
    def allocate(self, server: Tensor) -> None:
        """Declare states and buffers.

        Args:
            server: Global model, ``[P]``, which sets shape, dtype and device.
        """

    @abstractmethod
    def update(self, clients: ClientUpdate) -> None:
        """Accumulate the updates of one or more clients.

        Args:
            clients: Client updates.
        """

    def not_sums(self) -> list[str]:
        """Return the names of what the rule keeps of single clients, known after :meth:`allocate`.

        It is empty for rules that need sums over the clients of a round only, those of
        :meth:`add_sum` and :meth:`add_counts`.
        """
        states = self._defaults.items()
        sums = {n: self._reductions[n] is dim_zero_sum for n in self._defaults}
        single = [n for n, first in states if not sums[n] or torch.as_tensor(first).numel() != 1]
        return [*single, *self.grown]

    def rejected(self, clients: Tensor) -> Mapping[int, str]:
        """Return the clients whose updates this rule does not accept, with the causes.

        Their updates are dropped. Each cause becomes a column of the table of rounds.

        Args:
            clients: Client indices, ``[k]``.
        """
        return {}

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the new global model, ``[P]``."""

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round. Return the new global model, or None to keep the current one.

        Args:
            returned: Number of accumulated client updates, over all processes.
            min_clients: Minimum number of client updates for a new model, an option of the loop.
        """
        if returned < min_clients:
            self.on_round_skipped()
            return None
        model = self.compute()
        return check_that(f"{type(self).__name__}.compute()", model, model is not None, "a tensor")

    def add_sum(self, name: str, length: int) -> None:
        """Declare a sum over clients that is independent of their order and of the processes.

        Use ``add_rows`` and ``sum_value`` of :mod:`lightning_fl.functional.summation` to add to the
        sum and to read it. A plain state with ``dist_reduce_fx="sum"`` is equivalent for integers
        only.

        Args:
            name: Name of the attribute.
            length: Length of an addend.
        """
        self._sums[name] = made = VectorSum(length, self.device)
        setattr(self, name, made)

    def sum_of(self, name: str) -> VectorSum:
        """Return a sum of :meth:`add_sum`; that of all processes, if they are gathered.

        Args:
            name: Name of the attribute.
        """
        total: VectorSum = vars(self)[name]
        return total

    def reset(self) -> None:
        """Reset the states; sums in place."""
        super().reset()
        vars(self).update(self._sums)
        for total in self._sums.values():
            total.reset()

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the states of another object of this rule."""
        super().merge_state(incoming_state)
        if isinstance(incoming_state, Aggregator):
            for name, total in self._sums.items():
                total.merge(incoming_state._sums[name])

    def release(self) -> None:
        """Free the sums and the model of the round; called when the model is in use."""
        for part in self.modules():
            if isinstance(part, Aggregator):
                part._computed = None
                for total in part._sums.values():
                    total.free()

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = "") -> nn.Module:
        made = super()._apply(fn, exclude_state)
        for total in self._sums.values():
            total.to(self.device)
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Resize the buffers that grow to their size in the checkpoint."""
        make_place(self, self.grown, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def add_counts(self, *names: str) -> None:
        """Declare sums of integers, such as counts, over clients: ``[1]`` in float64.

        Args:
            names: Names of the states.
        """
        for name in names:
            zero = torch.zeros(1, dtype=torch.float64, device=self.device)
            self.add_state(name, zero, dist_reduce_fx="sum")

    def add_lists(self, *names: str) -> None:
        """Declare lists with rows of all clients of a round.

        Use :meth:`append` to add rows, and :meth:`gather_by_client` to read them.

        Args:
            names: Names of the states.
        """
        for name in names:
            self.add_state(name, [], dist_reduce_fx="cat")

    def append(self, **rows: Tensor) -> None:
        """Add copies of the rows of clients to lists of :meth:`add_lists`.

        Args:
            rows: Rows, ``[k, ...]``, by the name of the list.
        """
        for name, values in rows.items():
            states: Any = self.metric_state[name]
            states.append(values.to(self.server.device, copy=True))

    def require_extras(self, clients: ClientUpdate, **shapes: tuple[int, ...]) -> None:
        """Raise an error if clients did not send what the rule needs in addition to updates.

        Call it before anything of the update is added: a server of remote clients then drops the
        client.

        Args:
            clients: Client updates.
            shapes: Shape for each client, by the name in ``clients.extras``.

        Raises:
            FederationError: If a tensor is missing or has another shape.
        """
        for name, shape in shapes.items():
            found = clients.extras.get(name)
            if found is None or found.shape != (len(clients.clients), *shape):
                raise FederationError(
                    f"{type(self).__name__} requires {name} of the clients, of shape {shape} each:"
                    f" use it in a FederatedLoop, or add {name} to the extras of the update"
                )

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None
    ) -> None:
        """Gather the states of all processes, including processes without clients.

        torchmetrics gathers an empty list as a float32 vector. Here an empty list gets the dtype
        and shape of the lists on other processes. Sums are merged without a copy per process.
        """
        group = process_group or self.process_group
        self._type_empty_lists(group)
        for name, total in self._sums.items():
            setattr(self, name, total.all_reduced(group))
        super()._sync_dist(dist_sync_fn, process_group)

    def unsync(self, should_unsync: bool = True) -> None:
        """Restore the states of this process after a gathering."""
        super().unsync(should_unsync)
        if should_unsync:
            vars(self).update(self._sums)

    def _type_empty_lists(self, group: Any) -> None:
        """Give empty list states the dtype and row shape of the other processes."""
        states: dict[str, Any] = self.metric_state
        lists = {name: rows for name, rows in states.items() if self._defaults[name] == []}
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
        """Handle a round with too few client updates, for example to count rounds."""

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # torchmetrics would copy a tensor, and squeeze one of shape [1] to a scalar.
        value = super()._wrap_compute(wraps(compute)(lambda: SimpleNamespace(model=compute())))

        @wraps(compute)
        def wrapped() -> Any:
            self._update_count = max(self._update_count, 1)  # a process may have no clients
            return value().model

        return wrapped

    def prepare(self, module: LightningModule, example: Callable[[], Any] | None = None) -> None:
        """Inspect the module before a checkpoint is loaded, for rules that replace its network.

        Args:
            module: The user's module, with the shapes that clients train.
            example: Function that returns a batch of two training samples, as passed to the module.
                None if nothing is trained.
        """

    def load_client_network(self) -> None:
        """Load the network that clients train into the module."""

    def load_global_network(self, score: Callable[[], float] | None = None) -> None:
        """Load the network that is validated, tested and saved into the module.

        Args:
            score: Function that returns the training accuracy of the module in its current state.
        """

    def gather_by_client(self, *names: str) -> list[Tensor]:
        """Concatenate the list states of a round, sorted by client index.

        Sorting makes the order of clients independent of the number of processes.

        Args:
            names: Names of the states. The first one holds the client indices.

        Returns:
            One tensor per state, or an empty list if no client returned.
        """
        # Lists, or tensors if torchmetrics has gathered them.
        states: list[Any] = [self.metric_state[name] for name in names]
        if not len(states[0]):
            return []
        tensors = [torch.cat(state) if isinstance(state, list) else state for state in states]
        order = tensors[0].argsort()
        return [tensor[order] for tensor in tensors]

    def check_metrics(self, of_clients: Collection[str]) -> None:
        """Reject callbacks and schedulers that monitor client metrics, for private rules.

        Called at the end of each round, after metrics are logged and before they are used.

        Args:
            of_clients: Names of the client metrics that the loop logs.
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last round. They are logged and written to the table of rounds."""
        return self.round_metrics

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the initial model of each client, ``[k, P]``.

        Args:
            clients: Client indices, ``[k]``.
        """
        return self.server.expand(len(clients), -1)

    def unused_entries(self, clients: Tensor) -> Tensor:
        """Return the number of trained entries that clients do not exchange, ``[k]``.

        They are not counted in ``bytes_up`` and ``bytes_down``. None by default: all zeros.

        Args:
            clients: Client indices, ``[k]``.
        """
        return torch.zeros(len(clients), dtype=torch.int64)


def _never() -> bool:
    """Return False: states need no synchronization across processes."""
    return False
