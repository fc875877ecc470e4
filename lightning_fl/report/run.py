"""Read the folder of a run. Its files are data, never code."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_fl.callbacks.client_history import ARRIVED, COLUMNS, HISTORY, NOT_SAMPLED
from lightning_fl.errors import FederationError
from lightning_fl.federation.dropped import CAUSES, describe_cause
from lightning_fl.files import error_context, read_text
from lightning_fl.partition import Manifest

#: File name of the table of rounds, by which a folder is known to be that of a run.
TABLE = "rounds.csv"
#: Columns of tables that are not numbers.
TEXTS = ("name", "dropped_clients")
#: Numbers with a larger magnitude are drawn as gaps, like non-finite values.
LARGEST = 1e30
#: Format and version of test.json.
TEST_FORMAT = "lightning_fl test 1"
#: Options that do not affect results: paths, display options, options of reading and writing.
PLACES = {"ckpt_path", "threads", "verbose", "weights_only", "data.root", "data.download"}
PLACES |= {"trainer.default_root_dir", "trainer.enable_progress_bar", "trainer.log_every_n_steps"}
PLACES |= {"trainer.enable_model_summary", "checkpoint.dirpath", "checkpoint.filename"}
PLACES |= {"checkpoint.every_n_rounds"}
#: Options of a fit that do not affect the metrics of a test, and those that a resumed fit may
#: change without notice.
IGNORED_BY_TEST = (
    *("vectorize", "trainer.accelerator", "trainer.callbacks", "trainer.devices"),
    *("trainer.logger", "trainer.max_epochs", "trainer.strategy"),
)
IGNORED_BY_RESUME = ("trainer.logger", "trainer.max_epochs")

Row = dict[str, float]


@dataclass(frozen=True)
class Outcomes:
    """What happened to the clients in each round, a row for each client of a round.

    Args:
        names: Names of the outcomes. The first is that of clients that were not sampled, the second
            that of arrived updates, the others are causes of drops.
        rows: Round, client, place of the outcome in the names, loss and score, ``[n, 5]``. A value
            that is not finite is infinite, one that is unknown is NaN.
        num_clients: Number of clients; rows may have others.
    """

    names: list[str] = field(default_factory=list)
    rows: np.ndarray[Any, np.dtype[np.float64]] = field(
        default_factory=lambda: np.empty((0, len(COLUMNS)))
    )
    num_clients: int = 0

    @cached_property
    def codes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Places of the outcomes in the names, ``[rounds, clients]``."""
        rounds, clients, outcomes = self.rows[:, :3].astype(np.int64).T
        num_clients = clients.max(initial=self.num_clients - 1) + 1
        codes = np.zeros((rounds.max(initial=0), num_clients), np.uint8)
        codes[rounds - 1, clients] = outcomes
        return codes

    def curves(self, column: str) -> dict[int, np.ndarray[Any, np.dtype[np.float64]]]:
        """Return rounds and known values of the loss or the score of each client, ``[n, 2]``."""
        at = COLUMNS.index(column)
        by_client = self._by_client(~np.isnan(self.rows[:, at]))
        return {client: rows[:, [0, at]] for client, rows in by_client.items()}

    def dropped(self) -> dict[int, list[float]]:
        """Return the rounds in which the update of each client was dropped."""
        by_client = self._by_client(self.rows[:, 2] > 1)
        return {client: rows[:, 0].tolist() for client, rows in by_client.items()}

    def _by_client(self, mask: np.ndarray[Any, Any]) -> dict[int, np.ndarray[Any, Any]]:
        some = self.rows[mask]
        some = some[np.argsort(some[:, 1], kind="stable")]
        clients, starts = np.unique(some[:, 1], return_index=True)
        parts = np.split(some, starts[1:])
        return dict(zip(clients.astype(int).tolist(), parts, strict=False))

    def lost(self) -> list[tuple[int, int, int]]:
        """Return id, number of dropped updates and of rounds of the clients that lost one.

        Those that lost the largest share come first.
        """
        rounds = (self.codes > 0).sum(0).tolist()
        some = [(client, len(lost), rounds[client]) for client, lost in self.dropped().items()]
        return sorted(some, key=lambda each: -each[1] / each[2])

    def occurring(self) -> list[tuple[int, str]]:
        """Return places and names of the outcomes of sampled clients that occur."""
        present = np.unique(self.codes).tolist()
        return [(code, name) for code, name in enumerate(self.names) if code and code in present]


