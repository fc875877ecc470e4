"""Methods side by side on the same splits of real data: three tables.

``heterogeneity`` compares global models on clients with skewed labels or unequal sizes. The
learning rate of each method is tuned on validation samples: the one of ``RATES`` with the highest
validation accuracy, averaged over the last three validations, on clients with two classes and a
seed of its own. ``personalization`` compares the models of clients on their own test samples, and
``fairness`` a common model on the test samples of each client.

    python benchmarks/methods.py heterogeneity --jobs 2 --markdown tables.md
    python benchmarks/methods.py personalization --data mnist -- --data.init_args.root=/data

A run is a ``lightning-fl fit`` in a folder of its own. What is there already is not run again, and
what was cut short goes on. What follows ``--`` goes to ``fit`` and ``test`` of every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from runs import (
    Arms,
    Run,
    apart,
    callback,
    check_options,
    fit_and_test_all,
    given,
    last,
    machine_line,
    mean_and_spread,
    publish,
    result,
    rows,
    rule,
    shared_options,
    split,
    table,
    term,
)

CONFIGS = Path(__file__).parent / "methods"
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
#: Learning rates among which that of a method is chosen, and the seed of these runs.
RATES, TUNING_SEED = (0.01, 0.03, 0.1, 0.3), 0


HETEROGENEITY: Arms = {
    "FedAvg": (),
    "FedProx, mu = 0.1": term("Proximal", mu=0.1),
    "SCAFFOLD": rule("Scaffold"),
    "FedNova": rule("FedNova"),
    "FedDyn, alpha = 0.1": rule("FedDyn", alpha=0.1),
    "MOON, mu = 1": term("MOON", mu=1.0),
    "FedAdam": rule("FedAdam", lr=0.01),
    "power-of-choice, d = 8": (
        *rule("PowerOfChoice"),
        given("federation.sampler", "HighLossSampler", candidates=8),
    ),
    "FedExP": rule("FedExP"),
    "FedCM, alpha = 0.1": rule("FedCM", alpha=0.1),
    "HeteroFL, rates 1, 1/2, 1/4": rule("HeteroFL", rates=[1.0, 0.5, 0.25]),
    "FedSAM, rho = 0.1": (given("model", "FedSAM", rho=0.1),),
    "FedNTD": term("FedNTD", beta=1.0),
    "FedDecorr": term("FedDecorr", beta=0.1),
    "FedLC": term("FedLC", tau=1.0),
    "FedRS": term("FedRS", alpha=0.5),
    "FA + RM": term("RepresentationMatching", coefficient=1.0, reduction="mean"),
}
SKEWS: Arms = {
    "one class": split("ByLabel", classes_per_client=1),
    "two classes": split("ByLabel", classes_per_client=2),
    "Dir(0.1)": split("Dirichlet", alpha=0.1, min_size=64),
    "Dir(0.5)": split("Dirichlet", alpha=0.5, min_size=64),
    "sizes": split("QuantitySkew", alpha=0.5, min_size=64),
}

#: Networks with BatchNorm layers, which FedBN needs, for all methods; HEAD is their last layer, and
#: BODY are the layers before it.
NETWORKS: Arms = {
    "mnist": (given("model.init_args.net", "FashionCNN", width=4, batch_norm=True),),
    "cifar10": (given("model.init_args.net", "CifarCNN", width=4, hidden=64, batch_norm=True),),
}
HEAD = {"mnist": "net.9.*", "cifar10": "net.11.*"}
BODY = {"mnist": "net.[0-8].*", "cifar10": "net.[0-9].*"}


def local(*patterns: str, phases: Any = ()) -> tuple[str, ...]:
    """Return the options of parameters that stay with their clients."""
    every = {"local_parameters": patterns, "policy.init_args.phases": phases}
    return tuple(
        f"--federation.{name}={json.dumps(value)}" for name, value in every.items() if value
    )


#: The heads learn in half of the steps, the rest in the other half.
HALVES = [{"train": "local", "num_steps": 10}, {"train": "shared"}]
#: The strengths of the authors.
PFEDME = {"lr": 0.005, "personal_lr": 0.05, "lam": 15, "inner_steps": 5}

PERSONALIZATION: Arms = {
    "Local training": (
        "--trainer.max_epochs=1",
        *callback("PersonalizedEvaluation", steps=0, local_steps=400),
    ),
    "FedAvg": (),
    "FedAvg, fine-tuned": callback("PersonalizedEvaluation", steps=20),
    "FedBN": local("type:_BatchNorm"),
    "FedPer": local("HEAD"),
    "FedRep": local("HEAD", phases=HALVES),
    "LG-FedAvg": local("BODY"),
    "FedBABU": (
        *local("HEAD", phases=[{"train": "shared"}]),
        *callback("PersonalizedEvaluation", steps=20),
    ),
    "Ditto, strength = 0.1": term("Ditto", strength=0.1),
    "pFedMe": (
        given("model.init_args.optimizer", "lightning_fl.optimizers.PFedMe", **PFEDME),
        "--federation.optimizer_state=keep",
    ),
    "APFL, alpha = 0.5": term("APFL", alpha=0.5),
    "Fed-RoD": term("FedRoD", gamma=1.0),
    "FedProto": (
        *term("FedProto", strength=1.0),
        *rule("FedAvg", weighting="uniform"),
        *local("net.*"),
    ),
    "FedALA": rule("FedALA"),
    "Per-FedAvg": ("--model=PerFedAvg", "--model.init_args.inner_lr=0.01"),
    "FedEM, 3 components": (  # which does not support BatchNorm
        "--model=FedEM",
        "--model.init_args.components=3",
        "--model.init_args.net.init_args.batch_norm=false",
    ),
    "Clustered": rule("ClusteredFL", eps1=0.2, eps2=0.4, warmup=5),
    "IFCA, 4 clusters": rule("IFCA", clusters=4),
    "FedAMP": (*rule("FedAMP", sigma=1.0, strength=0.5), *term("Proximal", mu=0.1)),
}
GROUPS: Arms = {
    "rotated images": ("--data.init_args.client_rotations=[0,90,180,270]",),
    "two classes per client": split("ByLabel", classes_per_client=2),
}
#: Columns of PersonalizedEvaluation with the global and the personal model of a method.
MODELS = {
    "Local training": ("", "local"),
    "FedAvg": ("server", "server"),
    "FedAvg, fine-tuned": ("server", "personal"),
    "FedBABU": ("global", "personal"),
    **dict.fromkeys(
        (
            *("FedBN", "FedPer", "FedRep", "LG-FedAvg", "FedProto", "FedEM, 3 components"),
            *("Clustered", "IFCA, 4 clusters", "FedAMP"),
        ),
        ("global", "server"),
    ),
    **dict.fromkeys(
        ("Ditto, strength = 0.1", "pFedMe", "APFL, alpha = 0.5", "Per-FedAvg", "Fed-RoD", "FedALA"),
        ("server", "kept"),
    ),
}


FAIRNESS: Arms = {
    "FedAvg": (),
    "q-FedAvg, q = 1": rule("QFedAvg", q=1.0),
    "AFL, gamma = 0.01": rule("AFL", gamma=0.01),
}


class Case(NamedTuple):
    """A run of a method.

    Args:
        data: Name of the data set in ``DATA``.
        method: Name of the method.
        split: Name of the split.
        seed: Seed of the run.
        lr: Learning rate; None leaves it to the config.
    """

    data: str
    method: str
    split: str
    seed: int
    lr: float | None = None


class Experiment(NamedTuple):
    """A table.

    Args:
        title: Heading.
        text: What is compared.
        arms: Options by method.
        splits: Options by split.
        tuned_on: Split on which learning rates are tuned; None tunes none.
        columns: Heading and factor of each figure: ``test_acc``, or a column of the table of
            rounds, in which ``GLOBAL`` and ``OWN`` stand for the models of a method.
        given: Options by data set.
    """

    title: str
    text: str
    arms: Arms
    splits: Arms
    tuned_on: str | None
    columns: Mapping[str, tuple[str, float]]
    given: Arms


EXPERIMENTS = {
    "heterogeneity": Experiment(
        "Heterogeneous clients",
        "Accuracy of the global model on the test set, after the same number of local epochs.",
        HETEROGENEITY,
        SKEWS,
        "two classes",
        {"test_acc": ("accuracy", 100.0)},
        dict.fromkeys(DATA, ()),
    ),
    "personalization": Experiment(
        "Personal models",
        "Accuracy on the test samples of the clients, after the same number of local steps: of the"
        " global model and of the personal models, their mean over the worst tenth of clients, and"
        " their variance over clients.",
        PERSONALIZATION,
        GROUPS,
        None,
        {
            "GLOBAL/mean": ("global", 100.0),
            "OWN/mean": ("personal", 100.0),
            "OWN/worst": ("worst tenth", 100.0),
            "OWN/variance": ("variance", 100.0**2),
        },
        NETWORKS,
    ),
    "fairness": Experiment(
        "Fair models",
        "Accuracy of the global model on the test samples of each client, after the same number of"
        " local steps: the mean over clients, over the worst tenth of them, and the variance.",
        FAIRNESS,
        {name: SKEWS[name] for name in ("Dir(0.1)", "Dir(0.5)")},
        None,
        {
            "server/mean": ("mean", 100.0),
            "server/worst": ("worst tenth", 100.0),
            "server/variance": ("variance", 100.0**2),
        },
        dict.fromkeys(DATA, ()),
    ),
}


def options(name: str, run: Case) -> list[str]:
    """Return the options of a run."""
    experiment = EXPERIMENTS[name]
    files = [f"--config={CONFIGS / file}.yaml" for file in (name, run.data)]
    given = [*experiment.given[run.data], *experiment.splits[run.split]]
    arm = experiment.arms[run.method]
    given += [each.replace("HEAD", HEAD[run.data]).replace("BODY", BODY[run.data]) for each in arm]
    if run.lr is not None:
        given.append(f"--federation.policy.init_args.lr={run.lr}")
    return [*files, f"--seed_everything={run.seed}", *given]


def folder(out: Path, name: str, run: Case) -> Path:
    """Return the folder of a run."""
    words = [run.method, run.split, *([] if run.lr is None else [f"lr {run.lr:g}"]), str(run.seed)]
    safe = ("".join(c if c.isalnum() or c == "." else "_" for c in word) for word in words)
    return out / name / run.data / "-".join(safe)


def tuning(name: str, data: str) -> Iterator[Case]:
    """Yield the runs from which learning rates are chosen."""
    experiment = EXPERIMENTS[name]
    if experiment.tuned_on is not None:
        for method, rate in product(experiment.arms, RATES):
            yield Case(data, method, experiment.tuned_on, TUNING_SEED, rate)


def tuned(name: str, data: str, out: Path) -> dict[str, float | None]:
    """Return the learning rate of each method; methods with missing runs are left out."""
    experiment = EXPERIMENTS[name]
    if experiment.tuned_on is None:
        return dict.fromkeys(experiment.arms)
    scores: dict[str, dict[float, float]] = {}
    for run in tuning(name, data):
        if result(folder(out, name, run)) is not None:
            found = [float(r["val_acc"]) for r in rows(folder(out, name, run)) if r["val_acc"]]
            scores.setdefault(run.method, {})[run.lr or 0.0] = mean(found[-3:])
    complete = {method: each for method, each in scores.items() if len(each) == len(RATES)}
    return {method: max(each, key=lambda lr: each[lr]) for method, each in complete.items()}


def cases(name: str, data: str, seeds: Sequence[int], out: Path) -> Iterator[Case]:
    """Yield the runs of a table whose learning rates are known."""
    experiment, rates = EXPERIMENTS[name], tuned(name, data, out)
    for seed, split_name, method in product(seeds, experiment.splits, experiment.arms):
        if method in rates:
            yield Case(data, method, split_name, seed, rates[method])


def named(column: str, method: str) -> str:
    """Return a column of the table of rounds for a method."""
    shared, own = MODELS.get(method, ("", ""))
    return column.replace("GLOBAL", shared).replace("OWN", own)


def figure(place: Path, column: str) -> float:
    """Return a figure of a run; NaN if it has none."""
    found = result(place) or {}
    if column in found:
        return float(found[column])
    if column == "MB":
        each = [
            (int(r["bytes_up"]) + int(r["bytes_down"])) / int(r["clients"]) for r in rows(place)
        ]
        return median(each) / 1e6
    return last(place, column)


def cells(
    name: str, data: str, method: str, splits: Sequence[str], seeds: Sequence[int], out: Path
) -> list[str]:
    """Return the figures of a method for a table over splits, then its time and traffic."""
    experiment, lr = EXPERIMENTS[name], tuned(name, data, out).get(method)
    found: list[str] = []
    done: list[Path] = []
    for each in splits:
        places = [folder(out, name, Case(data, method, each, seed, lr)) for seed in seeds]
        places = [place for place in places if result(place) is not None]
        for column, (_, scale) in experiment.columns.items():
            values = [figure(place, named(column, method)) for place in places]
            found.append(mean_and_spread(values, scale))
        done += places
    rate = [] if experiment.tuned_on is None else ["-" if lr is None else f"{lr:g}"]
    for column, how in (("seconds", ".0f"), ("MB", ".2g")):
        values = [figure(place, column) for place in done]
        rate.append(f"{median(values):{how}}" if values else "-")
    return [*found, *rate]


def section(name: str, data: str, seeds: Sequence[int], out: Path) -> str:
    """Return the tables of a data set: one over all splits, or one for each split.

    Methods without a run are left out.
    """
    experiment = EXPERIMENTS[name]
    end = [*(["lr"] if experiment.tuned_on is not None else []), "s", "MB"]
    is_wide = len(experiment.columns) == 1
    text = [f"## {DATA[data]}"]
    for group in [list(experiment.splits)] if is_wide else [[each] for each in experiment.splits]:
        head = group if is_wide else [heading for heading, _ in experiment.columns.values()]
        found = {m: cells(name, data, m, group, seeds, out) for m in experiment.arms}
        lines = [[method, *row] for method, row in found.items() if {*row} != {"-"}]
        text += [] if is_wide else [f"### {group[0].capitalize()}"]
        text.append(table(["", *head, *end], lines))
    return "\n\n".join(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, show what is there."""
    own, extra = apart(arguments)
    parser = shared_options(__doc__, "methods")
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--methods", nargs="+", help="run these methods only")
    args = parser.parse_args(own)
    name, experiment = args.experiment, EXPERIMENTS[args.experiment]
    if unknown := sorted(set(args.methods or ()) - experiment.arms.keys()):
        parser.error(f"unknown method {unknown[0]!r}: choose from {list(experiment.arms)}")
    if wrong := check_options(args.out, extra):
        parser.error(wrong)
    failed: list[str] = []
    for data in args.data:
        for wanted in (tuning(name, data), cases(name, data, args.seeds, args.out)):
            lines = [
                Run(folder(args.out, name, case), [*options(name, case), *extra])
                for case in wanted
                if case.method in (args.methods or experiment.arms)
            ]
            failed += fit_and_test_all(lines, args.jobs)
    text = [f"# {experiment.title}", experiment.text, machine_line(args.out)]
    text += [section(name, data, args.seeds, args.out) for data in args.data]
    publish("\n\n".join(text) + "\n", args.markdown, failed)


if __name__ == "__main__":
    main()
