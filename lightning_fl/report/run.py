"""Read the folder of a run. Files may be untrusted: they are data only, of limited size."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_fl.federation.dropped import describe_cause
from lightning_fl.report.words import listed
from lightning_fl.types import FederationError

#: File name of the table of rounds, by which a folder is known to be that of a run.
TABLE = "rounds.csv"
#: Maximum size of a file in MiB; runs do not write larger files.
LIMITS = {".csv": 64, ".json": 64, ".yaml": 0.25, ".png": 0.5, ".gz": 64}
#: Maximum size of a decompressed file in MiB, enough for 100,000 clients and 2,500 rounds.
MOST_EXPANDED = 256
#: Figures in the folder of a run that a report shows.
PICTURES = ("aggregator.png", "policy.png")
#: Files that a fit writes at its end, also after an interruption.
WRITTEN_AT_END = ("participation.csv", "participation_by_round.csv.gz")
#: Columns of tables that are not numbers.
TEXTS = ("name", "dropped_clients")
#: Numbers with a larger magnitude are drawn as gaps, like non-finite values.
LARGEST = 1e30
#: Maximum number of configs of resumed fits that are read.
MOST_RESUMED = 20
#: Format and version of test.json.
TEST_FORMAT = "lightning_fl test 1"
#: Options that do not affect results: paths, display options, options of reading and writing.
PLACES = {
    "ckpt_path",
    "threads",
    "verbose",
    "weights_only",
    "data.root",
    "data.download",
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.log_every_n_steps",
    "checkpoint.dirpath",
    "checkpoint.filename",
    "checkpoint.every_n_rounds",
}
#: Options of a fit that do not affect the metrics of a test, and those that a resumed fit may
#: change without notice.
IGNORED_BY_TEST = (
    "vectorize",
    "trainer.accelerator",
    "trainer.callbacks",
    "trainer.devices",
    "trainer.logger",
    "trainer.max_epochs",
    "trainer.strategy",
)
IGNORED_BY_RESUME = ("trainer.logger", "trainer.max_epochs")
#: Maximum number of values of a config.
MOST_VALUES = 2000
#: What damaged files raise.
UNREADABLE = (OSError, EOFError, ValueError, RecursionError, yaml.YAMLError, zlib.error)

Row = dict[str, float]


@dataclass(frozen=True)
class Outcomes:
    """Outcome of every client in every round, from the first one.

    Args:
        names: Names of the outcomes. The first is that of clients that were not sampled, the second
            that of arrived updates, the others are causes of drops.
        codes: Place of the outcome in the names, ``[rounds, clients]``.
    """

    names: list[str]
    codes: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Run:
    """Contents of the folder of a run.

    Args:
        name: Names of the folder and its parent folder.
        rows: Table of rounds, as numbers; empty cells of the file are missing.
        config: Values of the config by dotted name.
        config_text: Text of the config file.
        environment: Contents of ``environment.json``.
        partition: Partition of the data: rule, parameters, seed, sizes, and numbers of samples by
            class.
        faults: Round, client and fault of each simulated fault; None without simulation.
        clients: Results of ``PersonalizedEvaluation``, one row per client.
        participation: Participation table, one row per client.
        outcomes: Outcome of every client in every round; None if it is unknown.
        names: Names of the clients, if the data gives them.
        test: Contents of ``test.json``: metrics, checkpoint and its round, and options that differ
            from those of the fit.
        resumed: Descriptions of resumed fits with options that differ from those of the first fit.
        pictures: Contents of the figures in the folder.
        notes: Warnings about files that could not be read.
        metric: Column of the main metric; None chooses it.
        mode: Whether ``max`` or ``min`` is the best value of this metric.
    """

    name: str
    rows: list[Row]
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    partition: dict[str, Any] = field(default_factory=dict)
    faults: list[tuple[int, int, str]] | None = None
    clients: list[Row] = field(default_factory=list)
    participation: list[Row] = field(default_factory=list)
    outcomes: Outcomes | None = None
    names: dict[int, str] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    metric: str | None = None
    mode: str = "max"

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return int(self.rows[-1]["round"])

    @property
    def planned(self) -> int | None:
        """Maximum number of rounds; None if it is unknown."""
        found = self.environment.get("rounds", self.config.get("trainer.max_epochs"))
        return found if type(found) is int and found > 0 else None

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished, after all rounds or by early stopping."""
        state = self.environment.get("state", "finished" if self.planned is None else None)
        return state == "finished" or (self.planned is not None and self.rounds >= self.planned)

    @property
    def seed(self) -> int | None:
        """Seed of the run; None if it is unknown."""
        found = self.environment.get("seed", self.config.get("seed_everything"))
        return found if type(found) is int else None

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
        if not path.is_dir():
            what = "is a file" if path.is_file() else "does not exist"
            raise FederationError(
                f"folder {path} {what}: pass the folder of a run, such as"
                " runs/digits/version_0, or of several runs, such as runs/digits"
            )
        inside = [path] if (path / TABLE).is_file() else version_folders(path)
        runs = [folder for folder in inside if (folder / TABLE).is_file()]
        if not runs:
            deeper = sorted({str(each.parents[1]) for each in path.glob(f"*/version_*/{TABLE}")})
            remedy = f": pass {listed(deeper, 5)}" if deeper else ""
            raise FederationError(
                f"neither {path} nor a folder version_0, version_1, ... in it has a rounds.csv: it"
                f" is not the folder of a run, or the first round is not completed{remedy}"
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
    """Read the folder of a run. Unreadable files are skipped and listed in the notes.

    Raises:
        FederationError: If the table of rounds cannot be read, or has no rounds.
    """
    folder = Path(folder)
    notes: list[str] = []
    rows = {int(row["round"]): row for row in _table(folder / TABLE, "round", notes)}
    if not rows:
        why = f" ({notes[0]})" if notes else ""
        raise FederationError(f"{folder / TABLE} has no readable rounds{why}")

    # Files that an earlier fit has left in the folder.
    foreign: set[str] = set()

    def read(name: str, reader: Callable[[Path], Any], default: Any) -> Any:
        try:
            is_own = name not in foreign and (folder / name).is_file()
            return reader(folder / name) if is_own else default
        except UNREADABLE as error:
            reason = " ".join(str(error).split())
            notes.append(f"{name} is skipped: {reason[:300]}")
            return default

    environment = read("environment.json", _mapping, {})
    foreign |= {"faults.csv"} if environment.get("faults") is False else set()
    foreign |= {"clients.csv"} if environment.get("client_metric", "") is None else set()
    foreign |= set(WRITTEN_AT_END) if environment.get("state") == "started" else set()
    text, config = read("config.yaml", _text, ""), read("config.yaml", config_values, {})
    resumed = []
    for path in sorted(folder.glob("config_resumed_*.yaml"))[:MOST_RESUMED]:
        later = read(path.name, config_values, config)
        if config and (changed := differing_options(config, later, IGNORED_BY_RESUME)):
            options = ", ".join(f"{name}={now}" for name, (_, now) in changed.items())
            resumed.append(f"resumed with {options:.300} ({path.name})")
    faults = read("faults.csv", lambda path: _faults(path, notes), None)
    return Run(
        name=_name(folder),
        rows=[rows[number] for number in sorted(rows)],
        config=config,
        config_text=text,
        environment=environment,
        partition=read("partition.json", _partition, {}),
        faults=faults,
        clients=read("clients.csv", lambda path: _table(path, "client", notes), []),
        test=read("test.json", _test, {}),
        resumed=resumed,
        participation=read("participation.csv", lambda path: _table(path, "client", notes), []),
        outcomes=read("participation_by_round.csv.gz", _outcomes, None),
        names=read("participation.csv", _names, {}),
        pictures={name: content for name in PICTURES if (content := read(name, _picture, b""))},
        notes=list(dict.fromkeys(notes)),
    )


def _bytes(path: Path) -> bytes:
    most = int(LIMITS[path.suffix] * 2**20)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise FederationError(f"{path} is larger than {LIMITS[path.suffix]:g} MiB")
    return content


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace")


def _picture(path: Path) -> bytes:
    content = _bytes(path)
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise FederationError("it is not a PNG file")
    return content


def _lines(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the cells by column name of each row of a CSV file."""
    try:
        reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) != len(names):
            raise FederationError(f"line 1 of {path} has duplicate column names")
        for cells in reader:
            if cells:
                yield reader.line_num, dict(zip(names, cells, strict=False))
    except (OSError, csv.Error) as error:
        raise FederationError(f"{path} could not be read: {error}") from error


def _table(path: Path, key: str, notes: list[str]) -> list[Row]:
    """Read a table of numbers; rows without a key and cells that are not numbers are skipped.

    Of several rows with the same key, the last one counts.
    """
    found: dict[float, Row] = {}
    broken: list[str] = []
    for number, cells in _lines(path):
        if key not in cells and not found:
            raise FederationError(f"{path} has no column {key!r}, so no run has written it")
        row = {name: value for name, cell in cells.items() if (value := _number(cell)) is not None}
        at = row.get(key, math.nan)
        if not _is_index(at):
            broken.append(f"line {number} ({key} is {cells.get(key, '')[:40]!r})")
            continue
        # Names and the list of dropped clients may look like numbers.
        for name in TEXTS:
            row.pop(name, None)
        texts = [n for n, c in cells.items() if c and n not in row and n not in TEXTS]
        if texts:
            broken.append(f"{texts[0][:40]} in line {number}")
        if at in found:
            broken.append(f"the row of {key} {at:.0f} before line {number}")
        found[at] = row
    if broken:
        notes.append(f"skipped invalid values of {path.name}: {listed(broken, 3)}")
    return list(found.values())


def _names(path: Path) -> dict[int, str]:
    """Return the names of the clients; empty without this column."""
    rows = [(_number(cells.get("client", "")), cells.get("name")) for _, cells in _lines(path)]
    return {int(at): name for at, name in rows if at is not None and _is_index(at) and name}


def _outcomes(path: Path) -> Outcomes:
    """Read the outcomes of clients by round."""
    with gzip.open(io.BytesIO(_bytes(path))) as file:
        content = file.read(MOST_EXPANDED * 2**20 + 1)
    if len(content) > MOST_EXPANDED * 2**20:
        raise FederationError(f"it has more than {MOST_EXPANDED} MiB")
    head, *lines = content.splitlines()
    legend = [entry.partition("=") for entry in head.decode().removeprefix("round,").split()]
    if not 2 <= len(legend) <= 255 or any(len(code) != 1 or not name for code, _, name in legend):
        raise FederationError("its first line does not explain the outcomes")
    rounds, texts = zip(*(line.split(b",") for line in lines), strict=True)
    if [*map(int, rounds)] != [*range(1, len(rounds) + 1)] or len({*map(len, texts)}) != 1:
        raise FederationError("it does not have one line of the same length per round")
    places = np.full(256, 255, np.uint8)
    for at, (code, _, _) in enumerate(legend):
        places[ord(code) % 256] = at
    codes = places[np.frombuffer(b"".join(texts), np.uint8)].reshape(len(texts), -1)
    if (codes == 255).any():
        raise FederationError("it has outcomes that its first line does not explain")
    return Outcomes([describe_cause(name[:40]) for _, _, name in legend], codes)


def _is_index(value: float) -> bool:
    """Return whether a number can be that of a round or client."""
    return 0 <= value < 1e9 and value == int(value)


def _number(cell: str) -> float | None:
    """Return a number, NaN if it is non-finite or too large to draw, None for other texts."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST else math.nan


def _faults(path: Path, notes: list[str]) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    broken: list[int] = []
    for number, cells in _lines(path):
        at = [cells.get(name, "").strip() for name in ("round", "client")]
        if all(a.isdecimal() and len(a) < 10 for a in at) and cells.get("fault"):
            found.append((int(at[0]), int(at[1]), cells["fault"].strip()[:40]))
        else:
            broken.append(number)
    if broken:
        notes.append(f"skipped {len(broken)} lines of faults.csv, the first is line {broken[0]}")
    return found


def _mapping(path: Path) -> dict[str, Any]:
    found = json.loads(_text(path))
    if not isinstance(found, dict):
        raise FederationError("it is not a mapping")
    return found


def _test(path: Path) -> dict[str, Any]:
    """Return the metrics of a test, its checkpoint and round, and options that differ."""
    found = _mapping(path)
    metrics, differing = found.get("metrics"), found.get("differing options", {})
    if not isinstance(metrics, dict) or not isinstance(differing, dict):
        raise FederationError("it is not the result of a test")
    return {
        "metrics": {
            str(name)[:80]: math.nan if value is None or abs(value) > LARGEST else value
            for name, value in list(metrics.items())[:MOST_VALUES]
            if value is None or type(value) in (int, float)
        },
        "checkpoint": str(found.get("checkpoint") or "")[:80],
        "round": at if type(at := found.get("round")) is int else None,
        "differing": [
            f"{str(name)[:80]} is {str(both[1])[:80]}, was {str(both[0])[:80]}"
            for name, both in list(differing.items())[:MOST_VALUES]
            if isinstance(both, list) and len(both) == 2
        ],
    }


def _partition(path: Path) -> dict[str, Any]:
    """Return the summary of a manifest, without the indices of samples."""
    found = _mapping(path)
    clients, classes = found.get("clients"), found.get("class_counts")
    parts = [*clients, *classes] if isinstance(clients, list) and isinstance(classes, list) else [0]
    if not all(isinstance(part, list | dict) for part in parts) or not parts:
        raise FederationError("it is not a partition manifest")
    return {
        **{name: found.get(name) for name in ("rule", "parameters", "seed", "checksum")},
        "sizes": [len(client) for client in found["clients"]],
        "classes": [len(counts) for counts in found["class_counts"] if counts],
        "counts": found["class_counts"] if _are_counts(found["class_counts"]) else [],
    }


def _are_counts(found: list[Any]) -> bool:
    """Return whether a list has the number of samples by class of each client."""
    return all(
        isinstance(counts, dict)
        and all(type(count) is int and 0 <= count < 1e9 for count in counts.values())
        for counts in found
    )


def config_values(path: Path) -> dict[str, Any]:
    """Return the values of a config file by dotted name, from :func:`values_of`.

    Raises:
        OSError, ValueError, RecursionError, yaml.YAMLError: If the file cannot be read.
    """
    found = yaml.safe_load(_text(path))
    if not isinstance(found, dict):
        raise FederationError("it is not a mapping")
    return values_of(found)


def values_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config by dotted name, with classes as class names.

    Example:
        >>> rule = {"class_path": "lightning_fl.aggregators.Krum", "init_args": {"f": 1}}
        >>> values_of({"federation": {"min_clients": 3, "aggregator": rule}})
        {'federation.min_clients': 3, 'federation.aggregator': 'Krum', 'federation.aggregator.f': 1}

    Raises:
        FederationError: If the config has too many values or too many levels.
    """
    found: dict[str, Any] = {}

    def walk(name: str, value: Any, depth: int) -> None:
        # With aliases, a few lines of YAML can expand to billions of values or be recursive.
        if depth > 20 or len(found) > MOST_VALUES:
            raise FederationError(f"it has more than {MOST_VALUES} values or more than 20 levels")
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            found[name] = value["class_path"].rpartition(".")[2]
            value = {**_mapped(value, "init_args"), **_mapped(value, "dict_kwargs")}
        elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, part in value.items():
                walk(f"{name}.{key}" if name else str(key), part, depth + 1)
        else:
            found[name] = value

    walk("", config, 0)
    return found


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
    return {
        name: (fitted.get(name), later.get(name))
        for name in dict.fromkeys([*fitted, *later])
        if fitted.get(name) != later.get(name)
        and name not in PLACES
        and not f"{name}.".startswith(tuple(f"{each}." for each in ignored))
    }


def _mapped(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}
