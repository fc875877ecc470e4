"""Runs of ``lightning-fl``, each in a folder of its own: what is there already is not run again."""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any, NamedTuple

import lightning
import torch

#: Runs are forked from a server that has imported everything: a fit and its test would spend
#: 13 seconds on imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["lightning_fl.cli.run", "lightning_fl.cli.federated", "torchvision", "torch.utils.tensorboard"]
)
#: Files of a run, and of a folder of runs.
RESULT, OPTIONS = "result.json", "options.json"
#: Option that names the folder of the data.
ROOT = "--data.init_args.root="


def call(
    line: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``lightning-fl`` in a process of its own; return its exit code and what it printed."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = CONTEXT.Process(target=_main, args=(line, dict(environment or {}), output.name))
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(line, process.exitcode, output.read())


def _main(line: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    from lightning_fl.cli import main  # here, as only these processes need it

    os.environ.update(environment)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["lightning-fl", *line]
    main()


def command(
    name: str, folder: Path, options: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run ``fit`` or ``test``; None if it failed, with its last words on the screen."""
    place = f"--trainer.default_root_dir={folder}"
    done = call([name, *options, place, "--ckpt_path=last"], environment)
    if done.returncode:
        print(f"{folder.name} failed:\n{done.stdout[-2000:]}", file=sys.stderr)
        return None
    return done


def fit_and_test(
    folder: Path, options: Sequence[str], environment: Mapping[str, str] | None = None
) -> bool:
    """Train and test, unless the result is there; what was cut short goes on.

    Returns:
        Whether the result is there.
    """
    result = folder / RESULT
    if result.exists():
        return True
    start = perf_counter()
    for name in ("fit", "test"):
        if (done := command(name, folder, options, environment)) is None:
            return False
    figures = re.findall(r"(test_\w+(?:/\w+)?)\D+(\d\.\d+(?:e-\d+)?)", done.stdout)
    tested = {name: float(value) for name, value in figures}
    if "test_acc" not in tested:
        print(f"{folder.name} has no test_acc:\n{done.stdout[-2000:]}", file=sys.stderr)
        return False
    found = {**tested, "rounds": len(rows(folder)), "seconds": perf_counter() - start} | origin()
    result.write_text(json.dumps(found) + "\n")
    print(f"{folder.name}: {100 * found['test_acc']:.2f} %", file=sys.stderr)
    return True


class Run(NamedTuple):
    """What is run: the folder where it leaves its results, its options, and its environment."""

    place: Path
    options: Sequence[str]
    environment: Mapping[str, str] = {}


def fit_and_test_all(runs: Iterable[Run], jobs: int) -> list[str]:
    """Do :func:`fit_and_test` for each run, several at the same time.

    Returns:
        The names of those that failed.
    """
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {run.place.name: pool.submit(fit_and_test, *run) for run in runs}
    return [name for name, each in waiting.items() if not each.result()]


def result(folder: Path) -> dict[str, Any] | None:
    """Return what a run has found; None if it has not ended."""
    path = folder / RESULT
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def newest(folder: Path, name: str) -> Path:
    """Return a file of the newest run in a folder."""
    return max(folder.glob(f"version_*/{name}"), key=lambda path: path.stat().st_mtime)


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the table of rounds."""
    return list(csv.DictReader(newest(folder, "rounds.csv").read_text().splitlines()))


def last(folder: Path, column: str) -> float:
    """Return the last value of a column of the table of rounds; NaN if it has none."""
    values = [float(row[column]) for row in rows(folder) if row.get(column)]
    return values[-1] if values else math.nan


def shared_options(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts, for one with a docstring and a folder."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs", out))
    parser.add_argument("--markdown", type=Path, help="write tables here, pictures beside them")
    return parser


def apart(arguments: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return a script's own arguments, and those after ``--``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def check_options(out: Path, extra: Sequence[str]) -> str | None:
    """Note the options of a folder of results; say what is wrong if it holds others.

    The folder of the data may differ.
    """
    out.mkdir(parents=True, exist_ok=True)
    options = out / OPTIONS
    if options.exists():
        before = json.loads(options.read_text())
        if without_root(before) != without_root(extra):
            return (
                f"{out} holds results with the options {before}, not {list(extra)}: choose another"
                " --out"
            )
    options.write_text(json.dumps(list(extra)))
    return None


def without_root(options: Sequence[str]) -> list[str]:
    """Return options without the folder of the data."""
    return [option for option in options if not option.startswith(ROOT)]


def publish(text: str, path: Path | None, failed: Sequence[str] = ()) -> None:
    """Print a page, and write it where a path is given; exit with an error if runs failed."""
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if failed:
        sys.exit(f"{len(failed)} runs failed, the tables lack them: {', '.join(failed)}")


def machine() -> dict[str, Any]:
    """Describe the machine and the versions."""
    return {
        "cpus": os.cpu_count(),
        "cpu": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str | None:
    """Return the name of the processor, or None."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def origin() -> dict[str, str]:
    """Return machine, commit and date, for a result."""
    text = ", ".join(f"{k} {v}" for k, v in machine().items() if v is not None)
    return {"machine": text, "commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def commit() -> str:
    """Return the commit of this program."""
    folder = str(Path(__file__).parent)
    git = ["git", "-C", folder, "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine_line(out: Path | None = None) -> str:
    """Return machines, commits and dates of the results in a folder, for the top of a page.

    Without a folder, or if its results do not tell, those of now.
    """
    found = [json.loads(path.read_text()) for path in out.rglob(RESULT)] if out else []
    origins = [each for each in found if "machine" in each] or [origin()]
    lists = {
        name: sorted({each[name] for each in origins}) for name in ("machine", "commit", "date")
    }
    return "\n\n".join(
        f"{name.capitalize()}: {'; '.join(values)}." for name, values in lists.items()
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right of the first column."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean_and_spread(values: Sequence[float], scale: float = 100, digits: int = 1) -> str:
    """Return a mean and, of several values, their standard deviation; a dash if all are NaN."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    spread = f" ± {scale * stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{scale * mean(known):.{digits}f}{spread}"


# --- options ------------------------------------------------------------------------------------

#: Options by name of a method or a split.
Arms = Mapping[str, tuple[str, ...]]


def given(option: str, name: str, /, **init: Any) -> str:
    """Return an option that names a class with its own options."""
    return f"--{option}={json.dumps({'class_path': name, 'init_args': init})}"


def rule(name: str, /, **init: Any) -> tuple[str, ...]:
    """Return the option of an aggregation rule."""
    return (given("federation.aggregator", name, **init),)


def term(name: str, /, **init: Any) -> tuple[str, ...]:
    """Return the option of a term of the loss."""
    terms = [{"class_path": name, "init_args": init}]
    return (f"--model.init_args.terms={json.dumps(terms)}",)


def split(name: str, /, **init: Any) -> tuple[str, ...]:
    """Return the option of a partition."""
    return (given("data.init_args.partition", name, **init),)


def callback(name: str, /, **init: Any) -> tuple[str, ...]:
    """Return the option that has one callback and no other."""
    return (f"--trainer.callbacks={json.dumps([{'class_path': name, 'init_args': init}])}",)
