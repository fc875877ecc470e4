"""Tables 1 to 4 and figure 3 of Mostafa (2019) with the configs of this project, cell by cell.

A cell is a task, a split, a participation, a method and a seed. Each is one run of
``lightning-fl fit`` and one of ``lightning-fl test`` in a folder of its own; what is there already
is not run again, and what was cut short goes on from its checkpoint. So the script may be killed,
and started again with more cells.

    python benchmarks/mostafa2019.py --tasks mnist --jobs 2 --markdown mnist.md --figure fig3.png
    python benchmarks/mostafa2019.py --tasks kws --splits noniid --methods fa fa_rm --seeds 1
        --out runs/kws16 -- --model.init_args.net.init_args.width=16

What follows ``--`` goes to ``fit`` and ``test``. Results of other options belong into another
folder: it keeps the options, and refuses others. ``--with`` gives an option to the cells of
one method only:

    python benchmarks/mostafa2019.py --tasks mnist --methods fa fa_ah --out runs/window10
        --with "fa_ah --federation.policy.init_args.window=10"

``--figure`` draws how the means of learning rate and local steps move (figure 3). ``--overhead 5``
measures what matching, learning hyperparameters and weight divergence cost (table 4): five runs
of each method, in turns, of as many local steps as each other; nothing else should run then.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product, zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from runs import (
    Run,
    apart,
    check_options,
    command,
    fit_and_test_all,
    machine_line,
    mean_and_spread,
    newest,
    publish,
    result,
    rows,
    shared_options,
    table,
)

CONFIGS = Path(__file__).parents[1] / "configs" / "mostafa2019"
TASKS, SPLITS = ("mnist", "cifar10", "kws"), ("iid", "noniid")
#: Coefficient of matching in the tables, where squares are averaged over the features of a layer.
MATCHING = {"mnist": 0.1, "cifar10": 1.0, "kws": 1.0}
#: The paper's methods, in the order of its tables.
PUBLISHED = {
    "fa": "FA",
    "fa_wd": "FA+WD",
    "fa_rm_ah": "FA+RM+AH",
    "fa_rm": "FA+RM",
    "fa_ah": "FA+AH",
}
#: And a variant that the paper mentions: layers are reconstructed from the same layers.
METHODS = PUBLISHED | {"fa_rm_same": "FA+RM, same layers"}
#: The paper's accuracies in percent: by task, participation and split, in the order of PUBLISHED.
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

    def options(self) -> list[str]:
        """Return the options of its commands."""
        files = (self.task, self.split, self.method)
        return [
            *(option for name in files for option in ("--config", str(CONFIGS / f"{name}.yaml"))),
            f"--seed_everything={self.seed}",
            f"--federation.client_fraction={self.participation}",
            *self._matching(),
        ]

    def _matching(self) -> list[str]:
        if "rm" not in self.method:
            return []
        term = "--model.init_args.terms."
        return [f"{term}reduction=mean", f"{term}coefficient={MATCHING[self.task]}"]


def settings(cell: Cell, out: Path) -> dict[str, str]:
    """Return what a cell's run was given: its network, terms, policy and data, in words."""
    config = yaml.safe_load(newest(cell.folder(out), "config.yaml").read_text())
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    return {
        "network": _in_words(model["net"]),
        "terms": ", ".join(map(_in_words, model["terms"])),
        "policy": _in_words(config["federation"]["policy"]),
        "batches of": str(data["batch_size"]),
    }


def _in_words(rule: dict[str, Any]) -> str:
    given = {k: v for k, v in rule.get("init_args", {}).items() if v is not None and v is not False}
    options = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{rule['class_path'].rpartition('.')[2]}({options})"


def results(cells: Sequence[Cell], out: Path) -> dict[Cell, dict[str, Any]]:
    """Return what is there."""
    each = {cell: result(cell.folder(out)) for cell in cells}
    return {cell: found for cell, found in each.items() if found is not None}


def markdown(found: dict[Cell, dict[str, Any]], out: Path) -> str:
    """Show means and standard deviations over seeds beside the paper's, a table a task."""
    text = [machine_line(out)]
    for task in TASKS:
        groups = {(c.participation, c.split) for c in found if c.task == task}
        if not groups:
            continue
        shown = [
            m
            for m in METHODS
            if m in PUBLISHED or any((c.task, c.method) == (task, m) for c in found)
        ]
        head = ["test accuracy, % (paper)", *(METHODS[method] for method in shown)]
        lines = []
        for participation, split in sorted(groups, key=lambda g: (-g[0], g[1])):
            line = [f"C={participation:g}, {'IID' if split == 'iid' else 'non-IID'}"]
            paper = PAPER.get((task, participation, split), ())
            for method, printed in zip_longest(shown, paper):
                each = [
                    result["test_acc"]
                    for c, result in found.items()
                    if c[:4] == (task, split, participation, method)
                ]
                ours = mean_and_spread(each)
                line.append(ours + ("" if printed is None else f" ({printed:g})"))
            lines.append(line)
        seeds = len({c.seed for c in found if c.task == task})
        rounds = sorted({r["rounds"] for c, r in found.items() if c.task == task})
        took = median(r["seconds"] for c, r in found.items() if c.task == task)
        # Results that kept.py has restored lack the configs.
        known = [
            c for c in found if c.task == task and [*c.folder(out).glob("version_*/config.yaml")]
        ]
        one_each = {c.method: c for c in known}
        given = [
            f"- {METHODS[m]}: " + "; ".join(f"{k} {v}" for k, v in settings(c, out).items())
            for m, c in one_each.items()
        ]
        text += [
            f"### {task}",
            f"{seeds} seed{'s' * (seeds > 1)}, {' or '.join(map(str, rounds))} rounds; a run took"
            f" {took:.0f} s (median).",
            table(head, lines),
            "\n".join(given),
        ]
    return "\n\n".join(text) + "\n"


