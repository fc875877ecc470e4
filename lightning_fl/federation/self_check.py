"""The check of the first round, on deep copies of the module.

:class:`OrderCheck` finds out whether the first client changes the first step of the second,
:class:`VectorizedCheck` whether vectorized steps of two clients equal the module's own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric

from lightning_fl.contracts.hyperparameters import HYPERPARAMETERS
from lightning_fl.contracts.step_module import StepModule
from lightning_fl.errors import FederationError, first_line
from lightning_fl.functional.randomness import rng_state, seeded_rng
from lightning_fl.hooks import attributes_set, call_hook, properties_set
from lightning_fl.runners.local_step import LocalStep, Outcome, Tensors, gradients_of
from lightning_fl.runners.module_copy import copied_module
from lightning_fl.runners.samples import Collated, copied
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors, is_equal

#: Largest size of the parameters and buffers of a module that is copied, in bytes.
MAX_BYTES = 2**26
#: Data types that are replaced by float64 to compare steps.
NARROW = (torch.float32, torch.bfloat16, torch.float16)
#: Seed of the compared steps. A module is not likely to set the same one.
SEED = 1_846_297_503
#: Counts of a client, which a vectorized step must not read.
COUNTS = ("global_step", "num_training_batches", "is_last_batch", "train_dataloader")
#: A step's outcome without buffers, gradients of the trained parameters, and the parameters and
#: buffers after the step and before it, of one client or stacked.
_Result = tuple[Outcome, Tensors, Tensors, Tensors]


class OrderCheck:
    """Warn if the training of the first client changes the first step of the second.

    Parameters and buffers belong to a client, everything else on a module is shared by all clients.
    At the second client, ``training_step`` runs on a deep copy of the module from before the first
    client, and on one from now, both with the tensors, the batch and the random numbers of the
    second client. If losses or gradients differ, a warning names ``lightning-fl check``.

    Args:
        tensors: The tensors of the user's module.
        is_on: Whether to check.
    """

    def __init__(self, tensors: ModuleTensors, is_on: bool) -> None:
        self.tensors, self.module = tensors, tensors.module
        #: Whether there is nothing to check any more.
        self.is_done = not is_on
        size = sum(tensor.nbytes for tensor in tensors.by_name.values())
        if is_on and size > MAX_BYTES:
            self._skip(f"has {size / 2**20:.0f} MiB")
        elif is_on and not self.module.automatic_optimization:  # its copy would step our optimizers
            self._skip("optimizes manually")
        self._first: int | None = None
        self._before: LightningModule | None = None
        #: Attributes of the module and its parts after the first client.
        self._after: list[dict[str, Any]] = []

    def _skip(self, why: str) -> None:
        self.is_done = True
        rank_zero_info(
            f"{type(self.module).__name__} {why}, so it is not checked whether clients affect each"
            " other: lightning-fl check finds out"
        )

    def begin_round(self) -> None:
        """End the check after the first round that had a client."""
        if self._first is not None:
            self.is_done, self._before, self._after = True, None, []

    def begin_step(self, client: int, batch: Any) -> None:
        """Copy the module at the first step of the first client; compare at that of the second."""
        if self.is_done:
            return
        if self._first is None:
            self._first, self._before = client, self._copied()
        elif client != self._first:
            self.is_done = True
            if self._differs(batch):
                rank_zero_warn(
                    f"the training of the first client changes a step of the second: the"
                    f" training_step of {type(self.module).__name__} depends on state outside of"
                    " parameters and buffers, which all clients share. lightning-fl check names it"
                )
            self._before, self._after = None, []

    def end_client(self) -> None:
        """Note the attributes of the module after the first client."""
        if not self.is_done and self._first is not None and not self._after:
            self._after = [dict(vars(part)) for part in self.module.modules()]

    def _copied(self) -> LightningModule | None:
        try:
            return copied_module(self.module, self.tensors.constants.values())
        except Exception as error:  # locks, threads, tensors of a graph raise different kinds
            self._skip(f"cannot be copied ({error})")
            return None

    def _differs(self, batch: Any) -> bool:
        """Return whether the step depends on what the first client has left."""
        before, now, again = self._before, self._copied(), self._copied()
        if before is None or now is None or again is None:
            return False
        # What hooks and callbacks have set since then is meant for this client.
        modules = (each.modules() for each in (self.module, before, again))
        for part, of_before, of_again, after in zip(*modules, self._after, strict=False):
            for name, value in vars(part).items():
                if after.get(name, self) is not value and name != "_trainer":
                    vars(of_before)[name] = vars(of_again)[name]
        expected = self._step(now, batch)
        if not expected or is_equal(expected, self._step(before, batch)):
            return False
        # The copy may share what was set since then with the one from before.
        return is_equal(expected, self._step(self._copied(), batch))

    def _step(self, module: LightningModule | None, batch: Any) -> list[Tensor]:
        """Return loss and gradients of the step on a copy; empty if it fails."""
        if module is None:
            return []
        own, shared = vars(module), vars(self.module)
        own.update({k: shared[k] for k in (GLOBAL_PARAMETERS, HYPERPARAMETERS) if k in shared})
        if isinstance(module, StepModule):  # nothing is recorded, as nothing is logged
            own["_record"] = lambda *_: None
        try:
            _loaded(module, self.tensors.by_name)
            silent = attributes_set(self.module.trainer, {"_loggers": [DummyLogger()]})
            with seeded_rng(0, self.module.device), torch.enable_grad(), silent:
                module.zero_grad()
                out = LocalStep(module, self.tensors.constants)(copied(batch))
                loss = out["loss"] if isinstance(out, Mapping) else out
                loss.backward()
        except Exception:  # the step itself will fail
            return []
        gradients = (p.grad.to_dense() for p in module.parameters() if p.grad is not None)
        return [loss.detach(), *gradients]


# --- vectorized clients ---------------------------------------------------------------------------


aten = torch.ops.aten
#: Operations with gradients that ``torch.func.vmap`` gets wrong for some values (padding, or equal
#: entries), and whether it does so with given arguments.
_WRONG_UNDER_VMAP: dict[Any, Callable[..., bool]] = {
    aten.embedding.default: lambda weight, indices, padding_idx=-1, *_: padding_idx >= 0,
    **dict.fromkeys((aten.max.default, aten.min.default), lambda values: True),
    **dict.fromkeys((aten.median.default, aten.nanmedian.default), lambda values: True),
}


class _Known(TorchDispatchMode):
    """Refuse operations that are known to be wrong, as they may be right for the first samples."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_wrong = _WRONG_UNDER_VMAP.get(func)
        if is_wrong and is_wrong(*args) and args[0].requires_grad and torch.is_grad_enabled():
            raise FederationError(
                f"training_step uses {func.overloadpacket}, whose gradients torch.func.vmap gets"
                " wrong for some values (ties, padding)"
            )
        return func(*args, **kwargs or {})


