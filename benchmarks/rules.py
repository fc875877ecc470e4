"""The rules of this project on real data, beside their baselines or the figures of other papers.

An experiment has several arms, each a config with options; an arm is run for each seed, in a
folder of its own. What is there already is not run again, and what was cut short goes on.

    python benchmarks/rules.py --jobs 2 --markdown tables.md
    python benchmarks/rules.py --experiments fedprox --seeds 1 -- --data.init_args.root=/data

What follows ``--`` goes to ``fit`` and ``test`` of every arm.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import torch

from experiments import EXPERIMENTS, Experiment
from runs import (
    Run,
    apart,
    check_options,
    fit_and_test_all,
    last,
    machine_line,
    mean_and_spread,
    newest,
    publish,
    result,
    rows,
    shared_options,
    table,
)

#: Folders of the configs.
CONFIGS = Path(__file__).parents[1] / "configs", Path(__file__).with_name("published")


def config(experiment: Experiment) -> Path:
    """Return the path of an experiment's config."""
    paths = (folder / f"{experiment.config}.yaml" for folder in CONFIGS)
    return next(path for path in paths if path.exists())


def options(experiment: Experiment, arm: str, seed: int) -> list[str]:
    """Return the options of a run."""
    file = str(config(experiment))
    return ["--config", file, f"--seed_everything={seed}", *experiment.arms[arm]]


def folder(out: Path, name: str, arm: str, seed: int) -> Path:
    """Return where a run leaves what it finds."""
    return out / name / f"{''.join(c if c.isalnum() else '_' for c in arm)}-{seed}"


def figure_of(place: Path, name: str) -> float:
    """Return a figure of a run, nan where it has none."""
    rounds = rows(place)
    if name == "test_acc":
        return float((result(place) or {})[name])
    if name[0] == "R":
        share = int(name[1:]) / 100
        reached = [int(row["round"]) for row in rounds if float(row["val_acc"] or 0) >= share]
        return float(reached[0]) if reached else float("nan")
    if name == "best":
        return max(float(row["val_acc"] or 0) for row in rounds)
    if name == "groups":
        return found_groups(place)
    if name.startswith("val_acc, "):
        return accuracy_at(rounds, float(name.split()[1]))
    return last(place, name)


def accuracy_at(rounds: Sequence[Mapping[str, str]], seconds: float) -> float:
    """Return the last validation accuracy within a virtual time, nan if the run was shorter."""
    found = [row for row in rounds if float(row["virtual_time"]) <= seconds and row["val_acc"]]
    if not found or float(rounds[-1]["virtual_time"]) < seconds:
        return float("nan")
    return float(found[-1]["val_acc"])


def found_groups(place: Path) -> float:
    """Return the share of pairs of clients that clusters put together, or apart, rightly."""
    checkpoint = torch.load(newest(place, "last.ckpt"), map_location="cpu", weights_only=True)
    state = checkpoint["callbacks"]["FederatedLoop"]
    if "cluster_of" not in state["aggregator"]:
        return float("nan")
    config = newest(place, "config.yaml").read_text()
    turns = config.partition("client_rotations:")[2].partition("num_clients")[0].count("- ")
    clusters = state["aggregator"]["cluster_of"][: state["num_clients"]]
    truth = torch.arange(len(clusters)) % turns
    pairs = torch.triu_indices(len(clusters), len(clusters), 1)
    together = [(each[pairs[0]] == each[pairs[1]]) for each in (clusters, truth)]
    return float((together[0] == together[1]).double().mean())


