"""What a place where clients train offers to the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fl.federation.layout import VectorLayout
from lightning_fl.runners.fresh import check_fresh
from lightning_fl.runners.optimizer_state import OptimizerState
from lightning_fl.runners.optimizer_values import around_steps
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors
from lightning_fl.types import FederationError, ServerState

BufferPolicy = Literal["average", "server", "local"]
Rows = Mapping[str, Tensor]
#: Maps the stacked parameters of the clients in training, ``[k, *shape]`` by name, to what is added
#: to their gradients.
GradientTerm = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def flat(tensor: Tensor) -> Tensor:
    """All numbers of a tensor in one row; a complex number is two."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def is_floating(tensor: Tensor) -> bool:
    """Say whether a tensor holds numbers that can be averaged."""
    return tensor.is_floating_point() or tensor.is_complex()


def to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU; those of a dtype in one copy, as each waits for the device."""
    found = dict(tensors)
    away = {name: t.detach() for name, t in tensors.items() if t.device.type != "cpu"}
    for dtype in {t.dtype for t in away.values()}:
        alike = {name: t for name, t in away.items() if t.dtype == dtype}
        copy = torch.cat([t.reshape(-1) for t in alike.values()]).cpu()
        pieces = copy.split([t.numel() for t in alike.values()])
        for (name, tensor), piece in zip(alike.items(), pieces, strict=True):
            found[name] = piece.view(tensor.shape)
    return found


def local_parameters(module: LightningModule) -> list[str]:
    """Return the names of parameters that stay with each client.

    Raises:
        FederationError: If one is not a parameter, or if none is left to share.
    """
    names = list(getattr(module, "federated_local_parameters", None) or ())
    known = dict(module.named_parameters())
    for name in names:
        if name not in known:
            raise FederationError(
                f"{type(module).__name__}.federated_local_parameters names {name!r}, which is no"
                " parameter"
            )
    if names and len(set(names)) == len(known):
        raise FederationError(
            f"all parameters of {type(module).__name__} stay with the clients"
            " (federated_local_parameters): there is nothing to train together"
        )
    return names


class TensorList:
    """Tensors read and written as one vector, in one dtype that holds them all."""

    def __init__(self, tensors: Iterable[Tensor], empty: torch.dtype) -> None:
        self.tensors = list(tensors)
        views = [flat(t) for t in self.tensors]
        self.sizes = [len(v) for v in views]
        self.dtype = empty
        for i, view in enumerate(views):
            self.dtype = view.dtype if i == 0 else torch.promote_types(self.dtype, view.dtype)
        self.device = views[0].device if views else torch.device("cpu")

    def read(self) -> Tensor:
        """Return a copy, ``[sum of sizes]``."""
        if not self.tensors:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.cat([flat(t).to(self.device) for t in self.tensors]).to(self.dtype)

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Copy a vector into the tensors."""
        if not self.tensors:
            return
        plain = [torch.view_as_real(t) if t.is_complex() else t for t in self.tensors]
        rows = vector.split(self.sizes)
        torch._foreach_copy_(plain, [r.view_as(t) for r, t in zip(rows, plain, strict=True)])


