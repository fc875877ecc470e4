"""The table of rounds."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.callbacks.checkpoint import write_atomically


class RoundTable:
    """One row for each round that ended: the federation's figures, then what the module logged.

    It is part of the checkpoint, so its file is a function of the run, however often it was killed.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        #: Figures that validation logged since the last row.
        self.validated: set[str] = set()
        self._before: Mapping[str, Any] = {}
        self._ever_validated: set[str] = set()
        self._stale: set[str] = set()
        self._is_open = False

    def before_validation(self, metrics: Mapping[str, Any]) -> None:
        """Note what was logged before."""
        self._before = dict(metrics)

    def after_validation(self, metrics: Mapping[str, Any]) -> None:
        """Note which figures are new: Lightning keeps those of earlier validations."""
        self.validated = {k for k, v in metrics.items() if v is not self._before.get(k)}

    def add(self, figures: dict[str, Any]) -> None:
        """Begin the row of a round that ended."""
        self.rows.append(figures)
        self._ever_validated |= self.validated
        self._stale = self._ever_validated - self.validated
        self.validated = set()
        self._is_open = True

    def complete(self, metrics: Mapping[str, Any], close: bool = False) -> None:
        """Add what the module logged; late, as its own on_train_epoch_end runs after callbacks'."""
        if self._is_open:
            names = sorted(n for n in metrics if n not in self._stale and "federation/" not in n)
            self.rows[-1] |= {name: float(metrics[name]) for name in names}
            self._is_open = not close

    @rank_zero_only
    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all rows as CSV."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))