class VectorizedCheck:
    """Compare vectorized steps of two clients with the module's own steps, on deep copies.

    All losses, logged values, gradients and tensors are compared, in float64 if the step supports
    it. Both draw the same random numbers.

    Args:
        tensors: The tensors of the user's module.
        batches: Batches of two clients.
    """

    def __init__(self, tensors: ModuleTensors, batches: Sequence[Any]) -> None:
        self.tensors, self.module = tensors, tensors.module
        self.batches = list(batches)
        constants = sum(param.nbytes for param in tensors.constants.values())
        #: Whether steps are compared in float64, in which frozen parameters are copied, too.
        self._is_wide = constants <= MAX_BYTES
        self.trained = [name for name, p in tensors.parameters.items() if p.requires_grad]

    def why_not(self) -> str | None:
        """Return the reason why the step cannot be vectorized, or None."""
        try:
            copies = self._copied(), self._copied(), self._copied()
        except Exception as error:  # locks, threads, tensors of a graph raise different kinds
            return f"it cannot be copied, to compare its steps ({first_line(error)})"
        try:
            if len(Collated(self.batches).groups()) > 1:  # of different shapes
                self.batches[1] = self.batches[0]
            return self._why_not(*copies)
        except FederationError as error:
            return str(error)
        except Exception as error:  # other batches than of tensors, or no vmap rule, or a mistake
            return (
                "training_step does not run under torch.func.vmap, which makes the steps of all"
                f" clients at once on stacked batches ({first_line(error)})"
            )

    def _copied(self) -> LightningModule:
        return copied_module(self.module, () if self._is_wide else self.tensors.constants.values())

    def _why_not(
        self, first: LightningModule, second: LightningModule, mapped: LightningModule
    ) -> str | None:
        try:
            own = [self._own(first, 0)]
        except FederationError:
            raise
        except Exception:  # the step may not support double precision
            self._is_wide, first, second, mapped = False, *(self._copied() for _ in range(3))
            own = [self._own(first, 0)]
        for metric, copied_one in zip(metrics_of(self.module), metrics_of(first), strict=False):
            if metric._update_count != copied_one._update_count:
                return f"training_step updates the metric {type(metric).__name__}"
        own.append(self._own(second, 1))
        if not is_equal(_numbers(own[1]), _numbers(self._own(first, 1))):
            return "training_step depends on what an earlier step has left in an attribute"
        for *_, ends, start in own:
            for name in self.trained:
                if not torch.equal(start[name], ends[name]):
                    return f"training_step writes to the trained parameter {name}"
        stacked: _Result = tree_map(lambda *t: torch.stack(t), *own)
        at_once = self._vectorized(mapped, stacked[-1])
        for part in mapped.modules():
            for name, value in vars(part).items():
                tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
                if name[0] != "_" and any(map(is_functorch_wrapped_tensor, tensors)):
                    return f"training_step stores tensors in the attribute {name}"
        exactness = 1e-8 if self._is_wide else 1e-4
        if not is_equal(_numbers(stacked), _numbers(at_once), exactness):
            return "its vectorized step gives different results"
        return None

    def _client(self, row: int) -> Tensors:
        """Return tensors of a client. Those of two differ, to reveal clients that are mixed up."""
        values = {n: self._wide(t.detach()) for n, t in self.tensors.by_name.items()}
        for name in self.tensors.parameters if row else ():
            if values[name].is_floating_point():
                values[name] = values[name] * (1 + 2 ** -(6 if name in self.trained else 7))
        return values

    def _wide(self, value: Any) -> Any:
        is_narrow = isinstance(value, Tensor) and value.dtype in NARROW and self._is_wide
        return value.double() if is_narrow else copied(value)

    def _fixed(self, values: Tensors) -> Tensors:
        return {name: values[name].clone() for name in self.tensors.compared}

    @contextmanager
    def _conditions(self, module: LightningModule) -> Iterator[LocalStep]:
        """Prepare a step of a copy: in double precision, without loggers, counts and optimizer."""
        if self._is_wide:
            module.double()
        constants = dict(module.named_parameters())
        constants = {name: constants[name] for name in self.tensors.constants}

        def refuse(_: Any) -> Any:
            raise FederationError(f"training_step reads {', '.join(COUNTS)} or its optimizer")

        trainer: Any = self.module.trainer
        refused = dict.fromkeys((*COUNTS, "optimizers"), refuse)
        silent = attributes_set(trainer, {"_loggers": [DummyLogger()]})
        module._current_fx_name = "training_step"
        with (
            properties_set(trainer, refused),
            silent,
            seeded_rng(SEED, self.module.device),
            torch.enable_grad(),
            trainer.precision_plugin.train_step_context(),
        ):
            yield LocalStep(module, constants)

    def _own(self, module: LightningModule, client: int) -> _Result:
        """Make a client's own step."""
        values, batch = self._client(client), tree_map(self._wide, self.batches[client])
        with self._conditions(module) as step:
            tensors = _loaded(module, values)
            call_hook(module, "on_client_start")  # which may freeze layers
            self.trained = [name for name in self.tensors.parameters if tensors[name].requires_grad]
            starts = self._read(module)
            before = rng_state()
            with _Known():  # type: ignore[no-untyped-call]  # torch's base class has no types
                outcome, grads = step.by_itself(self._fixed(values), batch)
            after = rng_state()
        if before["python"] != after["python"] or str(before["numpy"]) != str(after["numpy"]):
            raise FederationError(
                "training_step draws random numbers with Python or NumPy, which all clients would"
                " share (draw them with torch)"
            )
        return outcome, self._of_trained(grads, starts), self._read(module), starts

    def _read(self, module: LightningModule) -> Tensors:
        """Return a copy of the tensors of a copy of the module."""
        tensors = _loaded(module, {})
        return {name: tensors[name].detach().clone() for name in self.tensors.by_name}

    def _vectorized(self, module: LightningModule, values: Tensors) -> _Result:
        """Make the vectorized step of clients that start from some tensors, ``[2, ...]``."""
        fixed, batches = map(self._fixed, map(self._client, range(2))), self.batches
        params = {name: values[name].clone() for name in self.tensors.parameters}
        own: dict[str, Any] = {
            "params": {n: p.requires_grad_(n in self.trained) for n, p in params.items()},
            "buffers": {name: values[name] for name in self.tensors.buffers},
            "fixed": tree_map(lambda *t: torch.stack(t), *fixed),
            "batch": tree_map(lambda *t: torch.stack([*map(self._wide, t)]), *batches),
        }
        with self._conditions(module) as step:
            call_hook(module, "on_client_start")
            outcome = step.many(**own, weight=None, randomness="same")
            again = copied(own)  # as in training, which random numbers may not support
            step.many(**again, weight=None)
        grads = self._of_trained(gradients_of(outcome.loss.sum(), params), values)
        ends = {n: p.detach() for n, p in params.items()} | outcome.buffers
        return outcome._replace(buffers={}), grads, ends, values

    def _of_trained(self, grads: Tensors, values: Tensors) -> Tensors:
        """Return the gradients of the trained parameters; 0 for those without one."""
        return {name: grads.get(name, torch.zeros_like(values[name])) for name in self.trained}


def _loaded(module: nn.Module, values: Tensors) -> Tensors:
    """Copy values into the parameters and buffers of a module, and return all of these by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, value in values.items():
        tensors[name].data.copy_(value)
    return tensors


def metrics_of(module: nn.Module) -> Iterator[Metric]:
    """Yield the metrics of a module, also those in attributes that are lists or dictionaries."""
    for part in module.modules():
        for value in tree_leaves(dict(vars(part))):
            if isinstance(value, nn.Module):
                yield from (each for each in value.modules() if isinstance(each, Metric))


def _numbers(result: Any) -> list[Tensor]:
    """Return the tensors of a result as numbers that can be compared."""
    return [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