class ClientRunner(ABC):
    """Where clients train: loaded with the server's state, collected after their last step.

    A module may name parameters that stay with each client (``federated_local_parameters``): they
    are neither averaged nor sent. A new client starts from the module's values, and a client finds
    its own again.

    Args:
        module: The user's module; between rounds it holds the server's model.
        buffers: What becomes of floating buffers after a client. ``average``: they are averaged
            like parameters, integer buffers keep their maximum. ``server``: the server keeps its
            own. ``local``: each client keeps its own, the server the average.
        optimizer: The optimizer of local training.
        keep_optimizer: Whether a client keeps its optimizer's state from round to round.
    """

    def __init__(
        self,
        module: LightningModule,
        buffers: BufferPolicy,
        optimizer: torch.optim.Optimizer,
        keep_optimizer: bool,
    ) -> None:
        self.module = module
        self.buffers, self.optimizer, self.keep_optimizer = buffers, optimizer, keep_optimizer
        self.tensors = ModuleTensors(module)
        self.named_parameters, self.named_buffers = self.tensors.parameters, self.tensors.buffers
        self._has_warned_of_late = False
        #: What a new client's own parameters are.
        self.private = {
            name: self.named_parameters[name].detach().clone() for name in local_parameters(module)
        }
        exchanged = {n: p for n, p in self.named_parameters.items() if n not in self.private}
        #: Parameters that are averaged, by name.
        self.shared = {n: p for n, p in exchanged.items() if is_floating(p)}
        #: Integer parameters, which nothing trains, and integer buffers, by name.
        self.named_counters = {
            name: tensor
            for name, tensor in {**exchanged, **self.named_buffers}.items()
            if not is_floating(tensor)
        }
        floats = [b for b in self.named_buffers.values() if is_floating(b)]
        self.vector = TensorList([*self.shared.values(), *floats], torch.float32)
        self.num_parameters = sum(flat(p).numel() for p in self.shared.values())
        self.counters = TensorList(self.named_counters.values(), torch.int64)
        #: The optimizer's own learning rate, which a client's is a ratio to. With a scheduler it is
        #: the first value: the scheduler's factor stays in force.
        group = optimizer.param_groups[0]
        self.base_lr = float(group.get("initial_lr", group.get("lr", 0.0)))
        #: Clients in training.
        self.count = 1
        #: Samples of each local step and lane of the batch, and who still trains, ``[steps, k]``.
        self.sizes = self.active = torch.zeros(0, 1)
        self._ratio, self._own_lr = 1.0, list[Any]()
        #: What is added to the gradients of the clients in training.
        self.gradient_terms: list[GradientTerm] = []
        #: What the optimizer learns, wherever it keeps it.
        self.optimizer_state = OptimizerState(optimizer)
        check_fresh(self.optimizer_state, keep_optimizer)
        #: The first group's rate in each local step of the clients, without their own ratio.
        self._step_rates: list[Any] = []
        self._end_steps = around_steps(optimizer, self._before_step, self.end_step)

    # --- the server's model -----------------------------------------------------------------------

    def adopt(self) -> None:
        """Take back buffers that the module replaced; see ``ModuleTensors.adopt``."""
        self.tensors.adopt()

    def read(self) -> ServerState:
        """Return a copy of the module's state."""
        self.adopt()
        return ServerState(self.vector.read(), self.counters.read())

    def write(self, state: ServerState) -> None:
        """Put a state into the module and make the optimizer fresh."""
        self.adopt()
        self._warn_of_late_buffers()
        self.vector.write(state.vector)
        self.counters.write(state.counters)
        with torch.no_grad():
            for name, first in self.private.items():
                self.named_parameters[name].copy_(first)
        self.optimizer_state.reset()
        self.gradient_terms = []

    def _warn_of_late_buffers(self) -> None:
        """Say once which buffers clients cannot get fresh, since they are newer than the fit."""
        late = [n for n, _ in self.module.named_buffers() if n not in self.named_buffers]
        if late and not self._has_warned_of_late:
            self._has_warned_of_late = True
            rank_zero_warn(
                f"{type(self.module).__name__} registered the buffer {late[0]} during the fit: it"
                " passes from client to client and is not averaged. Register it before the fit, or"
                " run the module once on a sample before"
            )

    def close(self) -> None:
        """Let go of the optimizer."""
        self._end_steps()
        self._restore_lr()  # an exception inside a step comes before the hook after it
        if self.wants_fixed:
            vars(self.module)[GLOBAL_PARAMETERS] = {}

    @property
    def layout(self) -> VectorLayout:
        """Where each exchanged tensor lies in the vector."""
        floats = {n: b for n, b in self.named_buffers.items() if is_floating(b)}
        tensors = {**self.shared, **floats}
        shapes = {
            n: torch.Size([*t.shape, 2]) if t.is_complex() else t.shape for n, t in tensors.items()
        }
        is_complex = frozenset(n for n, t in tensors.items() if t.is_complex())
        counters = sum(self.counters.sizes)
        return VectorLayout(shapes, self.num_parameters, is_complex, counters, self.vector.dtype)

    def trained_mask(self) -> Tensor | None:
        """Return which entries of the exchanged parameters are trained; None means all.

        Asked each round: a callback may thaw layers.
        """
        params = self.shared.values()
        if all(p.requires_grad for p in params):
            return None
        return torch.cat([flat(torch.full_like(p, p.requires_grad)).bool() for p in params])

    @property
    def wants_fixed(self) -> bool:
        """Whether the module has a place for the parameters that its client starts from."""
        return self.tensors.wants_start

    # --- clients ----------------------------------------------------------------------------------

    @abstractmethod
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Begin clients, one a lane, with the tensors that they kept for themselves.

        Args:
            state: What they start from: vectors ``[k, P]``, counters ``[C]``.
            rows: What :meth:`rows` returned at the end of their last round.
            lr: Learning rates of the first parameter group; the others keep their ratio to it.

        Raises:
            FederationError: If the optimizer has no learning rate to be a ratio to.
        """

    def begin_batch(  # noqa: B027  # one client has the samples that it has
        self, sizes: Callable[[], Tensor], active: Tensor
    ) -> None:
        """Note what the local steps of a Lightning batch are made of.

        Args:
            sizes: Returns the samples of each step and client, ``[steps, k]``.
            active: Which clients still train in each step, ``[steps, k]``.
        """

    @abstractmethod
    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the clients' moves away from ``state``, ``[k, P]``, and counters, ``[k, C]``.

        Args:
            state: What they started from.
        """

    @abstractmethod
    def client_parameters(self) -> dict[str, Tensor]:
        """Return the exchanged parameters of the clients in training, ``[k, *shape]`` by name.

        They are the tensors themselves, without gradients: what is written to them is trained on.
        """

    @abstractmethod
    def reported(self, outputs: Any) -> Tensor:
        """Return each client's task loss in the first local step of a Lightning batch, ``[k]``.

        Args:
            outputs: What Lightning kept of the training step: of the batch's last local step.
        """

    @contextmanager
    def client(self, lane: int) -> Iterator[None]:
        """Let the module have a client's tensors for a while, to read and write them."""
        yield

    @abstractmethod
    def rows(self) -> list[dict[str, Tensor]]:
        """Return the tensors that each client keeps for itself."""

    def _moved(self, local: Tensor, state: ServerState) -> Tensor:
        """How far local vectors, ``[k, P]``, which are used up, are from where they started."""
        at = self.num_parameters
        # A buffer may hold infinity for good, as attention masks do: what stayed has not moved.
        kept = local[:, at:] == state.vector[:, at:]
        delta = local.sub_(state.vector)
        delta[:, at:].masked_fill_(kept, 0)
        if self.buffers == "server":
            delta[:, at:] = 0
        return delta

    def choices(self) -> dict[str, bool]:
        """Return what was chosen by timing: a resumed run must not choose again."""
        return {}

    def choose(self, choices: Mapping[str, bool]) -> None:  # noqa: B027  # one lane has none
        """Take over what :meth:`choices` returned."""

    # --- gradients --------------------------------------------------------------------------------

    def add_to_gradients(self, term: GradientTerm) -> None:
        """Add a term to the gradients of all further steps of the clients in training."""
        self.gradient_terms.append(term)

    @torch.no_grad()
    def _complete_gradients(self) -> None:
        """Add the terms to the gradients; a parameter without a gradient gets the terms alone."""
        params = self.client_parameters()
        for term in self.gradient_terms:
            for name, value in term(params).items():
                param = self._trained_tensor(name)
                if param.requires_grad:
                    value = value.reshape(param.shape).to(param.dtype)
                    param.grad = value.clone() if param.grad is None else param.grad.add_(value)

    @abstractmethod
    def _trained_tensor(self, name: str) -> nn.Parameter:
        """Return what the optimizer trains in the place of an exchanged parameter."""

    # --- learning rates ---------------------------------------------------------------------------

    def _ratios(self, lr: Sequence[float]) -> list[float]:
        """Return the clients' rates as ratios to the optimizer's; their steps begin."""
        self._step_rates, self.gradient_terms = [], []
        for rate in lr:
            if rate != self.base_lr and not self.base_lr:
                raise FederationError(
                    f"the policy sets lr={rate} as a ratio to the optimizer's own learning rate,"
                    " which is 0 or missing: give the optimizer a positive lr"
                )
        return [rate / self.base_lr if self.base_lr else 1.0 for rate in lr]

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Set the client's rate inside the step only: the module's schedulers own the groups.

        Returns:
            Other arguments of the step, where gradients are to be completed after its closure. The
            first is the optimizer.
        """
        self.optimizer_state.before_step()
        if self._ratio != 1:
            self._own_lr = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * self._ratio
        if not self.gradient_terms:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._complete_gradients()
            return None

        def completed() -> Any:
            loss = closure()
            self._complete_gradients()
            return loss

        return (optimizer,), {**kwargs, "closure": completed}

    def end_step(self, *_: Any) -> None:
        """Note the step's rate, which hooks may have set inside it, and put the group's own back.

        A rate that is a tensor is copied, not read: reading waits for the device.
        """
        lr = self._own_lr[0] if self._own_lr else self.optimizer.param_groups[0].get("lr", 0.0)
        self._step_rates.append(lr.detach().clone() if isinstance(lr, Tensor) else lr)
        self._restore_lr()
        self.optimizer_state.after_step()

    def mean_lr(self, steps: int, lr: float) -> float:
        """Return the mean learning rate of a client's local steps, with schedulers.

        Args:
            steps: Local steps of the client.
            lr: Its learning rate without schedulers.
        """
        rates = self._step_rates[:steps] or [self.base_lr]
        if isinstance(rates[0], Tensor):  # to read one by one is to wait for each
            rates = torch.stack([rate.reshape(()) for rate in rates]).tolist()
        mean = rates[0] if len(set(rates)) == 1 else fmean(rates)
        if mean == self.base_lr or not self.base_lr:  # exactly, without a rounded ratio
            return lr
        return mean if lr == self.base_lr else mean * (lr / self.base_lr)

    def _restore_lr(self) -> None:
        if self._own_lr:
            for group, lr in zip(self.optimizer.param_groups, self._own_lr, strict=True):
                group["lr"] = lr
            self._own_lr = []

    def _optimized(self) -> list[tuple[nn.Parameter, dict[str, object]]]:
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
