"""Tables 1 to 3 of Mostafa (2019) with the configs of this project, cell by cell.

A cell is a task, a split, a participation, a method and a seed. Each is one run of
``lightning-fl fit`` and one of ``lightning-fl test`` in a folder of its own; what is there already
is not run again, and what was cut short goes on from its checkpoint. So the script may be killed,
and started again with more cells.

    python benchmarks/mostafa2019.py --tasks mnist --jobs 2 --out runs/mostafa2019
    python benchmarks/mostafa2019.py --tasks kws --splits noniid --methods fa fa_rm --seeds 1
        --markdown docs/results/mostafa2019.md -- --model.init_args.net.init_args.width=16

What follows ``--`` goes to ``fit`` and ``test``. Results of other options belong into another
folder: it keeps the options, and refuses others.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any, NamedTuple

CONFIGS = Path(__file__).parents[1] / "configs" / "mostafa2019"
TASKS, SPLITS = ("mnist", "cifar10", "kws"), ("iid", "noniid")
METHODS = {"fa": "FA", "fa_wd": "FA+WD", "fa_rm_ah": "FA+RM+AH", "fa_rm": "FA+RM", "fa_ah": "FA+AH"}
#: The paper's accuracies in percent: by task, participation and split, in the order of METHODS.
PAPER = {
    ("mnist", 1.0, "iid"): (97.9, 97.9, 97.9, 97.8, 98.0),
    ("mnist", 1.0, "noniid"): (94.7, 94.8, 94.7, 94.5, 95.5),
    ("mnist", 0.5, "iid"): (97.4, 97.3, 98.1, 97.4, 98.2),
    ("mnist", 0.5, "noniid"): (92.1, 92.0, 92.5, 91.6, 93.2),
    ("cifar10", 1.0, "iid"): (81.9, 81.4, 84.3, 83.5, 83.4),
    ("cifar10", 1.0, "noniid"): (44.2, 44.3, 52.4, 52.9, 44.8),
    ("cifar10", 0.5, "iid"): (76.8, 76.6, 79.2, 76.0, 82.0),
    ("cifar10", 0.5, "noniid"): (33.4, 34.4, 39.8, 43.3, 19.8),
    ("kws", 1.0, "iid"): (93.0, 93.5, 94.4, 92.9, 94.0),
    ("kws", 1.0, "noniid"): (28.4, 29.9, 81.1, 79.2, 9.8),
    ("kws", 0.5, "iid"): (91.4, 93.0, 94.3, 91.0, 93.2),
    ("kws", 0.5, "noniid"): (11.45, 11.8, 74.9, 60.7, 10.0),
}


class Cell(NamedTuple):
    """One run."""

    task: str
    split: str
    participation: float
    method: str
    seed: int

    def folder(self, out: Path) -> Path:
        """Return where it leaves what it finds."""
        return out / f"{self.task}-{self.split}-{self.participation:g}-{self.method}-{self.seed}"

    def arguments(self, out: Path) -> list[str]:
        """Return the options of its commands."""
        files = (self.task, self.split, self.method)
        return [
            *(option for name in files for option in ("--config", str(CONFIGS / f"{name}.yaml"))),
            f"--seed_everything={self.seed}",
            f"--federation.participation={self.participation}",
            f"--trainer.default_root_dir={self.folder(out)}",
            "--ckpt_path=last",
        ]


def run(cell: Cell, out: Path, extra: Sequence[str], environment: dict[str, str]) -> None:
    """Train and test a cell, unless its result is there."""
    result = cell.folder(out) / "result.json"
    if result.exists():
        return
    start = perf_counter()
    for command in ("fit", "test"):
        line = [sys.executable, "-m", "lightning_fl", command, *cell.arguments(out), *extra]
        done = subprocess.run(
            line, capture_output=True, text=True, env=os.environ | environment, check=False
        )
        if done.returncode:
            print(f"{cell.folder(out).name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return
    accuracy = re.search(r"test_acc\D+(\d\.\d+(?:e-\d+)?)", done.stdout)
    assert accuracy is not None, done.stdout
    table = max(
        cell.folder(out).glob("version_*/rounds.csv"), key=lambda path: path.stat().st_mtime
    )
    rows = list(csv.DictReader(table.read_text().splitlines()))
    found = {"test_acc": float(accuracy[1]), "rounds": len(rows), "seconds": perf_counter() - start}
    result.write_text(json.dumps(found) + "\n")
    print(f"{cell.folder(out).name}: {100 * found['test_acc']:.2f} %", file=sys.stderr)


def results(cells: Sequence[Cell], out: Path) -> dict[Cell, dict[str, Any]]:
    """Return what is there."""
    files = {cell: cell.folder(out) / "result.json" for cell in cells}
    return {cell: json.loads(f.read_text()) for cell, f in files.items() if f.exists()}


def markdown(found: dict[Cell, dict[str, Any]]) -> str:
    """Show means and standard deviations over seeds beside the paper's, a table a task."""
    text = []
    for task in TASKS:
        groups = {(c.participation, c.split) for c in found if c.task == task}
        if not groups:
            continue
        head = ["test accuracy, % (paper)", *METHODS.values()]
        lines = [head, ["---"] + ["---:"] * len(METHODS)]
        for participation, split in sorted(groups, key=lambda g: (-g[0], g[1])):
            line = [f"C={participation:g} {split}"]
            paper = PAPER.get((task, participation, split), (None,) * len(METHODS))
            for method, printed in zip(METHODS, paper, strict=True):
                each = [
                    100 * result["test_acc"]
                    for c, result in found.items()
                    if c[:4] == (task, split, participation, method)
                ]
                spread = f" ± {stdev(each):.1f}" if len(each) > 1 else ""
                ours = f"{mean(each):.1f}{spread}" if each else "-"
                line.append(ours + ("" if printed is None else f" ({printed:g})"))
            lines.append(line)
        seeds = len({c.seed for c in found if c.task == task})
        rounds = sorted({r["rounds"] for c, r in found.items() if c.task == task})
        text.append(
            f"### {task}\n\n{seeds} seed(s), {' or '.join(map(str, rounds))} rounds.\n\n"
            + "\n".join("| " + " | ".join(line) + " |" for line in lines)
        )
    return "\n\n".join(text) + "\n"


def main(arguments: Sequence[str] | None = None) -> dict[Cell, dict[str, Any]]:
    """Run what is missing, print the tables of what is there."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    extra = given[given.index("--") + 1 :] if "--" in given else []
    given = given[: given.index("--")] if "--" in given else given
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--participation", nargs="+", type=float, default=[1.0, 0.5], metavar="C")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--gpus", type=int, default=0, help="deal the cells to so many GPUs")
    parser.add_argument("--out", type=Path, default=Path("runs", "mostafa2019"))
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    args = parser.parse_args(given)
    cells = [
        Cell(*what)
        for what in product(args.tasks, args.splits, args.participation, args.methods, args.seeds)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    options = args.out / "options.json"
    if options.exists() and json.loads(options.read_text()) != extra:
        parser.error(
            f"{args.out} holds results with the options {json.loads(options.read_text())}, not"
            f" {extra}: choose another --out"
        )
    options.write_text(json.dumps(extra))
    with ThreadPoolExecutor(args.jobs) as pool:
        for i, cell in enumerate(cells):
            device = {"CUDA_VISIBLE_DEVICES": str(i % args.gpus)} if args.gpus else {}
            pool.submit(run, cell, args.out, extra, device)
    found = results(cells, args.out)
    print(markdown(found))
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(markdown(found))
    return found


if __name__ == "__main__":
    main()
