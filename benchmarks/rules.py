"""The rules of this project on real data, each beside its baselines: tables and pictures.

An experiment has several arms, each a config with options; an arm is run for each seed, in a
folder of its own. What is there already is not run again, and what was cut short goes on.

    python benchmarks/rules.py --jobs 2 --markdown docs/results/rules.md
    python benchmarks/rules.py --experiments fedprox --seeds 1 -- --data.init_args.root=/data

What follows ``--`` goes to ``fit`` and ``test`` of every arm.
"""

from __future__ import annotations

import argparse
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from runs import apart, check_options, fit_and_test_all, machine_line, newest, publish, result, rows

CONFIGS = Path(__file__).parents[1] / "configs"


class Experiment(NamedTuple):
    """What is compared.

    Args:
        title: Heading.
        question: What it asks, a line.
        config: The file that all arms share.
        arms: Options of each, by the name that it has in the table.
        figures: Columns: of the table of rounds (the last round that has it), ``test_acc``, ``R60``
            (the first round with a validation accuracy of 60 %), ``groups`` (the share of pairs
            of clients that are rightly in one cluster or in two), or ``val_acc, 20 s`` (the last
            validation accuracy in that virtual time).
        curve: What is drawn.
        across: Column over which it is drawn: ``round`` or ``virtual_time``.
    """

    title: str
    question: str
    config: str
    arms: dict[str, tuple[str, ...]]
    figures: tuple[str, ...] = ("test_acc",)
    curve: str = "val_acc"
    across: str = "round"


#: A model for all, averaged, in the place of a rule of its own.
FEDAVG = "--federation.aggregator=FedAvg"
#: Options that make the config of clusters one of four groups.
FOUR = "--data.init_args.client_rotations=[0,90,180,270]"
PERSONAL = '--trainer.callbacks=[{"class_path":"PersonalizedEvaluation","init_args":%s}]'
SGD = '--model.init_args.optimizer={"class_path":"torch.optim.SGD","init_args":{"lr":%s}}'
#: FedEM's component as a model for all.
ONE_MODEL = (
    '--model={"class_path":"ClientModule","init_args":{"net":{"class_path":"MLPClassifier",'
    '"init_args":{"sizes":[784,50,10]}}}}'
)
MILD = (
    '--data.init_args.partition={"class_path":"Dirichlet","init_args":{"alpha":0.4,"min_size":50}}'
)
#: The candidates of the config of policies.
RATES = (0.001, 0.01, 0.03, 0.1, 0.3)
#: Synchronous rounds in the config of asynchronous ones.
SYNCHRONOUS = (
    '--federation.aggregator={"class_path":"FedAvg","init_args":{"weighting":"uniform"}}',
    "--federation.sampler=UniformSampler",
)