@dataclass(frozen=True)
class Run:
    """Contents of the folder of a run.

    Args:
        name: Names of the folder and its parent folder.
        rows: Table of rounds, as numbers; empty cells of the file are missing.
        config: Values of the config by dotted name.
        config_text: Text of the config file.
        environment: Contents of ``environment.json``.
        partition: Partition of the data; None if it is unknown.
        clients: Results of ``PersonalizedEvaluation``, one row per client.
        participation: Participation table, one row per client.
        outcomes: Outcome of every client in every round; without rows if it is unknown.
        names: Names of the clients, if the data gives them.
        test: Contents of ``test.json``: metrics, checkpoint and its round, and options that differ
            from those of the fit; empty without a test.
        resumed: Descriptions of resumed fits with options that differ from those of the first fit.
        metric: Column of the main metric; None chooses it.
        mode: Whether ``max`` or ``min`` is the best value of this metric.
    """

    name: str
    rows: list[Row]
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    partition: Manifest | None = None
    clients: list[Row] = field(default_factory=list)
    participation: list[Row] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=Outcomes)
    names: dict[int, str] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    metric: str | None = None
    mode: str = "max"

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return int(self.rows[-1]["round"])

    @property
    def planned(self) -> int | None:
        """Maximum number of rounds; None if it is unknown."""
        return self.environment.get("rounds")

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished, after all rounds or by early stopping."""
        is_over = self.environment.get("state", "finished") == "finished"
        return is_over or self.rounds == self.planned

    @property
    def seed(self) -> int | None:
        """Seed of the run; None if it is unknown."""
        return self.environment.get("seed")

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each client that trains; empty if it is unknown."""
        if (split := self.partition) is None:
            return []
        return list(map(len, split.clients))[: len(split.clients) - split.unseen_clients]

    def column(self, name: str) -> list[tuple[float, float]]:
        """Return rounds and values of a column, without missing values; NaN is non-finite."""
        return [(row["round"], row[name]) for row in self.rows if name in row]

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the table of rounds."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the folders of runs, and notes on runs without a completed round.

    Args:
        paths: Folders of runs, or folders that contain runs as ``version_0``, ``version_1``, ...

    Raises:
        FederationError: If one of the folders contains no run.
    """
    found: dict[Path, Path] = {}
    left_out = []
    for path in map(Path, paths):
        inside = [path] if (path / TABLE).is_file() else version_folders(path)
        runs = [folder for folder in inside if (folder / TABLE).is_file()]
        if not runs:
            raise FederationError(
                f"{path} has no completed round: pass the folder of a run, such as"
                " runs/digits/version_0, or of several runs, such as runs/digits"
            )
        left_out += [f"{_name(f)}: no round is completed" for f in inside if f not in runs]
        found |= {folder.resolve(): folder for folder in runs}
    return list(found.values()), left_out


def version_folders(path: Path) -> list[Path]:
    """Return the folders ``version_0``, ``version_1``, ... in a folder, by number."""
    found = [each for each in path.glob("version_*") if each.name[8:].isdecimal()]
    return sorted(found, key=lambda each: int(each.name[8:]))


def _name(folder: Path) -> str:
    return "/".join(folder.resolve().parts[-2:])


def read_run(folder: str | Path) -> Run:
    """Read the folder of a run.

    Raises:
        FederationError: If a file cannot be read, or there are no rounds.
    """
    folder = Path(folder)

    def read(name: str, reader: Callable[[Path], Any], default: Any) -> Any:
        path = folder / name
        if not path.is_file():
            return default
        with error_context(f"{path} cannot be read", Exception):
            return reader(_own(path))

    rows = read(TABLE, _table, [])
    if not rows:
        raise FederationError(f"{folder / TABLE} has no rounds: wait for the first one")
    environment = read("environment.json", _json, {})
    config = read("config.yaml", config_values, {})
    partition = read("partition.json", Manifest.read, None)
    run = Run(
        name=_name(folder),
        rows=rows,
        config=config,
        config_text=read("config.yaml", read_text, ""),
        environment=environment,
        partition=partition,
        # Without a metric of clients, an earlier fit has left the table in the folder.
        clients=read("clients.csv", _table, []) if environment.get("client_metric", 1) else [],
        participation=read("participation.csv", _table, []),
        names=read("participation.csv", _names, {}),
        test=read("test.json", _test, {}),
        resumed=list(_resumed(config, sorted(folder.glob("config_resumed_*.yaml")))),
    )
    outcomes = partial(_outcomes, num_clients=len(run.sizes))
    return replace(run, outcomes=read(HISTORY, outcomes, Outcomes()))


def _own(path: Path) -> Path:
    """Return a file of a run. A link could lead to any file of the reader."""
    if path.is_symlink():
        raise FederationError("it is a symbolic link. Replace it by the file")
    return path


def _cells(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


def _table(path: Path) -> list[Row]:
    """Return a table of numbers, without empty cells; numbers too large to draw are NaN."""
    return [
        {name: _drawn(float(cell)) for name, cell in cells.items() if cell and name not in TEXTS}
        for cells in _cells(path)
    ]


def _drawn(value: float) -> float:
    return value if abs(value) <= LARGEST else math.nan


def _names(path: Path) -> dict[int, str]:
    return {int(row["client"]): row["name"] for row in _cells(path) if row.get("name")}


def _outcomes(path: Path, num_clients: int) -> Outcomes:
    places = {name: at for at, name in enumerate([NOT_SAMPLED, ARRIVED, *CAUSES])}

    def measured(cell: str) -> float:
        value = float(cell or 0)
        return math.nan if not cell else value if math.isfinite(value) else math.inf

    with gzip.open(path, "rt", encoding="utf-8") as file:
        head, *lines = file.read().splitlines()
    if head.split(",") != [*COLUMNS]:
        raise FederationError(f"its columns are not {', '.join(COLUMNS)}")
    read: dict[int | str, Any] = {3: measured, 4: measured}
    read[2] = lambda cell: places.setdefault(cell, len(places))
    if not lines:
        return Outcomes()
    rows = np.loadtxt(lines, delimiter=",", converters=read, encoding="utf-8", ndmin=2)
    return Outcomes(list(map(describe_cause, places)), rows, num_clients)


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read_text(path))
    return content


def _test(path: Path) -> dict[str, Any]:
    """Return the result of a test; JSON has null for NaN."""
    test = _json(path)
    metrics = {n: math.nan if value is None else value for n, value in test["metrics"].items()}
    return test | {"metrics": metrics}


def _resumed(config: Mapping[str, Any], later: Sequence[Path]) -> Iterator[str]:
    """Yield a description of each resumed fit with other options than those of the first."""
    for path in later:
        if changed := differing_options(config, config_values(path), IGNORED_BY_RESUME):
            options = ", ".join(f"{option}={now}" for option, (_, now) in changed.items())
            yield f"resumed with {options:.300} ({path.name})"


def config_values(path: Path) -> dict[str, Any]:
    """Return the values of a config file by dotted name, from :func:`values_of`."""
    return values_of(yaml.safe_load(read_text(_own(path))))


def values_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config by dotted name, with classes as class names.

    Example:
        >>> rule = {"class_path": "lightning_fl.aggregators.Krum", "init_args": {"f": 1}}
        >>> values_of({"federation": {"min_clients": 3, "aggregator": rule}})
        {'federation.min_clients': 3, 'federation.aggregator': 'Krum', 'federation.aggregator.f': 1}
    """
    values: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            values[name] = value["class_path"].rpartition(".")[2]
            value = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, part in value.items():
                walk(f"{name}.{key}" if name else str(key), part)
        else:
            values[name] = value

    walk("", config)
    return values


