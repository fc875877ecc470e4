"""The table of rounds."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.files import write_atomically

#: Name of the file.
TABLE = "rounds.csv"
#: Columns of the loop that are not a cause of dropped clients.
COLUMNS = {"round", "clients", "dropped", "dropped_clients", "num_samples", "num_steps", "lr"}
COLUMNS |= {"bytes_up", "bytes_down", "kept"}


class RoundTable:
    """Table with one row per finished round: the metrics of the loop, then those of the module.

    The table is saved in checkpoints, so that the file is complete after an interruption.

    Args:
        rows: Initial rows.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.rows = list(rows)
        #: Columns of the file that was written last.
        self._columns: list[str] = []
        self._written = 0
        self._text = ""
        self._before: Mapping[str, Any] = {}
        self._is_open = False
        #: Columns of the open row that belong to the loop.
        self._own: set[str] = set()

    def begin(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of earlier rounds, which Lightning keeps."""
        self._before = dict(metrics)

    def is_fresh(self, name: str, metrics: Mapping[str, Any]) -> bool:
        """Return whether a metric was logged in this round. It is then a different tensor."""
        return name in metrics and metrics[name] is not self._before.get(name)

    def fresh(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics that were logged in this round."""
        return {name: float(metrics[name]) for name in metrics if self.is_fresh(name, metrics)}

    def add(self, figures: dict[str, Any]) -> None:
        """Add the row of a finished round."""
        self.rows.append(figures)
        self._is_open, self._own = True, set(figures)

    def complete(self, metrics: Mapping[str, Any], close: bool = False) -> None:
        """Add the metrics of the module, after its ``on_train_epoch_end`` has run.

        Metrics with the name of a column of the loop get the prefix ``module/``.

        Args:
            metrics: All logged metrics.
            close: Whether the row is complete.
        """
        if self._is_open:
            fresh = sorted(self.fresh(metrics).items())
            logged = {
                f"module/{name}" if name in self._own else name: value
                for name, value in fresh
                if "federation/" not in name
            }
            # A new dictionary, as a checkpoint may hold the old one.
            self.rows[-1] = self.rows[-1] | logged
            self._is_open = not close

    @rank_zero_only
    def write(self, path: str | os.PathLike[str] | None) -> None:
        """Write all rows as CSV; nothing if there are no rows or the path is None."""
        if path is None or not self.rows:
            return
        columns = list(dict.fromkeys([*self._columns, *(n for r in self._unwritten() for n in r)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        if columns != self._columns or self._written > len(self.rows):
            self._columns, self._written, self._text = columns, 0, ""
            writer.writeheader()
        # Format new rows only, as formatting all rows would slow down long runs.
        writer.writerows(self._unwritten())
        self._text, self._written = self._text + text.getvalue(), len(self.rows)
        # Not durable: waiting for the disk can take a third of a round, and checkpoints contain the
        # rows as well.
        write_atomically(path, self._text, durable=False)

    def _unwritten(self) -> list[dict[str, Any]]:
        return self.rows[self._written :]
