"""Values that a module logs in the local steps of a Lightning batch, for all clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.runners.local_step import LocalStep, Outcome
from lightning_fl.runners.samples import Samples


class StepLogs:
    """Collect the values that a module logs, until the last local step of a Lightning batch.

    Args:
        local: The module's step, which holds the options of the logged values.
    """

    def __init__(self, local: LocalStep) -> None:
        self._local = local
        #: By key, one tuple per local step: values, weights and mask of active clients, ``[k]``.
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
        if outcome.logs:
            counts = samples.counts() if self._local.wants_batch_size else sizes
            # Asynchronous copies; nothing is read back from the device.
            counts, trains = (t.to(device, non_blocking=True) for t in (counts, active))
            for name, (value, size) in outcome.logs.items():
                weight = size.where(~size.isnan(), counts) * trains
                self._noted.setdefault(name, []).append((value, weight, active))
        if outcome.recorded:
            weight = (sizes * active).to(device, non_blocking=True)
            record: Any = self._local.module._record
            record(outcome.recorded["loss"].where(weight > 0, 0), weight)

    def log(self, log: Callable[..., None], module: LightningModule) -> None:
        """Log one value for all steps and clients of the batch.

        Args:
            log: The function that logs a value under a name, with options.
            module: The user's module, which logs its metrics itself.
        """
        for key, noted in self._noted.items():
            name, options = self._local.log_names[key], dict(self._local.log_options[key])
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
        for name, metric in self._local.metrics.items():
            module.log(name, metric, **self._local.log_options[name])
