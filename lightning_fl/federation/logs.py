"""Values that the training steps of clients log, summed in the order of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.strategies import gathered

#: Hooks that may log before the local steps of a round. Every process calls them.
BEFORE_STEPS = ("on_train_start", "on_train_epoch_start")


class _OfStep(NamedTuple):
    """Hold the value of a single step, with its name in ``trainer.callback_metrics``."""

    client: int
    name: str
    value: Tensor


class ClientLogs:
    """Collect the values that ``training_step`` logs in a round, per client.

    Lightning sums logged values in the order of logging. This class takes the part of each client
    out when the client is done, and sums the parts in the order of clients at the end of the round.
    The results then do not depend on the assignment of clients to processes.
    """

    def __init__(self) -> None:
        self._parts: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        #: Last value of each key that is logged in single steps, and its client.
        self._steps: dict[str, _OfStep] = {}

    def take(self, trainer: Trainer, client: int) -> None:
        """Take out the values that were logged since the last call, when clients are done.

        Args:
            trainer: The Trainer that logs.
            client: Position of the client in the plan, or of the first client of a group.
        """
        results: Any = trainer.fit_loop.epoch_loop._results
        part = self._parts[client] = {}
        for key, metric in results.items():
            self._note_step(key, metric, client)
            if _is_sum(metric) and metric.meta.fx not in BEFORE_STEPS:
                samples = _samples(metric)
                part[key] = (metric.value, samples)
                metric.value = torch.zeros_like(metric.value)
                metric.cumulated_batch_size = torch.zeros_like(samples)

    def discard(self, trainer: Trainer) -> None:
        """Discard the values of the local step of a round without clients.

        Args:
            trainer: The Trainer that logs.
        """
        results: Any = trainer.fit_loop.epoch_loop._results
        for metric in results.values():
            if metric.meta.fx not in BEFORE_STEPS:
                metric.reset()

    def _note_step(self, key: str, metric: Any, client: int) -> None:
        """Record the value of a single step if this client has logged it."""
        value, before = metric._forward_cache, self._steps.get(key)
        is_new = before is None or value is not before.value
        if metric.meta.on_step and not metric.has_reset and is_new and isinstance(value, Tensor):
            self._steps[key] = _OfStep(client, metric.meta.forked_name(on_step=True), value)

    def put_back(self, trainer: Trainer, plan: RoundPlan | None = None) -> None:
        """Replace the logged values by those of all clients.

        Args:
            trainer: The Trainer that logs.
            plan: Plan of the round, if the clients are distributed over processes. All processes
                must then call this method.

        Raises:
            FederationError: If a metric was logged on some processes only, since its ``compute``
                would wait for the others.
        """
        parts, steps = self._parts, list[Mapping[str, _OfStep]]()
        if plan is not None:
            own = {
                client: {
                    key: (value.cpu(), samples.cpu()) for key, (value, samples) in part.items()
                }
                for client, part in parts.items()
            }
            last = {key: step._replace(value=step.value.cpu()) for key, step in self._steps.items()}
            every = gathered((own, last))
            parts = {client: part for parts, _ in every for client, part in parts.items()}
            steps = [last for _, last in every]
            _merge_logs(trainer)
        results: Any = trainer.fit_loop.epoch_loop._results
        for key, metric in results.items():
            entries = [parts[client][key] for client in sorted(parts) if key in parts[client]]
            if not entries or not _is_sum(metric):
                continue
            value, samples = (torch.stack(each).sum(0) for each in zip(*entries, strict=True))
            metric.value = metric.value + value.to(metric.value)
            metric.cumulated_batch_size = _samples(metric) + samples.to(metric.value.device)
        if plan is not None:  # only after the sums, since Lightning computes the metrics then
            _put_last_steps(trainer, plan, steps)


def _is_sum(metric: Any) -> bool:
    """Return whether Lightning accumulates a logged value over an epoch, as a mean or a sum."""
    if not metric.is_tensor or not metric.meta.on_epoch or metric.has_reset:
        return False
    return bool(metric.meta.is_mean_reduction or metric.meta.is_sum_reduction)


def _samples(metric: Any) -> Tensor:
    """Return the number of samples in a logged mean; 0 for other reductions."""
    samples: Tensor = getattr(metric, "cumulated_batch_size", torch.zeros((), dtype=torch.int64))
    return samples


def _merge_logs(trainer: Trainer) -> None:
    """Add what the other processes have logged to the values of this process.

    Sums and means over local steps were taken out. What is left was logged before the local steps,
    on every process.
    """
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = {key: m for key, m in results.items() if m.meta.on_epoch and not m.has_reset}
    own = {key: _logged(m) for key, m in logged.items() if m.is_tensor}
    metrics = {key for key, m in logged.items() if not m.is_tensor}
    everywhere = gathered((own, metrics))
    for key in sorted(set().union(*(keys for _, keys in everywhere))):
        if missing := [rank for rank, (_, keys) in enumerate(everywhere) if key not in keys]:
            raise FederationError(
                f"the metric {key} was not logged on processes {missing}, which had no clients or"
                " did not log it. Log it in every training step, and use at most as many processes"
                " as there are clients in a round"
            )
    device = trainer.strategy.root_device
    for key in dict.fromkeys(key for figures, _ in everywhere for key in figures):
        values = [figures[key] for figures, _ in everywhere if key in figures]
        if key not in results:
            meta = _Metadata(**values[0].options)
            # As in `self.log`, which this process may call in later rounds.
            meta.sync = _Sync(trainer.strategy.reduce, rank_zero_only=values[0].rank_zero_only)
            results[key] = _ResultMetric(meta, is_tensor=True).to(device)
        metric = results[key]
        value, samples = values[0].value, values[0].samples
        if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
            value = metric.meta.reduce_fx(torch.stack([one.value for one in values]))
        metric.value, metric.cumulated_batch_size = value.to(device), samples.to(device)
        metric.has_reset, metric._computed, metric._update_count = False, None, 1


def _put_last_steps(
    trainer: Trainer, plan: RoundPlan, everywhere: Sequence[Mapping[str, _OfStep]]
) -> None:
    """Set each metric of single steps to the last value, in the order of a single process."""
    if not (keys := {key: None for steps in everywhere for key in steps}):
        return
    in_order = [step for step in replace(plan, rank=0, world_size=1).schedule if step.last]
    position = {row: i for i, step in enumerate(in_order) for row in step.rows}
    metrics: Any = trainer.callback_metrics
    for key in keys:
        values = [steps[key] for steps in everywhere if key in steps]
        last = max(values, key=lambda each: position[each.client])
        metrics[last.name] = last.value.to(trainer.strategy.root_device)


class _Logged(NamedTuple):
    """Hold one accumulated value of ``self.log`` in a form that can be sent to other processes."""

    options: dict[str, Any]
    value: Tensor
    samples: Tensor  # number of samples of a mean, otherwise 0
    rank_zero_only: bool


def _logged(metric: Any) -> _Logged:
    options = {name: value for name, value in vars(metric.meta).items() if name != "_sync"}
    rank_zero_only = metric.meta.sync.rank_zero_only
    return _Logged(options, metric.value.cpu(), _samples(metric).cpu(), rank_zero_only)
