"""Long runs of tables 2 and 3 of Mostafa (2019), in the order of their worth, one after another.

    python benchmarks/long_runs.py --data data
    python benchmarks/long_runs.py --state
    python benchmarks/long_runs.py --data data --only cifar10-half-0.1 --curves half.png

Each run takes one core. The script may be killed at any time: started again, it resumes the run
that was cut short. Results are added to ``benchmarks/results`` after each run, and a run whose
results are there is not repeated. ``--state`` lists the runs with their rounds and accuracies,
``--curves`` draws validation accuracies. What the settings answer is in
``docs/results/mostafa2019.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

import kept
import mostafa2019
from runs import ROOT, result, rows, table

#: Rounds whose validation accuracy is listed.
ROUNDS = (50, 100, 150, 200, 300, 400)


class LongRun(NamedTuple):
    """Cells of a table with the same options.

    Args:
        name: Name of the folder, and of the file of results.
        cells: Options of ``mostafa2019.py`` that select the cells.
        options: Options of ``lightning-fl fit``.
        matching: Options of the cells of FA+RM only.
    """

    name: str
    cells: str
    options: str
    matching: str = ""


def start(rounds: int) -> str:
    """Return options that all runs have."""
    return f"--threads=1 --trainer.max_epochs={rounds} --data.init_args.eval_batch_size=1000"


NON_IID = "--tasks cifar10 --splits noniid --participation 1.0 --seeds 1"
BOTH, ALL_SEEDS = "--methods fa fa_rm", "--seeds 1 2 3"
NET, TERM = "--model.init_args.net.init_args.", "--model.init_args.terms."
POLICY = "--federation.policy.init_args."
SMALLER = f"{NET}width=16 {NET}hidden=512"
HALF = f"{start(300)} {SMALLER}"
#: As many rounds as the runs of table 2 on a GPU.
LONG = start(200)
ADAM, AUGMENT = "--model.init_args.optimizer=Adam", "--data.init_args.augment=true"
#: 60 rounds of 30 steps, and 90 of 20, have the steps and the decay of 180 rounds of ten.
STEPS30 = f"{POLICY}lr=0.05 {POLICY}num_steps=30 {POLICY}decay=0.997"
STEPS20 = f"{POLICY}lr=0.05 {POLICY}num_steps=20 {POLICY}decay=0.998"
#: One client with all samples; a round is an epoch.
CENTRAL = f"{start(60)} --data.init_args.num_clients=1 {POLICY}num_steps=750 {POLICY}decay=0.95"
#: The author's published program: squares are summed over features.
AUTHOR = f"{TERM}coefficient=0.0001 {TERM}reduction=sum"
#: And its kernels; Adam for the matching layers, with a hundredth of the client's rate.
OWN_ADAM = f"{AUTHOR} {TERM}kernel_size=5 {TERM}optimizer=Adam {TERM}lr_factor=0.01"
NON_IID_KWS = "--tasks kws --splits noniid --participation 1.0"
KEYWORDS = f"{start(150)} {NET}width=32 {NET}hidden=512"

RUNS = (
    # Which settings reach the paper's accuracy at all, and which matter.
    LongRun("cifar10-half-0.1", f"{NON_IID} {BOTH}", HALF, AUTHOR),
    LongRun(
        "cifar10-central-augment", f"{NON_IID} --splits iid --methods fa", f"{CENTRAL} {AUGMENT}"
    ),
    LongRun("cifar10-half-mean-0.1", f"{NON_IID} --methods fa_rm", HALF, f"{TERM}coefficient=0.1"),
    LongRun("cifar10-half-mean-1", f"{NON_IID} --methods fa_rm", HALF),
    LongRun("cifar10-half-0.05", f"{NON_IID} {BOTH}", f"{HALF} {POLICY}lr=0.05", AUTHOR),
    LongRun("cifar10-half-0.02", f"{NON_IID} {BOTH}", f"{HALF} {POLICY}lr=0.02", AUTHOR),
    LongRun(
        "cifar10-half-adam-0.001", f"{NON_IID} {BOTH}", f"{HALF} {ADAM} {POLICY}lr=0.001", AUTHOR
    ),
    LongRun(
        "cifar10-half-adam-0.0001", f"{NON_IID} {BOTH}", f"{HALF} {ADAM} {POLICY}lr=0.0001", AUTHOR
    ),
    LongRun("cifar10-half-own-adam", f"{NON_IID} --methods fa_rm", HALF, OWN_ADAM),
    LongRun("cifar10-half-augment", f"{NON_IID} {BOTH}", f"{HALF} {AUGMENT}", AUTHOR),
    LongRun(
        "cifar10-half-steps30",
        f"{NON_IID} {BOTH} {ALL_SEEDS}",
        f"{start(60)} {SMALLER} {STEPS30}",
        AUTHOR,
    ),
    LongRun(
        "cifar10-half-steps30-long",
        f"{NON_IID} {BOTH}",
        f"{start(180)} {SMALLER} {STEPS30}",
        AUTHOR,
    ),
    LongRun(
        "cifar10-half-steps20", f"{NON_IID} {BOTH}", f"{start(90)} {SMALLER} {STEPS20}", AUTHOR
    ),
    LongRun("cifar10-steps30", f"{NON_IID} {BOTH} {ALL_SEEDS}", f"{start(60)} {STEPS30}", AUTHOR),
    LongRun("cifar10-central", f"{NON_IID} --splits iid --methods fa", CENTRAL),
    LongRun(
        "cifar10-iid-augment",
        f"{NON_IID} --splits iid --methods fa",
        # 150 rounds have as many steps of a client as the runs with one client.
        f"{start(150)} {AUGMENT} {POLICY}num_steps=30",
    ),
    LongRun(
        "cifar10-iid-augment-long",
        f"{NON_IID} --splits iid --methods fa",
        f"{start(340)} {AUGMENT} {POLICY}num_steps=30 {POLICY}lr=0.15 {POLICY}decay=0.995",
    ),
    # Table 2.
    LongRun("cifar10-author", f"{NON_IID} {BOTH} {ALL_SEEDS}", LONG, AUTHOR),
    LongRun("cifar10-author-half-c", f"{NON_IID} {BOTH} --participation 0.5", LONG, AUTHOR),
    LongRun(
        "cifar10-author-literal",
        f"{NON_IID} {BOTH} --participation 0.5",
        f"{LONG} --federation.aggregator=FedAvg --federation.aggregator.normalization=all",
        AUTHOR,
    ),
    LongRun("cifar10-author-ah", f"{NON_IID} --methods fa_ah fa_rm_ah", LONG, AUTHOR),
    # Table 3.
    LongRun("kws-author", f"{NON_IID_KWS} {BOTH} {ALL_SEEDS}", KEYWORDS, AUTHOR),
    LongRun(
        "kws-author-augment", f"{NON_IID_KWS} --seeds 1 {BOTH}", f"{KEYWORDS} {AUGMENT}", AUTHOR
    ),
    LongRun(
        "kws-author-half-c", f"{NON_IID_KWS} --participation 0.5 --seeds 1 {BOTH}", KEYWORDS, AUTHOR
    ),
    LongRun("kws-author-iid", f"--tasks kws --splits iid --seeds 1 {BOTH}", KEYWORDS, AUTHOR),
    LongRun(
        "kws-author-rest", "--tasks kws --seeds 1 --methods fa_wd fa_rm_ah fa_ah", KEYWORDS, AUTHOR
    ),
)


def arguments(run: LongRun, out: Path, data: str) -> list[str]:
    """Return the arguments of ``mostafa2019.py``."""
    own = [
        word
        for option, method in product(run.matching.split(), ("fa_rm", "fa_rm_ah"))
        if method in run.cells.split() or "--methods" not in run.cells
        for word in ("--with", f"{method} {option}")
    ]
    return [
        *run.cells.split(),
        "--out",
        str(out),
        *own,
        "--",
        *run.options.split(),
        f"{ROOT}{data}",
    ]


def go_on(run: LongRun, out: Path, data: str) -> None:
    """Run what is missing of a long run, and keep its results."""
    path = kept.RESULTS / f"{run.name}.jsonl"
    if path.exists():
        kept.restore(path, out)
    try:
        mostafa2019.main(arguments(run, out, data))
    except SystemExit as error:  # the next runs may still succeed
        print(f"{run.name}: {error}", file=sys.stderr)
    else:
        kept.save(out, path)


def cells(out: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each cell that was begun."""
    for path in sorted(out.glob("*/version_*/rounds.csv")):
        yield path.parent.parent.name, path.parent.parent


