"""Clients over processes: several GPUs, several nodes, or the cores of one machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_fl.hooks import replaced
from lightning_fl.types import FederationError

#: Lightning asks all processes before each batch whether one is to end; here before each n-th.
BATCHES_PER_STOP_FLAG = 50


class ClientParallelStrategy(DDPStrategy):
    """Each process trains its share of a round's clients: ``Trainer(strategy="client_parallel")``.

    Local training synchronizes nothing; the processes meet at the end of a round, to aggregate, and
    share test samples, and validation samples where nothing acts on validation. The result does not
    depend on their number, bit for bit, given the same number of threads in each. They are
    started as Lightning starts those of DDP (by itself on one node, by torchrun or SLURM on many)
    and talk through NCCL on GPUs and gloo on CPUs.

    What a module logs with ``self.log`` in training is the figure of all clients; in validation and
    test of all samples, whether it says ``sync_dist`` or not.

    A process that dies ends the run on all of them, at the latest at the end of the round; one
    that hangs, after ``timeout``. The last checkpoint resumes on any number of processes.

    For models too large for one device use Lightning's own ``ddp`` instead: every process then
    trains the same client, on its share of each batch.

    Args:
        timeout: Seconds, or a timedelta, that a process waits for the others at the end of a round.
        options: Of Lightning's ``DDPStrategy``, such as ``process_group_backend``.

    Raises:
        FederationError: At the start of a fit without a ``FederatedLoop``, which aggregates; if
            ``timeout`` is not positive.

    Example:
        >>> ClientParallelStrategy(timeout=60).timeout
        datetime.timedelta(seconds=60)
    """

    def __init__(self, timeout: float | timedelta = 1800.0, **options: Any) -> None:
        self.timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if self.timeout <= timedelta(0):
            raise FederationError(f"timeout must be positive, got {timeout}")
        super().__init__(timeout=self.timeout, **options)
        #: Whether this process has no client left in the round; the loop says so for each batch.
        self.is_idle = False
        #: Whether each process validates on all samples in a fit; the loop says so.
        self.repeats_validation = False
        self._undo = ExitStack()

    def setup(self, trainer: Trainer) -> None:
        """Prepare the module, and what Lightning synchronizes by itself."""
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            data = trainer.datamodule  # type: ignore[attr-defined]  # set by the data connector
            if getattr(data, "plan", None) is None:
                raise FederationError(
                    "client_parallel trains clients, of which there are none: add a FederatedLoop"
                    " to the callbacks, or choose strategy='ddp'"
                )
            self._throttle_stop_flag(trainer)
        for child in module.modules():
            if isinstance(child, LightningModule):
                log = partial(_log_for_all, self, trainer)
                self._undo.enter_context(replaced(child, "log", log))
        super().setup(trainer)

    def _throttle_stop_flag(self, trainer: Trainer) -> None:
        epoch: Any = trainer.fit_loop.epoch_loop

        def at_times(ask: Callable[[], None]) -> Callable[[], None]:
            return lambda: ask() if epoch.batch_idx % BATCHES_PER_STOP_FLAG == 0 else None

        self._undo.enter_context(replaced(epoch, "_broadcast_sigterm_tensor", at_times))

    def teardown(self) -> None:
        """Let go of module and Trainer."""
        self._undo.close()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one has started, which may hang and never hear of it."""
        super().on_exception(exception)
        if isinstance(self.launcher, _SubprocessScriptLauncher):
            self.launcher.kill(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)

    def configure_ddp(self) -> None:
        """Begin everywhere with the parameters of process 0; wrap nothing."""
        assert self.model is not None
        _sync_module_states(self.model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a local step; an idle process makes one that teaches nothing.

        Its gradient is zero and not missing: a gradient scaler needs one.
        """
        if not self.is_idle:
            return super().training_step(*args, **kwargs)
        params = (p for group in self.optimizers[0].param_groups for p in group["params"])
        return 0 * next(p for p in params if p.requires_grad).sum()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over processes; the mean of counts is a fraction, which torch would cut off."""
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


def _log_for_all(
    strategy: ClientParallelStrategy, trainer: Trainer, log: Callable[..., None]
) -> Callable[..., None]:
    """Make ``self.log`` wait for nobody in local training, and mean all samples elsewhere.

    Where each process validates on all samples, nothing is left to reduce.
    """

    def wrapped(name: str, value: Any, *args: Any, **options: Any) -> None:
        if len(args) < 8:  # sync_dist is not given by position
            repeats = trainer.state.fn == TrainerFn.FITTING and strategy.repeats_validation
            options["sync_dist"] = not (trainer.training or repeats)
        log(name, value, *args, **options)

    return wrapped


def gathered(value: Any) -> list[Any]:
    """Return what each process passes, in their order; all have to call it.

    Raises:
        FederationError: If one of them died, or does not answer in time.
    """
    values: list[Any] = [None] * torch.distributed.get_world_size()
    try:
        torch.distributed.all_gather_object(values, value)
    except RuntimeError as error:
        raise FederationError(
            f"another process died or did not answer in time ({error}): see what it printed. The"
            " last checkpoint resumes, on any number of processes"
        ) from error
    return values


class ClientLogs:
    """What ``training_step`` logs in a round, client by client.

    Lightning adds up what a process logs, in its order. Here the part of each client is taken out
    when the client is done, and at the end of the round all are added in the order of the clients:
    the figures do not depend on which process trained whom.
    """

    def __init__(self) -> None:
        self._parts: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def take(self, trainer: Trainer, client: int) -> None:
        """Take out what was logged since the last call.

        Args:
            trainer: Whose loop has logged.
            client: Position in the plan of the client, or of the first of those that train at once.
        """
        results: Any = trainer.fit_loop.epoch_loop._results
        part = self._parts.setdefault(client, {})
        for key, metric in results.items():
            if _is_sum(metric):
                samples = _samples(metric)
                part[key] = (metric.value, samples)
                metric.value = torch.zeros_like(metric.value)
                metric.cumulated_batch_size = torch.zeros_like(samples)

    def put_back(self, trainer: Trainer, shared: bool) -> None:
        """Make what was logged the figure of all clients.

        Args:
            trainer: The Trainer whose loop has logged.
            shared: Whether processes share the clients: then all have to call it.

        Raises:
            FederationError: If a metric was logged on some processes only: its own ``compute``
                would wait for the others.
        """
        parts = self._parts
        if shared:
            own = {
                client: {
                    key: (value.cpu(), samples.cpu()) for key, (value, samples) in part.items()
                }
                for client, part in parts.items()
            }
            parts = {client: part for every in gathered(own) for client, part in every.items()}
            _merge_logs(trainer)
        results: Any = trainer.fit_loop.epoch_loop._results
        for key, metric in results.items():
            found = [parts[client][key] for client in sorted(parts) if key in parts[client]]
            if not found or not _is_sum(metric):
                continue
            value, samples = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
            metric.value = metric.value + value.to(metric.value)
            metric.cumulated_batch_size = _samples(metric) + samples.to(metric.value.device)


def _is_sum(metric: Any) -> bool:
    """Say whether Lightning adds up a logged figure over an epoch, as a mean or as a sum."""
    if not metric.is_tensor or not metric.meta.on_epoch or metric.has_reset:
        return False
    return bool(metric.meta.is_mean_reduction or metric.meta.is_sum_reduction)


def _samples(metric: Any) -> Tensor:
    """Return how many samples a logged mean is of, 0 where it is no mean."""
    samples: Tensor = getattr(metric, "cumulated_batch_size", torch.zeros((), dtype=torch.int64))
    return samples


def _merge_logs(trainer: Trainer) -> None:
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = {key: m for key, m in results.items() if m.meta.on_epoch and not m.has_reset}
    own = {key: _logged(m) for key, m in logged.items() if m.is_tensor}
    metrics = {key for key, m in logged.items() if not m.is_tensor}
    everywhere = gathered((own, metrics))
    for key in sorted(set().union(*(found for _, found in everywhere))):
        if missing := [rank for rank, (_, found) in enumerate(everywhere) if key not in found]:
            raise FederationError(
                f"the metric {key} was logged on some processes, but not on {missing}, whose"
                " clients did not log it or which had none: log it in every training step, and use"
                " at most as many processes as clients in a round"
            )
    device = trainer.strategy.root_device
    for key in dict.fromkeys(key for figures, _ in everywhere for key in figures):
        found = [figures[key] for figures, _ in everywhere if key in figures]
        if key not in results:
            meta = _Metadata(**found[0].options)
            meta.sync = _Sync()
            results[key] = _ResultMetric(meta, is_tensor=True).to(device)
        metric = results[key]
        is_extreme = metric.meta.is_max_reduction or metric.meta.is_min_reduction
        reduce = metric.meta.reduce_fx if is_extreme else torch.sum
        metric.value = reduce(torch.stack([one.value for one in found])).to(device)
        metric.cumulated_batch_size = torch.stack([one.samples for one in found]).sum().to(device)
        metric.has_reset, metric._computed, metric._update_count = False, None, 1


class _Logged(NamedTuple):
    """One entry of what Lightning keeps of ``self.log`` over an epoch, to be sent elsewhere."""

    options: dict[str, Any]
    value: Tensor
    samples: Tensor  # how many, where the figure is a mean


def _logged(metric: Any) -> _Logged:
    options = {f.name: getattr(metric.meta, f.name) for f in fields(_Metadata)}
    options.pop("_sync")
    return _Logged(options, metric.value.cpu(), _samples(metric).cpu())


if "client_parallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "client_parallel",
        ClientParallelStrategy,
        description="Each process trains its share of a round's clients",
    )
