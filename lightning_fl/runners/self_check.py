"""The check of the first round: whether the first client changes the first step of the second."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import attributes_set
from lightning_fl.runners.hyperparameters import HYPERPARAMETERS
from lightning_fl.runners.local_step import LocalStep
from lightning_fl.runners.module_copy import copied_module
from lightning_fl.runners.samples import copied
from lightning_fl.runners.tensors import GLOBAL_PARAMETERS, ModuleTensors, is_equal

#: Largest size of the parameters and buffers of a module that is copied, in bytes.
MAX_BYTES = 2**26


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
        self.is_done |= self._first is not None

    def begin_step(self, client: int, batch: Any) -> None:
        """Copy the module at the first step of the first client; compare at that of the second."""
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
        if self._first is not None and not self._after:
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
        try:
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            for name, tensor in self.tensors.by_name.items():
                tensors[name].data.copy_(tensor)
            silent = attributes_set(self.module.trainer, {"_loggers": [DummyLogger()]})
            with seeded_rng(0, self.module.device), torch.enable_grad(), silent:
                step = LocalStep(module, self.tensors.constants)
                outcome, gradients = step.by_itself({}, copied(batch))
        except Exception:  # the step itself will fail
            return []
        return [outcome.loss, *gradients.values()]
