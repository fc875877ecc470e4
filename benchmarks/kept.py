"""Results of long runs, kept in a file, so that experiments can continue on another machine.

    python benchmarks/kept.py save runs/mostafa2019
    python benchmarks/kept.py restore runs/mostafa2019

``save`` adds what the finished runs of a folder have found to ``benchmarks/results/NAME.jsonl``,
a line per run. ``restore`` writes it to a folder. There the scripts find it, and run only the rest.
A table of rounds is kept with every n-th row and the last one, at most 250 rows.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from lightning_fl.files import write_atomically
from runs import OPTIONS, RESULT, check_options, rows, without_root

RESULTS = Path(__file__).with_name("results")
MOST_ROWS = 250


def save(folder: Path, path: Path) -> int:
    """Add the finished runs of a folder to a file; return how many runs the file has."""
    if not (folder / OPTIONS).exists():
        raise SystemExit(f"{folder} has no runs: name the --out of a script that has begun one")
    options = without_root(json.loads((folder / OPTIONS).read_text()))
    before, found = read(path)
    if found and before != options:
        raise SystemExit(f"{path} has results with the options {before}, {folder} with {options}")
    for result in folder.rglob(RESULT):
        name = result.parent.relative_to(folder).as_posix()
        table = rows(result.parent)
        step = max(ceil((len(table) - 1) / (MOST_ROWS - 1)), 1)
        kept = [*table[:-1:step], table[-1]]
        columns = {column: [row[column] for row in kept] for column in table[0]}
        found[name] = {"result": json.loads(result.read_text()), "rounds": columns}
    lines = [{"options": options}, *({"run": name} | found[name] for name in sorted(found))]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
    return len(found)


def read(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the options of a file's runs, and the runs by name."""
    if not path.exists():
        return [], {}
    first, *others = map(json.loads, path.read_text().splitlines())
    return first["options"], {each.pop("run"): each for each in others}


def restore(path: Path, folder: Path) -> int:
    """Write what a file has to a folder, but for runs that are there; return how many it has."""
    options, found = read(path)
    if not found:
        raise SystemExit(f"{path} has no results")
    if wrong := check_options(folder, options):
        raise SystemExit(wrong)
    for name, each in found.items():
        place = folder / name
        if (place / RESULT).exists():
            continue
        table = place / "version_0" / "rounds.csv"
        table.parent.mkdir(parents=True, exist_ok=True)
        with table.open("w", newline="") as file:
            columns = each["rounds"].values()
            csv.writer(file).writerows([each["rounds"], *zip(*columns, strict=True)])
        (place / RESULT).write_text(json.dumps(each["result"]) + "\n")
    return len(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Save or restore the results of a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["save", "restore"])
    parser.add_argument("folder", type=Path, help="the --out of a script, such as runs/mostafa2019")
    parser.add_argument("--file", type=Path, help="default: benchmarks/results/NAME.jsonl")
    args = parser.parse_args(arguments)
    path = args.file or RESULTS / f"{args.folder.name}.jsonl"
    count = save(args.folder, path) if args.what == "save" else restore(path, args.folder)
    print(f"{path}: {count} runs")


if __name__ == "__main__":
    main()
