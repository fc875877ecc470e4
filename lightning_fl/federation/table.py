"""The table of rounds."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.files import write_atomically


class RoundTable:
    """One row for each round that ended: the federation's figures, then what the module logged.

    It is part of the checkpoint, so its file is a function of the run, however often it was killed.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self.rows = list(rows)
        #: The rows that were written last, as they were written.
        self._columns: list[str] = []
        self._written = 0
        self._text = ""
        self._before: Mapping[str, Any] = {}
        self._is_open = False
        #: Columns of the open row that are the federation's.
        self._own: set[str] = set()

    def begin(self, metrics: Mapping[str, Any]) -> None:
        """Note what earlier rounds logged: Lightning keeps it."""
        self._before = dict(metrics)

    def is_fresh(self, name: str, metrics: Mapping[str, Any]) -> bool:
        """Say whether a figure was logged since the round began: it is another tensor then."""
        return name in metrics and metrics[name] is not self._before.get(name)

    def fresh(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures that were logged since the round began."""
        return {name: float(metrics[name]) for name in metrics if self.is_fresh(name, metrics)}

    def add(self, figures: dict[str, Any]) -> None:
        """Begin the row of a round that ended."""
        self.rows.append(figures)
        self._is_open, self._own = True, set(figures)

    def complete(self, metrics: Mapping[str, Any], close: bool = False) -> None:
        """Add what the module logged; late, as its own on_train_epoch_end runs after callbacks'.

        A metric with the name of one of the federation's columns gets the prefix ``module/``.
        """
        if self._is_open:
            fresh = sorted(self.fresh(metrics).items())
            logged = {
                f"module/{name}" if name in self._own else name: value
                for name, value in fresh
                if "federation/" not in name
            }
            self.rows[-1] = self.rows[-1] | logged  # a new row: a checkpoint may hold the old
            self._is_open = not close

    @rank_zero_only
    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as CSV."""
        columns = list(dict.fromkeys([*self._columns, *(n for r in self._unwritten() for n in r)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        if columns != self._columns or self._written > len(self.rows):
            self._columns, self._written, self._text = columns, 0, ""
            writer.writeheader()
        # Only what is new: a long run would spend its time on the rows of before.
        writer.writerows(self._unwritten())
        self._text, self._written = self._text + text.getvalue(), len(self.rows)
        # Not durable: waiting for the disk takes a third of what a round costs, and a checkpoint
        # holds the rows, too.
        write_atomically(path, self._text, durable=False)

    def _unwritten(self) -> list[dict[str, Any]]:
        return self.rows[self._written :]
