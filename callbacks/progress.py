"""Progress of a fit over rounds and clients."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from statistics import median
from typing import Any

import rich.console
import rich.progress
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lightning_fl.callbacks.federated_loop import loop_of
from lightning_fl.options import check_integer


class RoundProgress(ProgressBar):
    """Show rounds, clients and the metrics that the module logs with ``prog_bar=True``.

    After a round, one line is printed with its metrics, the time that it took, an estimate of the
    remaining time, and the number of dropped clients. In a terminal, a bar below shows the
    clients of the current round. The estimate leaves out the first round, which compiles steps.

    Args:
        lines: Maximum number of lines per fit. Longer fits print every second round, or fewer.

    Raises:
        FederationError: If ``lines`` is not positive.
    """

    def __init__(self, lines: int = 100) -> None:
        super().__init__()
        self.lines = check_integer("lines", lines, min=1)
        self._console = rich.console.Console()
        # No refresh thread: it would interrupt training ten times per second.
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._enabled = True
        self._drawn = 0.0
        #: Seconds of the latest rounds, except the first one of the fit.
        self._seconds = deque[float](maxlen=10)

    def disable(self) -> None:
        """Disable the progress bar."""
        self._enabled = False

    def enable(self) -> None:
        """Enable the progress bar."""
        self._enabled = True

    @property
    def _live(self) -> bool:
        return self._enabled and self._console.is_terminal

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._enabled:
            self._console.print(*args, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the Trainer has a :class:`FederatedLoop`."""
        super().setup(trainer, pl_module, stage)
        self._loop = loop_of(trainer, "RoundProgress")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the progress bar."""
        self._first = self._printed = self._loop.round
        self._since = time.monotonic()
        self._seconds.clear()
        if self._live:
            total = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
            self._task = self._bar.add_task("", total=total, completed=self._loop.round)
            self._bar.start()
            self._draw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the progress bar at most ten times per second."""
        if self._live and time.monotonic() - self._drawn > 0.1:
            self._draw(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the validation metrics."""
        if self._live and not trainer.sanity_checking and self._bar.live.is_started:
            self._draw(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the finished round."""
        if self._live:
            self._draw(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the previous round, as all its metrics are available now."""
        done, total = self._loop.round, trainer.max_epochs or -1
        if done == self._printed:
            return
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        if self._printed > self._first:
            self._seconds.append(seconds)
        self._printed = done
        if self._enabled and (done % max(1, -(-total // self.lines)) == 0 or done == total):
            row = self._loop.rows[-1]
            line = [self._line(trainer, pl_module, done, row), f"{seconds:.3g} s per round"]
            line += self._left(total - done)
            if row["dropped"]:
                line.append(f"dropped {row['dropped']} of {row['clients']} clients")
            self.print(" · ".join(line), highlight=False, soft_wrap=True)

    def _left(self, rounds: float) -> list[str]:
        """Return the remaining time, if it is known."""
        if rounds <= 0 or not self._seconds:
            return []
        return [f"{timedelta(seconds=round(rounds * median(self._seconds)))} left"]

    def _line(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        round: int,
        row: Mapping[str, Any] | None = None,
    ) -> str:
        """Return round, client and metrics; with a finished round's row, only its own metrics."""
        total = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        line = [f"round {round}{total}"]
        if round > self._loop.round:
            line.append("{} of {} clients done".format(*self._loop.clients_done))
        figures = self.get_metrics(trainer, pl_module)
        figures.pop("v_num", None)
        if row is not None:  # without validation in a round, Lightning keeps its last metrics
            old = trainer.callback_metrics.keys() - {n.removeprefix("module/") for n in row}
            figures = {name: value for name, value in figures.items() if name not in old}
        line += [f"{k} {v:.4g}" for k, v in figures.items() if isinstance(v, int | float)]
        return " · ".join(line)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        client, clients = self._loop.clients_done
        completed = self._loop.round + client / max(clients, 1)
        line = [self._line(trainer, pl_module, self._loop.round + (clients > 0))]
        line += self._left((trainer.max_epochs or -1) - completed)
        self._bar.update(self._task, completed=completed, description=" · ".join(line))
        self._bar.refresh()
        self._drawn = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last round and stop the progress bar."""
        self.on_train_epoch_start(trainer, pl_module)
        if self._live and self._bar.live.is_started:
            self._draw(trainer, pl_module)
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop the progress bar."""
        self._stop()

    def _stop(self) -> None:
        if self._bar.live.is_started:  # otherwise stop() would print an empty line
            self._bar.stop()