def changes_of_test(folder: Path, text: str) -> dict[str, tuple[Any, Any]]:
    """Return the options of a test that differ from those of the fit in a folder.

    Args:
        folder: Folder of the fit; one that was run from Python has no config.
        text: Config of the test.
    """
    if not (path := folder / "config.yaml").is_file():
        return {}
    return differing_options(config_values(path), values_of(yaml.safe_load(text)), IGNORED_BY_TEST)


def differing_options(
    fitted: Mapping[str, Any], later: Mapping[str, Any], ignored: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Return the options of a test or a resumed fit that differ from the fit, with both values.

    Args:
        fitted: Values of the fit's config, from :func:`values_of`.
        later: Values of the later config, from :func:`values_of`.
        ignored: Options that are left out with those of their parts, in addition to ``PLACES``.

    Example:
        >>> fitted, later = {"data": "MNIST", "threads": 1}, {"data": "Digits", "vectorize": 5}
        >>> differing_options(fitted, later, ignored=IGNORED_BY_TEST)
        {'data': ('MNIST', 'Digits')}
    """
    left_out = tuple(f"{name}." for name in [*PLACES, *ignored])
    found = differences([fitted, later])
    return {n: (a, b) for n, (a, b) in found.items() if not f"{n}.".startswith(left_out)}


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the options that differ, with the value of each config; None if it has none.

    Example:
        >>> differences([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}])
        {'b': [2, 3], 'c': [None, 4]}
    """
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name) for config in configs] for name in names}
    return {name: each for name, each in values.items() if len(set(map(repr, each))) > 1}