def state(runs: Sequence[LongRun], folder: Path) -> str:
    """Return a table of what is there."""
    lines = []
    for run in runs:
        begun = dict(cells(folder / run.name))
        for name, place in begun.items():
            done, found = rows(place), result(place)
            accuracy = {int(row["round"]): 100 * float(row["val_acc"] or "nan") for row in done}
            last = max(accuracy)
            # Files of results have every second round of a long run.
            near = [max((r for r in accuracy if r <= n), default=0) for n in ROUNDS]
            pairs = zip(near, ROUNDS, strict=True)
            shown = [f"{accuracy[r]:.1f}" if r and last >= n else "" for r, n in pairs]
            tested = "" if found is None else f"{100 * found['test_acc']:.1f}"
            took = "" if found is None else f"{found['seconds'] / 60:.0f}"
            lines.append([f"{run.name}: {name}", str(last), *shown, tested, took])
        if not begun:
            lines.append([f"{run.name}: not begun", *[""] * (len(ROUNDS) + 3)])
    head = ["run: cell", "rounds", *(f"val {n}" for n in ROUNDS), "test", "min"]
    return table(head, lines)


def curves(runs: Sequence[LongRun], folder: Path, path: Path) -> None:
    """Draw the validation accuracy of all cells over rounds."""
    figure, axis = plt.subplots(figsize=(9, 5))
    for run in runs:
        for name, place in cells(folder / run.name):
            done = [row for row in rows(place) if row["val_acc"]]
            rounds = [int(row["round"]) for row in done]
            axis.plot(
                rounds, [100 * float(row["val_acc"]) for row in done], label=f"{run.name}: {name}"
            )
    axis.set_xlabel("round")
    axis.set_ylabel("validation accuracy, %")
    axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(given: Sequence[str] | None = None) -> None:
    """Run what is missing, or show what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--data", default="data", help="folder of the data sets")
    parser.add_argument("--state", action="store_true", help="list what is there; run nothing")
    parser.add_argument(
        "--curves", type=Path, metavar="PNG", help="draw what is there; run nothing"
    )
    args = parser.parse_args(given)
    runs = [run for run in RUNS if args.only is None or run.name in args.only]
    if args.curves:
        curves(runs, args.out, args.curves)
    elif not args.state:
        for run in runs:
            go_on(run, args.out / run.name, args.data)
    print(state(runs, args.out))


if __name__ == "__main__":
    main()
