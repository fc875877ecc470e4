"""``ClientRunner``, the base class of the runners that train clients for the federated loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_fl.contracts.client_part import GradientTerm
from lightning_fl.contracts.hyperparameters import Declared
from lightning_fl.contracts.phases import Phase
from lightning_fl.contracts.update import ServerState
from lightning_fl.errors import FederationError
from lightning_fl.runners.client_optimizers import ClientOptimizer, ClientOptimizers, Rows
from lightning_fl.runners.global_model import BufferPolicy as BufferPolicy
from lightning_fl.runners.global_model import GlobalModel
from lightning_fl.runners.optimizer import around_steps, evaluates_often
from lightning_fl.runners.phases import PhasedTraining, trained_parameters
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors, flat, wants_start

#: Whether a client keeps its optimizer state between rounds: of all parameters, of none, or only of
#: those that stay with the client.
KeepOptimizer = bool | Literal["local"]


class ClientRunner(GlobalModel, ABC):
    """Train clients: load the global model, make local steps, collect the client updates.

    Client-local parameters and buffers (``federated_local_parameters``) are neither averaged nor
    sent. A new client starts from the module's values at the start of the run, later from its own.

    Args:
        tensors: The tensors of the user's module; between rounds they are the global model.
        buffers: How floating-point buffers are aggregated. ``average``: they are averaged like
            parameters, and integer buffers take the maximum. ``server``: the server keeps its own
            buffers. ``local``: each client keeps its own buffers, the server their average.
        optimizers: The optimizers of local training: one, unless the module optimizes manually.
        keep_optimizer: Whether a client keeps its optimizer state between rounds; ``local`` keeps
            that of client-local parameters.

    Raises:
        FederationError: If an optimizer cannot be reset, or there is no state to keep.
    """

    #: Whether clients train in this module, so that its hooks of a client are called.
    trains_here: ClassVar[bool] = True

    def __init__(
        self,
        tensors: ModuleTensors,
        buffers: BufferPolicy,
        optimizers: Sequence[torch.optim.Optimizer],
        keep_optimizer: KeepOptimizer,
    ) -> None:
        super().__init__(tensors, buffers)
        self.keep_optimizer = keep_optimizer
        self.optimizers, self.optimizer = list(optimizers), optimizers[0]
        self.declared = Declared(self.module)
        self.declared.reset()
        #: The first optimizer's learning rate, to which a client's rate is a ratio. With a
        #: scheduler it is the initial value, so that the scheduler's factor still applies.
        group = self.optimizer.param_groups[0]
        self.base_lr = float(group.get("initial_lr", group.get("lr")) or 0.0)
        #: Number of clients in training, and index of the local step within the Lightning batch.
        self.count, self.step = 1, 0
        #: Ratio of the client's rate, and the first optimizer's rate in each local step.
        self._ratio, self._step_rates = 1.0, dict[int, Any]()
        #: Terms that are added to the gradients of the clients in training.
        self.gradient_terms: list[GradientTerm] = []
        #: Phases of local training, and the number of local steps before the Lightning batch.
        self.phases, self.steps_before = PhasedTraining(), 0
        if keep_optimizer == "local" and not self.private.keys() & self.named_parameters.keys():
            raise FederationError(
                "optimizer_state='local' keeps the state of client-local parameters, and there are"
                " none: set local_parameters, or optimizer_state='reset' or 'keep'"
            )
        #: Makes the optimizers fresh for each client.
        self.optimizer_state = ClientOptimizers(self.optimizers)
        self._steps = ExitStack()
        for o in self.optimizer_state.each:
            before, after = partial(self._before_step, o), partial(self._after_step, o)
            self._steps.enter_context(around_steps(o.optimizer, before, after))

    def write(self, state: ServerState) -> None:
        """Load a state into the module and reset the optimizer."""
        super().write(state)
        self.optimizer_state.reset()
        self.gradient_terms = []
        self.declared.reset()

    def close(self) -> None:
        """Release the optimizers."""
        self._steps.close()
        for each in self.optimizer_state.each:  # after an exception inside a step
            each.leave_step()
        if wants_start(self.module):
            vars(self.module)[GLOBAL_PARAMETERS] = {}
        self.declared.reset()

    def trained_mask(self) -> Tensor | None:
        """Return the mask of trainable entries, ``[P]``; None means all.

        Computed anew every round, since a callback may unfreeze layers.
        """
        is_trained = {
            name: param.requires_grad and self.phases.is_trained(name)
            for name, param in self.shared.items()
        }
        if all(is_trained.values()):
            return None
        return torch.cat(
            [flat(torch.full_like(p, is_trained[n])).bool() for n, p in self.shared.items()]
        )

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that clients train with the optimizers of the start of the fit.

        Args:
            optimizers: The Trainer's optimizers.

        Raises:
            FederationError: If one was replaced, or trains what clients do not exchange.
        """
        name = type(self.module).__name__
        if list(map(id, optimizers)) != list(map(id, self.optimizers)):
            raise FederationError(
                f"the optimizer of {name} was replaced during the fit, by"
                " strategy.setup_optimizers for example. It would neither start anew with each"
                " client nor get the policy's learning rate. Create the optimizers of all"
                " parameters in configure_optimizers; to train a layer later, set requires_grad"
                " at the start of a round"
            )
        known = {id(self._trained_tensor(name)) for name in self.named_parameters}
        known |= {id(parameter) for parameter in self.constants.parameters.values()}
        if strange := [p for _, p in self.optimizer_state.params() if id(p) not in known]:
            raise FederationError(
                f"the optimizer of {name} trains {len(strange)} tensors that are not parameters of"
                f" {name} (the first one has the shape {list(strange[0].shape)}), so that clients"
                " would not exchange them: assign each to an attribute as a nn.Parameter, or put"
                " layers into a nn.ModuleList instead of a list"
            )

    # --- clients ----------------------------------------------------------------------------------

    @abstractmethod
    def load(self, state: ServerState, rows: Sequence[Rows], lr: Sequence[float]) -> None:
        """Start clients from a server state and restore their local tensors.

        Args:
            state: The state that they start from: vectors ``[k, P]``, counters ``[C]``.
            rows: The clients' tensors from :meth:`rows` at the end of their last round.
            lr: Learning rates of the first parameter group, one per client. The other groups keep
                their ratio to the first.

        Raises:
            FederationError: If a client's learning rate differs from the optimizer's, and the
                optimizer's is 0 or missing.
        """

    def note_start(self) -> None:  # clients elsewhere start there
        """Record where the clients start from, for modules that ask for it."""

    @abstractmethod
    def set_hyperparameters(self, values: Mapping[str, Tensor]) -> None:
        """Set numbers of the module for the local steps of the clients that were just loaded.

        Args:
            values: Values of the policy by name, ``[k]``. Only declared numbers are used; others
                keep the values of the module.
        """

    def begin_batch(  # sequential training does not need it
        self, work: Callable[[], tuple[Tensor, Tensor]]
    ) -> None:
        """Prepare the local steps of a Lightning batch.

        Args:
            work: Returns the number of samples, and whether the client still trains, per local step
                and client, ``[steps, k]`` each.
        """

    @abstractmethod
    def collect(self, state: ServerState) -> tuple[Tensor, Tensor]:
        """Return the client updates, ``[k, P]``, in new memory, and counters, ``[k, C]``.

        Args:
            state: The state that the clients started from.
        """

    @abstractmethod
    def client_parameters(self) -> dict[str, Tensor]:
        """Return the exchanged parameters of the clients in training, ``[k, *shape]`` by name.

        The tensors are detached but not copied: writing to them changes the clients' models.
        """

    def local_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters that stay with the clients, ``[k, *shape]`` by name."""
        return {
            name: tensor.detach().view(self.count, *param.shape)
            for name, param in self.named_parameters.items()
            if name in self.private and (tensor := self._trained_tensor(name)).requires_grad
        }

    @abstractmethod
    def reported(self, outputs: Any) -> Tensor:
        """Return each client's task loss in the first local step of a Lightning batch, ``[k]``.

        Args:
            outputs: Lightning's outputs of ``training_step`` in the batch's last local step.
        """

    def client(self, row: int) -> AbstractContextManager[None]:
        """Put a client's tensors into the module within a ``with`` block."""
        return nullcontext()

    @contextmanager
    def at_model(self, row: int, model: Tensor) -> Iterator[None]:
        """Put a client into the module, at another model, ``[P]``, within a ``with`` block."""
        with self.client(row):
            before = self.vector.read()
            try:
                self._write_model(model)
                yield
            finally:
                self.vector.write(before)

    @torch.no_grad()
    def start_from(self, models: Tensor) -> None:
        """Let the clients in training start from other models, ``[k, P]``."""
        for row, model in enumerate(models):
            with self.client(row):
                self._write_model(model)
        self.note_start()

    def _write_model(self, model: Tensor) -> None:
        """Load a model into the module, without tensors that stay with the client."""
        if self.buffers == "local":
            at = self.num_parameters
            model = torch.cat([model[:at], self.vector.read()[at:]])
        self.vector.write(model)

    @abstractmethod
    def of_client(self, values: Tensor) -> Tensor | None:
        """Return the value of the client whose ``training_step`` runs; None if none does.

        Args:
            values: Values of the clients in training, ``[k]``.

        Raises:
            FederationError: If the step is vectorized.
        """

    @abstractmethod
    def rows(self) -> list[dict[str, Tensor]]:
        """Return the local tensors of each client, by name."""

    def _optimizer_rows(self) -> Rows:
        """Return the optimizer state that clients keep, by name."""
        if not self.keep_optimizer:
            return {}
        rows = self.optimizer_state.rows()
        if self.keep_optimizer != "local":
            return rows
        names = self.private.keys() & self.named_parameters.keys()
        local = {id(self._trained_tensor(name)) for name in names}
        params = self.optimizer_state.params()
        prefixes = tuple(prefix for prefix, param in params if id(param) in local)
        return {name: row for name, row in rows.items() if name.startswith(prefixes)}

    # --- gradients and phases ---------------------------------------------------------------------

    def add_to_gradients(self, term: GradientTerm) -> None:
        """Add a term to the gradients of all later steps of the clients in training.

        Raises:
            FederationError: If the module optimizes manually.
        """
        if not self.module.automatic_optimization:
            raise FederationError(
                f"{type(self.module).__name__} optimizes manually, and a client part of the rule"
                " adds to the gradients of each local step: use automatic optimization, or a rule"
                " such as FedAvg or FedOpt"
            )
        self.gradient_terms.append(term)

    @torch.no_grad()
    def _complete_gradients(self) -> None:
        """Add the terms to the gradients, of which missing ones are 0, and hold those of phases."""
        params = self.client_parameters()
        trained = {n: t for n in params if (t := self._trained_tensor(n)).requires_grad}
        for term in self.gradient_terms:
            gradients = {
                n: torch.zeros_like(params[n]) if t.grad is None else t.grad.view_as(params[n])
                for n, t in trained.items()
            }
            for name, value in term(params, gradients).items():
                param = self._trained_tensor(name)
                if param.requires_grad:
                    value = value.reshape(param.shape).to(param.dtype)
                    param.grad = value.clone() if param.grad is None else param.grad.add_(value)
        self.hold_gradients()

    def _trained_tensor(self, name: str) -> nn.Parameter:
        """Return the tensor in the optimizer that holds a parameter."""
        return self.named_parameters[name]

    def set_phases(self, phases: Sequence[Phase]) -> None:
        """Set the phases of local training.

        Raises:
            FederationError: If a phase trains no parameter, or the optimizer moves parameters
                without a gradient.
        """
        if phases and (found := evaluates_often(self.optimizers)):  # with all parameters moved
            raise FederationError(
                f"phases do not support {type(found).__name__}, which moves parameters without a"
                " gradient: choose another optimizer"
            )
        names = [trained_parameters(phase, self.module, self.private) for phase in phases]
        self.phases = PhasedTraining(names, list(self.named_parameters))

    def start_phases(self, ends: Tensor) -> None:
        """Start the phases of the clients that were loaded.

        Args:
            ends: Local steps at which the phases of each client end, ``[k, phases]``.
        """
        self.phases.start(ends)

    def hold_gradients(self) -> None:
        """Remove the gradients of parameters that clients do not train in this step.

        Called after the backward pass and after everything that may add to gradients.
        """
        for param in self._held_parameters():
            param.grad = None

    def _held_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that clients do not train in this step."""
        names = self.phases.held(self.steps_before + self.step)
        return [self._trained_tensor(name) for name in names]

    # --- learning rates ---------------------------------------------------------------------------

    def _ratios(self, lr: Sequence[float]) -> list[float]:
        """Reset the record of steps and return the clients' rates as ratios to the optimizer's."""
        self._step_rates, self.gradient_terms = {}, []
        for each in self.optimizer_state.each:  # after an exception inside a step
            each.leave_step()
        groups = [group for each in self.optimizers for group in each.param_groups]
        has_rates = bool(self.base_lr) and all(group.get("lr") is not None for group in groups)
        for rate in lr:
            if rate != self.base_lr and not has_rates:
                raise FederationError(
                    f"the policy sets lr={rate}, but the optimizer's learning rate is 0 or missing,"
                    " and client rates are applied as ratios to it. Give the optimizer a positive"
                    " lr"
                )
        return [rate / self.base_lr if self.base_lr else 1.0 for rate in lr]

    def _before_step(
        self, state: ClientOptimizer, closure: Callable[[], Any] | None
    ) -> Callable[[], Any] | None:
        """Prepare a step of an optimizer; return its closure, which also completes gradients."""
        state.enter_step(self._ratio)
        if not state.is_simple:  # it may move parameters without a gradient
            state.held = [(p.data, p.detach().clone()) for p in self._held_parameters()]
        if not self.gradient_terms and not self.phases:
            return closure
        if closure is None:
            self._complete_gradients()
            return None

        def completed() -> Any:
            loss = closure()
            self._complete_gradients()
            return loss

        return completed

    def _after_step(self, state: ClientOptimizer) -> None:
        """Restore the learning rates of an optimizer, and record that of the first optimizer."""
        lr = state.complete_step()
        if state is self.optimizer_state.each[0]:
            self._step_rates.setdefault(self.steps_before + self.step, lr)

    def mean_lr(self, steps: int, lr: float) -> float:
        """Return the mean learning rate of a client's local steps, with schedulers.

        Args:
            steps: Number of local steps of the client.
            lr: The client's learning rate without schedulers.
        """
        rates = [lr for step, lr in self._step_rates.items() if step < steps] or [self.base_lr]
        if isinstance(rates[0], Tensor):  # one read instead of a wait for each
            rates = torch.stack([rate.reshape(()) for rate in rates]).tolist()
        mean = rates[0] if len(set(rates)) == 1 else fmean(rates)
        if mean == self.base_lr or not self.base_lr:  # avoids the rounding of a ratio
            return lr
        return mean if lr == self.base_lr else mean * (lr / self.base_lr)