EXPERIMENTS = {
    "fedprox": Experiment(
        "FedProx",
        "Nine of the ten clients of a round are stragglers. Are their partial updates used or"
        " dropped?",
        "fedprox_mnist",
        {
            "FedProx, mu = 1": (),
            "FedAvg, stragglers kept": ("--model.init_args.terms=[]",),
            "FedAvg, stragglers dropped": (
                "--model.init_args.terms=[]",
                "--federation.policy.init_args.drop=true",
            ),
            "FedAvg, no stragglers": (
                "--model.init_args.terms=[]",
                "--federation.policy.init_args.fraction=0",
            ),
        },
    ),
    "fedopt": Experiment(
        "Server optimizers",
        "What do server optimizers gain over averaging?",
        "fedopt_mnist",
        {
            "FedAdam": (),
            "FedYogi": ("--federation.aggregator=FedYogi", "--federation.aggregator.lr=0.01"),
            "FedAdagrad": ("--federation.aggregator=FedAdagrad", "--federation.aggregator.lr=0.01"),
            "FedAvgM": ("--federation.aggregator=FedAvgM", "--federation.aggregator.lr=1"),
            "FedAvg": (FEDAVG,),
        },
    ),
    "fedavgplus": Experiment(
        "FedAvg+",
        "What does a client gain by local fine-tuning?",
        "fedavgplus_mnist",
        {
            "FedAvg+": (),
            "FedAvg": (
                FEDAVG,
                '--federation.policy={"class_path":"Schedule","init_args":'
                '{"lr":0.02,"local_epochs":5}}',
            ),
        },
        ("server/mean", "personal/mean", "personal/worst", "local/mean", "test_acc"),
    ),
    "clustered2": Experiment(
        "Clustered FL, two groups",
        "Every second client has images that are upside down. Does the rule identify the two"
        " groups?",
        "clustered_mnist",
        {"ClusteredFL": (), "FedAvg": (FEDAVG,)},
        ("server/mean", "server/worst", "clusters", "groups"),
        "server/mean",
    ),
    "clustered4": Experiment(
        "Clustered FL, four groups",
        "The same with four groups, whose images are rotated by multiples of 90 degrees.",
        "clustered_mnist",
        {"ClusteredFL": (FOUR,), "FedAvg": (FOUR, FEDAVG)},
        ("server/mean", "server/worst", "clusters", "groups"),
        "server/mean",
    ),
    "pfedme": Experiment(
        "pFedMe",
        "Personal models of clients with two digits each.",
        "pfedme_mnist",
        {
            "pFedMe": (),
            "FedAvg": (SGD % 0.02, "--federation.optimizer_state=reset"),
        },
        ("server/mean", "kept/mean", "kept/worst", "personal/mean", "personal/worst"),
    ),
    "fedem": Experiment(
        "FedEM",
        "A mixture of three models for each client. Each client has two digits.",
        "fedem_mnist",
        {
            "FedEM": (),
            "FedEM, no server": (
                "--federation.aggregator=Gossip",
                "--federation.aggregator.graph=erdos_renyi",
            ),
            "FedAvg": (ONE_MODEL,),
        },
        ("server/mean", "server/worst", "test_acc"),
        "server/mean",
    ),
    "fedem-mild": Experiment(
        "FedEM, mild skew",
        "The same with mild label skew, Dirichlet(0.4).",
        "fedem_mnist",
        {"FedEM": (MILD,), "FedAvg": (MILD, ONE_MODEL)},
        ("server/mean", "server/worst", "test_acc"),
        "server/mean",
    ),
    "drift": Experiment(
        "SCAFFOLD",
        "Clients with two digits drift apart in a local epoch. What do control variates gain?",
        "scaffold_mnist",
        {
            "SCAFFOLD, option II": (),
            "SCAFFOLD, option I": ("--federation.aggregator.init_args.option=I",),
            "FedAvg": (FEDAVG,),
        },
    ),
    "steps": Experiment(
        "FedNova",
        "Half of the sampled clients make fewer local steps. What does normalization gain?",
        "fednova_mnist",
        {"FedNova": (), "FedAvg": (FEDAVG,)},
    ),
    "gossip": Experiment(
        "Gossip",
        "How accurate is averaging among neighbors in a graph, without a server?",
        "gossip_mnist",
        {
            "ring": (),
            "grid": ("--federation.aggregator.init_args.graph=grid",),
            "Erdos-Renyi": ("--federation.aggregator.init_args.graph=erdos_renyi",),
            "complete": ("--federation.aggregator.init_args.graph=complete",),
            "FedAvg": (FEDAVG,),
        },
        ("test_acc", "consensus_distance"),
    ),
    "control": Experiment(
        "FedControl",
        "Aggregation weights from sample counts, the decrease of the loss and the sum of past"
        " losses, on Fashion-MNIST.",
        "fedcontrol_fashion",
        {
            "FedControl, lambda = 0.8": (),
            "FedControl, lambda = 1": ("--federation.aggregator.init_args.decay=1.0",),
            "FedCostWAvg": ("--federation.aggregator=FedCostWAvg",),
            "FedAvg": (FEDAVG,),
        },
        ("test_acc", "R60"),
    ),
    "asynchronous": Experiment(
        "Asynchronous rounds",
        "The speeds of clients are log-normal: the slowest of 30 takes about eight times as long"
        " as the median. What does the server gain if it does not wait, at equal virtual time?",
        "fedbuff_mnist",
        {
            "FedBuff, 30 clients train": ("--trainer.max_epochs=80",),
            "FedAvg, rounds of 30": (
                *SYNCHRONOUS,
                "--federation.clients_per_round=30",
                "--trainer.max_epochs=8",
            ),
            "FedAvg, rounds of 30, deadline 1.5 s": (
                *SYNCHRONOUS,
                "--federation.clients_per_round=30",
                "--trainer.max_epochs=18",
                '--trainer.callbacks=[{"class_path":"ClientFaults","init_args":'
                '{"step_seconds":0.01,"speed_sigma":1.0,"deadline":1.5}}]',
            ),
        },
        ("val_acc, 10 s", "val_acc, 20 s"),
        across="virtual_time",
    ),
    "policy": Experiment(
        "Policies",
        "Policies that learn one of five learning rates, compared with each fixed rate.",
        "personalized_policy_mnist",
        {
            "contribution": (),
            "reward": ("--federation.policy.init_args.method=reward",),
            **{
                f"lr {rate:g}": (
                    '--federation.policy={"class_path":"Schedule","init_args":'
                    f'{{"lr":{rate},"num_steps":5}}}}',
                )
                for rate in RATES
            },
        },
    ),
}


