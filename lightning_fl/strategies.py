"""Strategy that distributes clients over GPUs, nodes, or the cores of one machine."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.hooks import replaced
from lightning_fl.options import check_number

#: Lightning synchronizes a stop flag before each batch; here it happens once in so many batches.
BATCHES_PER_STOP_FLAG = 50


class ClientParallelStrategy(DDPStrategy):
    """Distribute the clients of a round over processes: ``Trainer(strategy="client_parallel")``.

    Local training is not synchronized. The processes aggregate at the end of each round. They share
    the test samples, and also the validation samples if no callback acts on validation metrics. The
    result does not depend on the number of processes, bit for bit, given the same number of threads
    in each. Processes are launched as for DDP (by Lightning on one node, by torchrun or SLURM on
    several nodes) and communicate by NCCL on GPUs and gloo on CPUs.

    Values logged with ``self.log`` are reduced over all clients in training, and over all samples
    in validation and test, regardless of ``sync_dist``.

    If a process fails, the run ends on all processes, at the latest at the end of the round. If a
    process hangs, the run ends after ``timeout``. A run resumes from its last checkpoint on any
    number of processes.

    If a large model needs several devices per client, use Lightning's ``ddp`` instead: all
    processes then train the same client, each on its share of every batch.

    Args:
        timeout: Maximum time that a process waits for the others at the end of a round, in seconds.
        options: Keyword arguments of Lightning's ``DDPStrategy``, such as
            ``process_group_backend``.

    Raises:
        FederationError: If ``timeout`` is not positive. At the start of a fit: if the callbacks
            contain no ``FederatedLoop``, or the module has or would get ``SyncBatchNorm``.

    Example:
        >>> ClientParallelStrategy(timeout=60).timeout
        datetime.timedelta(seconds=60)
    """

    def __init__(self, timeout: float = 1800.0, **options: Any) -> None:
        self.timeout = timedelta(seconds=check_number("timeout", timeout, above=0))
        super().__init__(timeout=self.timeout, **options)
        #: Whether this process has no client in the batch, but waits; set by the loop.
        self.is_idle = False
        #: Whether each process validates on all samples during a fit; set by the loop.
        self.repeats_validation = False
        self._undo = ExitStack()
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer) -> None:
        """Prepare the module, its logging, and the synchronization of the stop flag."""
        module, self._trainer = self.lightning_module, trainer
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            data = trainer.datamodule  # type: ignore[attr-defined]  # set by the data connector
            if getattr(data, "plan", None) is None:
                raise FederationError(
                    "strategy='client_parallel' requires a FederatedLoop: add one to the callbacks,"
                    " or choose strategy='ddp'"
                )
            if self._layer_sync or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
                raise FederationError(
                    "SyncBatchNorm would mix the batches of different clients with"
                    " strategy='client_parallel': remove sync_batchnorm of the Trainer, and use"
                    " BatchNorm in the module"
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
        """Restore the module and the Trainer."""
        self._undo.close()
        self.is_idle = self.repeats_validation = False  # a failed fit may have ended in between
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Terminate the processes that this process has launched, since they may hang."""
        super().on_exception(exception)
        if isinstance(self.launcher, _SubprocessScriptLauncher):
            self.launcher.kill(signal.SIGKILL)

    @property
    def _has_failed(self) -> bool:
        """Whether this process has failed, so that the others do not come."""
        return self._trainer is not None and self._trainer.interrupted

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes, except after a failure, when a checkpoint may be saved."""
        if not self._has_failed:
            super().barrier(*args, **kwargs)

    def configure_ddp(self) -> None:
        """Broadcast the parameters of process 0, without a DDP wrapper."""
        assert self.model is not None
        _sync_module_states(self.model)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make a local step; in an idle process its loss is zero.

        The gradients of that loss are zero instead of missing, since hooks of the module may read
        all of them.
        """
        if not self.is_idle:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        groups = (group["params"] for group in self.optimizers[0].param_groups)
        trained = [p for p in chain(*groups) if p.requires_grad]
        if not trained:  # in a phase whose parameters are frozen
            trained = [next(p for p in self.lightning_module.parameters() if p.requires_grad)]
        first, *others = (0 * p.sum().real for p in trained)
        return sum(others, first)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over processes, in float64 for integers, since torch would truncate their mean.

        After a failure, the value of this process is returned.
        """
        if self._has_failed:
            return tensor
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)


def _log_for_all(
    strategy: ClientParallelStrategy, trainer: Trainer, log: Callable[..., None]
) -> Callable[..., None]:
    """Return a ``self.log`` that synchronizes in validation and test, but not in local training.

    If each process validates on all samples, no reduction is needed. In an idle batch nothing is
    logged, because it belongs to no client.
    """

    def wrapped(name: str, value: Any, *args: Any, **options: Any) -> None:
        if strategy.is_idle and trainer.training:
            return
        repeats = trainer.state.fn == TrainerFn.FITTING and strategy.repeats_validation
        log(name, value, *args, **{**options, "sync_dist": not (trainer.training or repeats)})

    return wrapped


def gathered(value: Any) -> list[Any]:
    """Return the values of all processes, in order of rank; all processes must call it.

    Raises:
        FederationError: If a process failed, or did not respond within the timeout.
    """
    values: list[Any] = [None] * torch.distributed.get_world_size()
    try:
        torch.distributed.all_gather_object(values, value)
    except RuntimeError as error:
        raise FederationError(
            f"another process failed or did not respond within the timeout ({error}). See its"
            " output for the cause. To continue, resume from the last checkpoint, on any number of"
            " processes"
        ) from error
    return values


if "client_parallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "client_parallel",
        ClientParallelStrategy,
        description="Distributes the clients of a round over processes",
    )