def figure(found: dict[Cell, dict[str, Any]], out: Path, path: Path) -> None:
    """Draw figure 3: means of rates and steps over rounds, with the loss, a column a task.

    As in the paper of FA+RM+AH where everyone takes part; a line is the mean over seeds.
    """
    cells = [c for c in found if c.method == "fa_rm_ah" and c.participation == 1]
    tasks = [task for task in TASKS if any(c.task == task for c in cells)]
    if not tasks:
        raise SystemExit("figure 3 needs results of fa_rm_ah with participation 1")
    shown = {"mean_lr": "learning rate", "mean_num_steps": "local steps", "val_loss": "loss"}
    figure, axes = plt.subplots(
        3, len(tasks), figsize=(1 + 4 * len(tasks), 7), squeeze=False, sharex="col"
    )
    for column, task in zip(axes.T, tasks, strict=True):
        for split in SPLITS:
            tables = [rows(c.folder(out)) for c in cells if (c.task, c.split) == (task, split)]
            for axis, (name, title) in zip(column, shown.items(), strict=True):
                if tables:
                    lines = [[float(row[name]) for row in table] for table in tables]
                    shortest = min(map(len, lines))
                    axis.plot(np.mean([line[:shortest] for line in lines], axis=0), label=split)
                axis.set_ylabel(title)
        column[0].set_title(task)
        column[0].legend()
        column[2].set_yscale("log")
        column[2].set_xlabel("round")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


class Clock(Callback):
    """Writes down how long rounds take, without the first ten or half of them, which compile."""

    def __init__(self, path: str) -> None:
        self.path, self.ends = path, list[float]()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a round."""
        self.ends.append(perf_counter())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the times of rounds."""
        each = np.diff(self.ends).tolist()
        Path(self.path).write_text(json.dumps(each[min(10, len(each) // 2) :]))


def overhead(
    tasks: Sequence[str], methods: Sequence[str], repeats: int, extra: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Return seconds per round of each method: for each repeat, the median over rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for task, seed, method in product(tasks, range(1, repeats + 1), methods):
        with tempfile.TemporaryDirectory() as folder:
            cell, times = Cell(task, "noniid", 1.0, method, seed), Path(folder, "seconds.json")
            clock = {"class_path": "mostafa2019.Clock", "init_args": {"path": str(times)}}
            options = [f"--trainer.callbacks={json.dumps([clock])}", *extra]
            if "ah" in method:  # as many local steps as the others
                grid = "{lr: [0.05, 0.1], num_steps: [10]}"
                options.append(f"--federation.policy.init_args.grid={grid}")
            given = [*cell.options(), *options]
            if command("fit", cell.folder(Path(folder)), given) is not None:
                took = median(json.loads(times.read_text()))
                found.setdefault(task, {}).setdefault(method, []).append(took)
                print(f"{task} {seed} {METHODS[method]}: {took:.4f} s", file=sys.stderr)
    return found


def overhead_table(found: dict[str, dict[str, list[float]]]) -> str:
    """Show table 4: seconds per round and the ratio to FA; medians over repeats."""
    lines = []
    for task, methods in found.items():
        base, line = methods.get("fa", []), [task]
        for method in PUBLISHED:
            each = methods.get(method, [])
            ratios = [a / b for a, b in zip(each, base, strict=False)]
            line.append(f"{median(each):.3f} ({median(ratios):.2f})" if ratios else "-")
        lines.append(line)
    return table(["seconds per round (relative to FA)", *PUBLISHED.values()], lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> dict[Cell, dict[str, Any]]:
    """Run what is missing, print the tables of what is there."""
    given, extra = apart(arguments)
    parser = shared_options(__doc__, "mostafa2019")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(PUBLISHED))
    parser.add_argument("--participation", nargs="+", type=float, default=[1.0, 0.5], metavar="C")
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="own",
        metavar="'METHOD OPTION'",
        help="an option for the cells of one method; may be given several times",
    )
    parser.add_argument("--gpus", type=int, default=0, help="deal the cells to so many GPUs")
    parser.add_argument("--figure", type=Path, help="draw figure 3 here")
    parser.add_argument(
        "--overhead", type=int, metavar="N", help="table 4 instead (noniid, C=1), of N repeats"
    )
    args = parser.parse_args(given)
    if args.overhead:
        shown = overhead_table(overhead(args.tasks, args.methods, args.overhead, extra))
        publish(shown, args.markdown)
        return {}
    cells = [  # seed by seed: if time runs out, the first seeds are complete
        Cell(*what, seed)
        for seed, *what in product(
            args.seeds, args.tasks, args.splits, args.participation, args.methods
        )
    ]
    own: dict[str, list[str]] = {}
    for each in args.own:
        method, _, option = each.partition(" ")
        if method not in METHODS or not option:
            parser.error(f"--with must be a method of {list(METHODS)} and an option, got {each!r}")
        own.setdefault(method, []).append(option)
    if wrong := check_options(args.out, [*extra, *args.own]):
        parser.error(wrong)
    runs = [
        Run(
            cell.folder(args.out),
            [*cell.options(), *extra, *own.get(cell.method, ())],
            {"CUDA_VISIBLE_DEVICES": str(i % args.gpus)} if args.gpus else {},
        )
        for i, cell in enumerate(cells)
    ]
    failed = fit_and_test_all(runs, args.jobs)
    found = results(cells, args.out)
    if args.figure:
        figure(found, args.out, args.figure)
    publish(markdown(found, args.out), args.markdown, failed)
    return found


if __name__ == "__main__":
    main()