def options(experiment: Experiment, arm: str, seed: int) -> list[str]:
    """Return the options of a run."""
    file = CONFIGS / f"{experiment.config}.yaml"
    return ["--config", str(file), f"--seed_everything={seed}", *experiment.arms[arm]]


def folder(out: Path, name: str, arm: str, seed: int) -> Path:
    """Return where a run leaves what it finds."""
    return out / name / f"{''.join(c if c.isalnum() else '_' for c in arm)}-{seed}"


def figure_of(place: Path, name: str) -> float:
    """Return a figure of a run, nan where it has none."""
    table = rows(place)
    if name == "test_acc":
        return float((result(place) or {})[name])
    if name == "R60":
        reached = [int(row["round"]) for row in table if float(row["val_acc"] or 0) >= 0.6]
        return float(reached[0]) if reached else float("nan")
    if name == "groups":
        return found_groups(place)
    if name.startswith("val_acc, "):
        return accuracy_at(table, float(name.split()[1]))
    values = [float(row[name]) for row in table if row.get(name)]
    return values[-1] if values else float("nan")


def accuracy_at(table: Sequence[Mapping[str, str]], seconds: float) -> float:
    """Return the last validation accuracy within a virtual time, nan if the run was shorter."""
    found = [row for row in table if float(row["virtual_time"]) <= seconds and row["val_acc"]]
    if not found or float(table[-1]["virtual_time"]) < seconds:
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


def table(name: str, out: Path, seeds: Sequence[int]) -> str:
    """Show an experiment's figures: mean and standard deviation over seeds."""
    experiment = EXPERIMENTS[name]
    lines = [["", *experiment.figures], ["---"] + ["---:"] * len(experiment.figures)]
    for arm in experiment.arms:
        places = [folder(out, name, arm, seed) for seed in seeds]
        places = [place for place in places if result(place) is not None]
        line = [arm]
        for figure in experiment.figures:
            each = [figure_of(place, figure) for place in places]
            line.append(_shown([value for value in each if value == value], figure))
        lines.append(line)
    took = [found["seconds"] for p in _places(name, out, seeds) if (found := result(p))]
    rounds = {found["rounds"] for p in _places(name, out, seeds) if (found := result(p))}
    said = (
        f"{len(seeds)} seed{'s' * (len(seeds) > 1)}, {' or '.join(map(str, sorted(rounds)))} rounds"
    )
    return "\n\n".join(
        [
            f"## {experiment.title}",
            experiment.question,
            f"`configs/{experiment.config}.yaml`, {said}; a run took {median(took):.0f} s.",
            "\n".join("| " + " | ".join(line) + " |" for line in lines),
        ]
    )


def _shown(each: Sequence[float], figure: str) -> str:
    if not each:
        return "-"
    is_share = "/" in figure or figure in ("test_acc", "groups") or figure.startswith("val_acc")
    scale = 100 if is_share else 1
    digits = 1 if scale == 100 else 3
    spread = f" ± {scale * stdev(each):.{digits}f}" if len(each) > 1 else ""
    return f"{scale * mean(each):.{digits}f}{spread}"


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
            axes.plot(at, lines.mean(0), label=arm)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs", "rules"))
    parser.add_argument("--markdown", type=Path, help="write tables here, pictures beside them")
    args = parser.parse_args(given)
    if wrong := check_options(args.out, extra):
        parser.error(wrong)
    wanted = (
        (folder(args.out, name, arm, seed), [*options(EXPERIMENTS[name], arm, seed), *extra])
        for name, seed in product(args.experiments, args.seeds)
        for arm in EXPERIMENTS[name].arms
    )
    fit_and_test_all(wanted, args.jobs)
    text = [machine_line()]
    for name in args.experiments:
        if any(result(place) for place in _places(name, args.out, args.seeds)):
            text.append(table(name, args.out, args.seeds))
            if args.markdown:
                png = args.markdown.with_name(f"{args.markdown.stem}-{name}.png")
                picture(name, args.out, args.seeds, png)
                text.append(f"![{name}]({png.name})")
    publish("\n\n".join(text) + "\n", args.markdown)


if __name__ == "__main__":
    main()
