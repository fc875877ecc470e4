"""Callbacks that change the steps of clients that train at once."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.hooks import overrides
from lightning_fl.runners.attributes import names_in
from lightning_fl.runners.later_rounds import OF_LIGHTNING
from lightning_fl.runners.optimizer_values import Options, options_of, params_of
from lightning_fl.runners.step_hooks import is_known
from lightning_fl.runners.tensors import is_equal
from lightning_fl.types import Step

#: Types of attributes that are compared by value; others are compared by identity.
PLAIN = (int, float, str)


class CallbacksAtOnce:
    """Warn if callbacks change the steps of a batch of clients that train at once.

    A batch has several local steps, and is one of several groups of clients. A callback could
    change the optimizer's options, the stacked parameters, or attributes of the module that its
    methods read.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        trainer: Any = module.trainer
        self._module, self._trainer = module, trainer
        #: Names of the user's callbacks by hook of a batch.
        self._names = {
            hook: [
                type(each).__name__
                for each in trainer.callbacks
                if overrides(each, hook, Callback) and not is_known(getattr(each, hook))
            ]
            for hook in ("on_train_batch_start", "on_train_batch_end")
        }
        #: Whether there is nothing to compare any more.
        self.is_done = not any(self._names.values())
        self._before: tuple[Options, dict[str, Any]] = [], {}
        #: Hooks after which parameters were compared, and the parameters before.
        self._compared, self._params = set[str](), list[Tensor]()

    @cached_property
    def _read(self) -> set[str]:
        """Names of the attributes that methods of the module's class mention."""
        return names_in(type(self._module))

    def begin(self) -> None:
        """Note options and attributes, before the hooks of callbacks."""
        if self.is_done:
            return
        self._before = options_of(self._trainer.optimizers[0]), dict(vars(self._module))
        waits = any(names and hook not in self._compared for hook, names in self._names.items())
        self._params = []
        if waits:
            params = params_of(self._trainer.optimizers[0])
            self._params = [param.detach().clone() for param in params]

    def end(self, hook: str, step: Step, is_first: bool) -> None:
        """Compare options and attributes, after the hooks of callbacks.

        Args:
            hook: Name of the hook.
            step: The local steps of the batch.
            is_first: Whether it is the first batch of the round, in which attributes may be set for
                the round.
        """
        if self.is_done or not self._names[hook] or len(step.rows) * step.steps <= 1:
            return
        options, attributes = self._before
        pairs = zip(options, options_of(self._trainer.optimizers[0]), strict=False)
        changed = [
            f"the optimizer's {n}" for old, new in pairs for n in new if new[n] != old.get(n)
        ]
        if hook not in self._compared:  # once, since copies take time
            self._compared.add(hook)
            if not is_equal(self._params, params_of(self._trainer.optimizers[0])):
                changed.append("the clients' parameters")
        changed += [
            f"{type(self._module).__name__}.{name}"
            for name, value in vars(self._module).items()
            if not is_first and name not in OF_LIGHTNING
            if value is not (old := attributes.get(name, self)) and name in self._read
            if not (isinstance(value, PLAIN) and isinstance(old, PLAIN) and value == old)
        ]
        if not changed:
            return
        self.is_done, what = True, " and ".join(dict.fromkeys(changed))
        rank_zero_warn(
            f"{', '.join(self._names[hook])}: {hook} changes {what}. It is called once for"
            f" {len(step.rows)} clients and {step.steps} local steps, since clients train at once."
            " A value of the round belongs in on_train_epoch_start. For a learning rate that"
            " depends on the local step, use a scheduler with interval='step'. Otherwise, train the"
            " module without VectorizedClients"
        )
