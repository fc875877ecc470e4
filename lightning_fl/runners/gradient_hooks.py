"""Check of callbacks that change gradients or parameters of clients that train at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import Method, attributes_set, replaced
from lightning_fl.runners.attributes import left_alone
from lightning_fl.runners.optimizer_values import options_set
from lightning_fl.runners.stacks import Stacks
from lightning_fl.runners.step_hooks import hooks_of_user, is_known
from lightning_fl.runners.tensors import is_equal
from lightning_fl.runners.watch import Watch
from lightning_fl.types import FederationError

#: Hooks of a local step in which callbacks change gradients or parameters.
_HOOKS = ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
#: Factors of the made-up gradients of all clients, since small ones may not be clipped; further
#: factors of the gradients and the parameters of all clients but the first.
_SIZES, _OF_OTHERS = (1.0, 2.0**8), (1.0, 2.0**8)


@contextmanager
def gradient_hooks_checked(module: LightningModule, stacks: Stacks) -> Iterator[None]:
    """Check callbacks that change gradients or parameters, in the step within a ``with`` block.

    A copy of such a callback is tried with made-up values. Callbacks that cannot be copied are left
    out.

    Args:
        module: The module that callbacks get.
        stacks: The tensors of the clients, of which there are two or more.

    Raises:
        FederationError: If those of a client then depend on those of others.
    """
    with ExitStack() as stack:
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]  # a connector's
            for name in _HOOKS:
                if name in hooks_of_user(callback):
                    trial = _Trial(callback, name, module, stacks)
                    stack.enter_context(replaced(callback, name, trial.watched))
        yield


class _Trial:
    """Try a hook of a callback if it changes gradients or parameters.

    Args:
        callback: The callback.
        name: Name of the hook.
        module: The module that the callback gets.
        stacks: The tensors of the clients.
    """

    def __init__(
        self, callback: Callback, name: str, module: LightningModule, stacks: Stacks
    ) -> None:
        self._callback, self._name, self._module, self._stacks = callback, name, module, stacks
        self._trainer: Any = module.trainer

    @property
    def _params(self) -> list[nn.Parameter]:
        return list(self._stacks.params.values())

    def watched(self, hook: Method) -> Method:
        """Return a hook that raises an error if it mixes the tensors of clients."""

        def made(*args: Any) -> Any:
            own, grads = self._copy(self._callback), [param.grad for param in self._params]
            tensors = [*self._params, *(grad for grad in grads if grad is not None)]
            with Watch({str(i): tensor for i, tensor in enumerate(tensors)}) as watch:
                result = hook(*args)
            is_same = all(p.grad is grad for p, grad in zip(self._params, grads, strict=True))
            if own is not None and (watch.written or not is_same) and self._mixes(own, args):
                raise FederationError(
                    f"{type(self._callback).__name__}.{self._name} changes the gradients or"
                    " parameters of a client by those of others: clients that train at once have"
                    " stacked tensors, so that the norm of a tensor is that of all clients. To clip"
                    " the gradients of each client, set gradient_clip_val of the Trainer; otherwise"
                    " train the module without VectorizedClients"
                )
            return result

        return made

    def _copy(self, callback: Callback) -> Any:
        """Return a copy of a callback that logs nothing; None if it cannot be copied."""
        copies = _silent_copies([callback], _shared_by_copies(self._trainer, self._module))
        if not copies:
            return None
        vars(copies[0]).pop(self._name, None)  # the hook that watches
        return copies[0]

    def _mixes(self, callback: Any, args: Any) -> bool:
        """Return whether made-up tensors of the first client depend on those of the others."""
        trainer, user = self._trainer, self._stacks.module
        before = [(param, param.grad) for param in self._params]
        quiet = {"_loggers": [DummyLogger()], "should_stop": trainer.should_stop}
        with (
            attributes_set(trainer, quiet),
            attributes_set(self._module, {"log": _nothing, "log_dict": _nothing}),
            left_alone(user),
            options_set(trainer.optimizers[0], []),
        ):
            try:
                return any(
                    not is_equal(*(self._first(callback, args, size, of) for of in _OF_OTHERS))
                    for size in _SIZES
                )
            except Exception:  # of a hook that cannot be called again
                return False
            finally:
                for param, grad in before:
                    param.grad = grad

    def _first(self, callback: Any, args: Any, size: float, others: float) -> list[Tensor]:
        """Return the gradients and parameters of the first client after the hook."""
        params, hook = self._params, getattr(self._copy(callback), self._name)
        with self._stacks.untouched(), seeded_rng(0, params[0].device):
            for param in params:
                param.grad = size * torch.randn_like(param)
                param.grad[1:] *= others
                param.data[1:] *= others
            hook(*args)
            grads = [param.grad for param in params if param.grad is not None]
            return [tensor[0].detach().clone() for tensor in (*grads, *params)]


def _shared_by_copies(trainer: Any, module: LightningModule, *others: Any) -> dict[int, Any]:
    """Return what copies of callbacks share with the originals, by ``id``.

    Args:
        trainer: The Trainer.
        module: The module.
        others: Other objects that are shared.
    """
    shared = [trainer, trainer.lightning_module, trainer.datamodule, *others, *trainer.loggers]
    shared += [*trainer.optimizers, *(c for c in trainer.callbacks if is_known(type(c)))]
    for part in module.modules():
        shared += [part, *part._parameters.values(), *part._buffers.values()]
    return {id(each): each for each in shared}


def _silent_copies(callbacks: Sequence[Callback], shared: dict[int, Any]) -> list[Callback]:
    """Return copies of callbacks that log _nothing; none if they cannot be copied.

    Args:
        callbacks: The callbacks.
        shared: What the copies share with them, by ``id``.
    """
    try:
        copies = copy.deepcopy(list(callbacks), dict(shared))
    except Exception:  # an open file, for example
        return []
    for each in copies:
        vars(each).update(log=_nothing, log_dict=_nothing)
    return copies


def _nothing(*args: Any, **options: Any) -> None:
    """Log nothing."""
