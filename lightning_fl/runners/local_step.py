"""A module's training step as a pure function of its tensors, and the values that it logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any, Literal, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_fl.contracts.hyperparameters import HYPERPARAMETERS
from lightning_fl.contracts.step_module import StepModule
from lightning_fl.errors import FederationError
from lightning_fl.hooks import attributes_set
from lightning_fl.runners.samples import Samples

Tensors = dict[str, Tensor]


class Outcome(NamedTuple):
    """Hold the results of a local step, of one client or stacked.

    Args:
        loss: The loss to minimize.
        task_loss: The loss that a client reports: ``task_loss`` if the step returns a dictionary
            with that key, else the loss.
        logs: Logged values and their batch sizes, by name; NaN without a batch size.
        recorded: The loss that a :class:`StepModule` records; empty for other modules.
        buffers: The module's buffers after the step.
    """

    loss: Tensor
    task_loss: Tensor
    logs: dict[str, tuple[Tensor, Tensor]]
    recorded: Tensors
    buffers: Tensors


def reported_loss(out: Any) -> Tensor | None:
    """Return the loss that a client reports to the server, from the output of ``training_step``."""
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if loss is None:
        return None
    task_loss = out.get("task_loss") if isinstance(out, Mapping) else None
    if isinstance(task_loss, (int, float)):  # torch 2.6 does not compile `int | float`
        return torch.full_like(loss.detach(), task_loss)
    if isinstance(task_loss, Tensor) and task_loss.numel() == 1:
        return task_loss.detach().reshape(loss.shape)
    return cast("Tensor", loss.detach())


def gradients_of(loss: Tensor, params: Mapping[str, Tensor]) -> Tensors:
    """Return the gradients of the trained parameters that have one, by name.

    Args:
        loss: The loss.
        params: Parameters by name.
    """
    trained = {name: param for name, param in params.items() if param.requires_grad}
    if not trained:
        return {}
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    found = zip(trained, grads, strict=True)
    return {name: grad.to_dense() for name, grad in found if grad is not None}


#: Attributes of the module that a step sets.
_SET = "log", "optimizers", "_sample_weight", "_record", "federated_global_parameters"
_LOG_OPTIONS = list(signature(LightningModule.log).parameters)[3:]


class LocalStep(nn.Module):
    """Run a module's ``training_step`` without side effects.

    The module sees the client's parameters and buffers instead of its own. If it has these
    attributes, it also gets ``federated_global_parameters`` (the parameters that the client started
    from, by name) and ``federated_hyperparameters`` with the client's numbers from the policy. A
    :class:`StepModule` gets the weights of samples, and records losses once for all clients.

    Args:
        module: The user's module.
        constants: Frozen parameters that all clients share, by name. The module uses its own.
    """

    def __init__(self, module: LightningModule, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.module: LightningModule = module
        self._constants = dict(constants)
        #: Index of the clients' local step, passed to the module as ``batch_idx``.
        self.batch_idx = 0
        #: Options of logged values, by name.
        self.log_options: dict[str, dict[str, Any]] = {}
        #: Whether the module logged something without a batch size.
        self.wants_batch_size = False
        step: Callable[..., Any] = module.training_step
        self._takes_batch_idx = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        #: Parameters by their names at the start; a step may move layers to other names.
        self._parameters_at_start = dict(module.named_parameters())
        # functional_call needs every name of a shared tensor; elsewhere it has one name.
        names = {id(t): n for n, t in [*module.named_parameters(), *module.named_buffers()]}
        self._places = [
            (f"module.{prefix}{'.' * bool(prefix)}{leaf}", names[id(tensor)])
            for prefix, owner in module.named_modules()
            for leaf, tensor in [*owner._parameters.items(), *owner._buffers.items()]
            if tensor is not None and names[id(tensor)] not in self._constants
        ]
        self._first_place = {name: place for place, name in reversed(self._places)}

    def forward(self, batch: Any) -> Any:
        """Run the module's training step; ``functional_call`` calls this method."""
        step: Callable[..., Any] = self.module.training_step
        return step(batch, self.batch_idx) if self._takes_batch_idx else step(batch)

    def one(
        self,
        params: Tensors,
        buffers: Tensors,
        fixed: Tensors,
        batch: Any,
        weight: Tensor | None,
        hyperparameters: Tensors,
    ) -> Outcome:
        """Make the step of one client."""
        own = {**params, **{name: buffer.clone() for name, buffer in buffers.items()}}
        tensors = {place: own[name] for place, name in self._places}

        def run() -> Any:
            return functional_call(self, tensors, (batch,), tie_weights=False)

        losses, logs, recorded = self._noted(run, fixed, weight, hyperparameters)
        return Outcome(*losses, logs, recorded, {n: tensors[self._first_place[n]] for n in buffers})

    def _noted(
        self,
        run: Callable[[], Any],
        fixed: Tensors,
        weight: Tensor | None,
        hyperparameters: Tensors,
    ) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]], Tensors]:
        """Run the module's step and return its losses, logged values and recorded losses."""
        logs: dict[str, tuple[Tensor, Tensor]] = {}
        recorded: Tensors = {}

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            options.update(zip(_LOG_OPTIONS, args, strict=False))
            if isinstance(value, Metric) or name in logs:
                raise FederationError(f"training_step logs a metric or logs {name} twice")
            size = options.pop("batch_size", None)
            if size is None or (weight is not None and size == len(weight)):  # size with padding
                size, self.wants_batch_size = torch.nan, True
            device = self.module.device
            size = torch.full((), size, dtype=torch.float64, device=device)
            if isinstance(value, Tensor):
                value = value.detach().reshape(()).to(device, non_blocking=True)
            else:
                value = torch.full((), value, device=device)
            self.log_options[name], logs[name] = options, (value, size)

        def record(loss: Tensor, count: Any) -> None:
            recorded["loss"] = loss.detach()

        def refuse(*_: Any, **__: Any) -> None:
            raise FederationError("training_step uses its optimizer, which trains all clients")

        known: dict[str, Any] = {"log": log, "optimizers": refuse}
        if isinstance(self.module, StepModule):
            known.update({"_sample_weight": weight, "_record": record})
        if fixed and hasattr(self.module, "federated_global_parameters"):
            known["federated_global_parameters"] = {**fixed, **self._constants}
        if hyperparameters:
            known[HYPERPARAMETERS] = {**self.module.__dict__[HYPERPARAMETERS], **hyperparameters}
        with attributes_set(self.module, known):
            out = run()
        loss = out["loss"] if isinstance(out, Mapping) else out
        task_loss = reported_loss(out)
        if loss is None or task_loss is None:
            raise FederationError(
                "training_step returned no loss for a batch. Vectorized clients cannot skip"
                " batches: return a loss for every batch, or train the module without"
                " VectorizedClients"
            )
        if loss.ndim:  # of one number, which Lightning takes, too
            loss, task_loss = loss.reshape(()), task_loss.reshape(())
        return (loss, task_loss), logs, recorded

    def placeholders(self) -> AbstractContextManager[None]:
        """Return a context in which the module has all attributes that a step sets.

        A compiled step needs it, since torch 2.11 does not compile the removal of attributes.
        """
        kind, own = type(self.module), vars(self.module)
        missing = [name for name in _SET if name not in own and hasattr(kind, name)]
        return attributes_set(self.module, {name: getattr(kind, name) for name in missing})

    def many(
        self,
        params: Tensors,
        buffers: Tensors,
        fixed: Tensors,
        batch: Any,
        weight: Tensor | None,
        *,
        hyperparameters: Tensors | None = None,
        randomness: Literal["different", "same"] = "different",
        is_mapped: bool = True,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Make the step of many clients; the first dimension of every tensor is the client.

        Args:
            params: Parameters, ``[k, ...]``.
            buffers: Buffers, ``[k, ...]``.
            fixed: Parameters that the clients started from, ``[k, ...]``.
            batch: Samples, ``[k, B, ...]``.
            weight: Sample weights, ``[k, B]``, or None.
            hyperparameters: Numbers of the policy by name, ``[k]``; None means none.
            randomness: Whether the vectorized step draws different random numbers for each client.
            is_mapped: Whether to use ``vmap``; a graph of one client does not, which is faster.
            function: Function of a client's tensors to map; None means :meth:`one`.
        """
        # torch 2.6 compiles neither an `or` nor a union of dictionaries.
        own: dict[str, Any] = {"params": params, "buffers": buffers, "fixed": fixed, "batch": batch}
        own["weight"] = weight
        own["hyperparameters"] = {} if hyperparameters is None else hyperparameters
        mapped = self.one if function is None else function

        def step(client: dict[str, Any]) -> Any:
            return mapped(**client)

        if not is_mapped:
            outcome = step(tree_map(lambda t: t.squeeze(0) if isinstance(t, Tensor) else t, own))
            return tree_map(lambda t: t.unsqueeze(0), outcome)
        in_dims = tree_map(lambda t: 0 if isinstance(t, Tensor) else None, own)
        return vmap(step, in_dims=(in_dims,), randomness=randomness)(own)

    def by_itself(self, fixed: Tensors, batch: Any) -> tuple[Outcome, Tensors]:
        """Make the step on the module's own tensors, as in sequential training.

        Args:
            fixed: Parameters that the client started from. If empty, the module's attribute is not
                changed.
            batch: The client's batch.

        Returns:
            The outcome of the step without buffers, and the gradients of the parameters that have
            one, by name.
        """
        self.module.zero_grad()
        (loss, task_loss), logs, recorded = self._noted(lambda: self(batch), fixed, None, {})
        loss.backward()  # torch.autograd.grad does not support reentrant checkpoints
        params = self._parameters_at_start.items()
        grads = {n: p.grad.to_dense() for n, p in params if p.grad is not None}
        return Outcome(loss.detach(), task_loss.detach(), logs, recorded, {}), grads

    def gradients(self, params: Tensors, *tensors: Any, **how: Any) -> tuple[Tensors, Outcome]:
        """Return the gradients of each client's loss and the step's outcome; see :meth:`many`.

        The gradient is taken within ``vmap``, where products have the memory layout of the weights.
        """
        trained = [name for name, param in params.items() if param.requires_grad]

        def gradient(params: Tensors, **own: Any) -> tuple[Tensors, Outcome]:
            def loss(wanted: Tensors) -> tuple[Tensor, Outcome]:
                outcome = self.one({**params, **wanted}, **own)
                return outcome.loss, outcome

            found: tuple[Tensors, Outcome]
            found = torch.func.grad(loss, has_aux=True)({name: params[name] for name in trained})
            return found

        found: tuple[Tensors, Outcome] = self.many(params, *tensors, **how, function=gradient)
        return found


class StepLogs:
    """Collect the values that a module logs, until the last local step of a Lightning batch.

    Args:
        local: The module's step, which holds the options of the logged values.
    """

    def __init__(self, local: LocalStep) -> None:
        self._local = local
        #: By name, one tuple per local step: values, weights and mask of active clients, ``[k]``.
        self._noted: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def clear(self) -> None:
        """Discard the values of the last batch."""
        self._noted = {}

    def note(self, outcome: Outcome, samples: Samples, sizes: Tensor, active: Tensor) -> None:
        """Store the logged values of a local step, and pass losses to the module.

        Args:
            outcome: The outcome of the step.
            samples: The samples of each client.
            sizes: Number of samples of each client, ``[k]``.
            active: Mask of the clients that still train, ``[k]``.
        """
        device = outcome.loss.device
        # Asynchronous copies; nothing is read back from the device.
        known = samples.counts() if outcome.logs and self._local.wants_batch_size else sizes
        counts, batch_sizes, trains = (
            t.to(device, non_blocking=True) for t in (sizes, known, active)
        )
        for name, (value, size) in outcome.logs.items():
            weight = size.where(~size.isnan(), batch_sizes) * trains
            self._noted.setdefault(name, []).append((value, weight, active))
        if outcome.recorded:
            record: Any = self._local.module._record
            record(outcome.recorded["loss"].where(counts * trains > 0, 0), counts * trains)

    def log(self, log: Callable[..., None]) -> None:
        """Log one value for all steps and clients of the batch.

        Args:
            log: The function that logs a value under a name, with options.
        """
        for name, noted in self._noted.items():
            options = dict(self._local.log_options[name])
            values, weight, active = (torch.stack(part) for part in zip(*noted, strict=True))
            values, weight = values.double(), weight.double()
            if options.get("reduce_fx", "mean") in ("mean", torch.mean):
                total = weight.sum()
                options["batch_size"] = total.long() if total.device.type != "cpu" else int(total)
                value = (values.where(weight > 0, 0) * weight).sum() / total
            else:
                reduce = options["reduce_fx"]
                at = active.flatten().nonzero()[:, 0].to(values.device, non_blocking=True)
                chosen = values.flatten()[at]
                value = getattr(chosen, reduce)() if isinstance(reduce, str) else reduce(chosen)
            log(name, value.float(), **options)