def section(name: str, out: Path, seeds: Sequence[int]) -> str:
    """Show an experiment's figures: mean and standard deviation over seeds."""
    experiment, lines = EXPERIMENTS[name], []
    sources = list(dict.fromkeys(by for each in experiment.published.values() for by in each))
    for arm in experiment.arms:
        places = [folder(out, name, arm, seed) for seed in seeds]
        places = [place for place in places if result(place) is not None]
        if not places:
            continue
        line = [arm]
        for figure in experiment.figures:
            each = [figure_of(place, figure) for place in places]
            line.append(_shown(each, figure))
        lines.append([*line, *(experiment.published.get(arm, {}).get(by, "") for by in sources)])
    took = [found["seconds"] for p in _places(name, out, seeds) if (found := result(p))]
    rounds = {found["rounds"] for p in _places(name, out, seeds) if (found := result(p))}
    said = (
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}, {' or '.join(map(str, sorted(rounds)))} rounds"
    )
    file = config(experiment).relative_to(CONFIGS[0].parent)
    return "\n\n".join(
        [
            f"## {experiment.title}",
            experiment.question,
            f"`{file}`, {said}; a run took {median(took):.0f} s.",
            table(["", *experiment.figures, *sources], lines),
        ]
    )


def _shown(each: Sequence[float], figure: str) -> str:
    if "/" in figure or figure in ("best", "test_acc", "groups") or figure.startswith("val_acc"):
        return mean_and_spread(each)
    return mean_and_spread(each, scale=1, digits=0 if figure[0] == "R" else 3)


def _places(name: str, out: Path, seeds: Sequence[int]) -> list[Path]:
    return [folder(out, name, arm, seed) for arm in EXPERIMENTS[name].arms for seed in seeds]


def picture(name: str, out: Path, seeds: Sequence[int], path: Path) -> None:
    """Draw an experiment's curves: means over seeds, and the range."""
    experiment = EXPERIMENTS[name]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for arm in experiment.arms:
        curves = []
        for place in (folder(out, name, arm, seed) for seed in seeds):
            if result(place) is not None:
                points = [r for r in rows(place) if r.get(experiment.curve)]
                names = experiment.across, experiment.curve
                curves.append([[float(row[column]) for row in points] for column in names])
        if curves:
            # At the points of one run, those of the others: the last value before.
            end = min(curve[0][-1] for curve in curves)
            at = [x for x in curves[0][0] if max(c[0][0] for c in curves) <= x <= end]
            lines = np.array([[ys[bisect(xs, x) - 1] for x in at] for xs, ys in curves])
            style = "--" if len(axes.lines) >= 10 else "-"  # the colors begin anew
            axes.plot(at, lines.mean(0), style, label=arm)
            axes.fill_between(at, lines.min(0), lines.max(0), alpha=0.2)
    axes.set(xlabel=experiment.across.replace("_", " "), ylabel=experiment.curve)
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, show what is there."""
    given, extra = apart(arguments)
    parser = shared_options(__doc__, "rules")
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--arms", nargs="+", help="run these arms only, such as 'E = 1, B = 10'")
    args = parser.parse_args(given)
    known = {arm for name in args.experiments for arm in EXPERIMENTS[name].arms}
    if unknown := set(args.arms or ()) - known:
        parser.error(f"no arm {min(unknown)!r}, there are {sorted(known)}")
    if wrong := check_options(args.out, extra):
        parser.error(wrong)
    wanted = (
        Run(folder(args.out, name, arm, seed), [*options(EXPERIMENTS[name], arm, seed), *extra])
        for name, seed in product(args.experiments, args.seeds)
        for arm in EXPERIMENTS[name].arms
        if arm in (args.arms or known)
    )
    failed = fit_and_test_all(wanted, args.jobs)
    text = [machine_line(args.out)]
    for name in args.experiments:
        if any(result(place) for place in _places(name, args.out, args.seeds)):
            text.append(section(name, args.out, args.seeds))
            if args.markdown:
                png = args.markdown.with_name(f"{args.markdown.stem}-{name}.png")
                picture(name, args.out, args.seeds, png)
                text.append(f"![{name}]({png.name})")
    publish("\n\n".join(text) + "\n", args.markdown, failed)


if __name__ == "__main__":
    main()
