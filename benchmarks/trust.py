"""Faults, attacks and privacy on MNIST: tables and pictures.

An arm is run for each seed, in a folder of its own. What is there already is not run again, and
what was cut short goes on.

    python benchmarks/trust.py --markdown tables.md -- --data.init_args.root=data
    python benchmarks/trust.py --parts privacy --seeds 1 -- --data.init_args.root=data

What follows ``--`` goes to ``fit`` and ``test`` of every arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from runs import (
    Arms,
    Run,
    apart,
    callback,
    check_options,
    fit_and_test_all,
    last,
    machine_line,
    mean_and_spread,
    publish,
    result,
    rows,
    rule,
    shared_options,
    table,
)

CONFIGS = Path(__file__).parents[1] / "configs"
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4)

#: Server rules, each told what it has to stand: 8 of 20 clients.
RULES: Arms = {
    "FedAvg": rule("FedAvg"),
    "NormClipping": rule("NormClipping", max_norm=0.5),
    "CoordinateMedian": rule("CoordinateMedian"),
    "TrimmedMean": rule("TrimmedMean", fraction=0.4),
    "GeometricMedian": rule("GeometricMedian"),
    "Krum": rule("Krum", attackers=8),
    "Multi-Krum": rule("Krum", attackers=8, keep=11),
}
ATTACKS: dict[str, Callable[[float], tuple[str, ...]]] = {
    "sign flip, 4 times": lambda f: callback("ClientAttack", clients=f, boost=4.0),
    "noise, 10 times": lambda f: callback("ClientAttack", clients=f, kind="noise", boost=10.0),
    "label flip": lambda f: callback("LabelFlip", clients=f),
    "backdoor, 5 times": lambda f: callback("Backdoor", clients=f, boost=5.0),
}
#: An eighth of the clients for each way to fail, and slow ones beside.
FAILING = {"dropout": 0.125, "crash": 0.125, "nan": 0.125, "blowup": 0.125}
CLOCK = {"straggler": 0.1, "speed_sigma": 0.5, "step_seconds": 0.05, "bandwidth": 1e6}
LONG = "--trainer.max_epochs=200"
FAULTS = {
    f"{name}, {what}": (*callback("ClientFaults", **faults), *RULES[name], LONG)
    for what, faults in (
        ("no faults", CLOCK),
        ("half of the clients fail", {**FAILING, **CLOCK}),
        ("half of the clients fail, deadline 3 s", {**FAILING, **CLOCK, "deadline": 3.0}),
    )
    for name in ("FedAvg", "CoordinateMedian", "NormClipping")
}
PRIVACY = {
    "FedAvg": rule("FedAvg", weighting="uniform"),
    "clipped at 0.5, no noise": rule("DPFedAvg", noise_multiplier=0.0, clip_norm=0.5),
    "z = 0.67": rule("DPFedAvg", noise_multiplier=0.67, clip_norm=0.5),
    "z = 1": rule("DPFedAvg", noise_multiplier=1.0, clip_norm=0.5),
    "z = 2": rule("DPFedAvg", noise_multiplier=2.0, clip_norm=0.5),
    "z = 1, clipping at the median norm": rule(
        "DPFedAvg", noise_multiplier=1.0, clip_norm=0.5, quantile=0.5
    ),
    "z = 1, fixed cohorts of 100 clients": (
        *rule("DPFedAvg", noise_multiplier=1.0, clip_norm=0.5),
        "--federation.sampler=UniformSampler",
    ),
}


def attack_arm(attack: str, name: str, fraction: float) -> tuple[str, str, float]:
    """Return which run a cell shows: without attackers one stands for all that measure alike."""
    if fraction == 0 and not attack.startswith("backdoor"):
        attack = next(iter(ATTACKS))
    return attack, name, fraction


def attack_arms() -> dict[tuple[str, str, float], tuple[str, ...]]:
    """Return options by attack, rule and fraction."""
    return {
        attack_arm(attack, name, fraction): (*ATTACKS[attack](fraction), *RULES[name])
        for attack, name, fraction in product(ATTACKS, RULES, FRACTIONS)
    }


def folder(out: Path, part: str, arm: Any, seed: int) -> Path:
    """Return where an arm's runs lie."""
    words = " ".join(map(str, arm)) if isinstance(arm, tuple) else arm
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in words)
    return out / part / f"{name}-{seed}"


#: Of each part the config and its arms.
PARTS: dict[str, tuple[str, dict[Any, tuple[str, ...]]]] = {
    "faults": ("robust_mnist", dict(FAULTS)),
    "attacks": ("robust_mnist", dict(attack_arms())),
    "privacy": ("dp_mnist", dict(PRIVACY)),
}


def options(part: str, arm: Any, seed: int) -> list[str]:
    """Return what ``lightning-fl`` is told."""
    config, arms = PARTS[part]
    path = CONFIGS / f"{config}.yaml"
    return [f"--config={path}", f"--seed_everything={seed}", *arms[arm]]


def total(run: Path, column: str) -> float:
    """Return the sum of a column of the table of rounds."""
    return sum(float(row[column]) for row in rows(run))


def ended(out: Path, part: str, arm: Any, seeds: Sequence[int]) -> list[Path]:
    """Return the folders of runs that have ended."""
    return [p for s in seeds if result(p := folder(out, part, arm, s))]


def accuracies(places: Sequence[Path]) -> list[float]:
    """Return test accuracies."""
    return [found["test_acc"] for place in places if (found := result(place))]


def attack_tables(out: Path, seeds: Sequence[int]) -> str:
    """Return a table an attack: rules by fractions; of backdoors how often they work, too."""
    text = []
    for attack in ATTACKS:
        lines = []
        for name in RULES:
            cells = [name]
            for fraction in FRACTIONS:
                places = ended(out, "attacks", attack_arm(attack, name, fraction), seeds)
                cell = mean_and_spread(accuracies(places))
                doors = mean_and_spread([last(place, "backdoor_acc") for place in places])
                cells.append(cell if doors == "-" else f"{cell} / {doors}")
            lines.append(cells)
        head = ["rule", *(f"{100 * f:.0f} %" for f in FRACTIONS)]
        text.append(f"**{attack}**\n\n{table(head, lines)}")
    return "\n\n".join(text)


def fault_table(out: Path, seeds: Sequence[int]) -> str:
    """Return what faults cost."""
    lines = []
    for arm in FAULTS:
        places = ended(out, "faults", arm, seeds)
        lost = [total(p, "dropped") / total(p, "clients") for p in places]
        times = [last(p, "virtual_time") for p in places]
        reached = [
            float(row["virtual_time"])
            for p in places
            if (row := next((r for r in rows(p) if float(r["val_acc"]) >= 0.9), None))
        ]
        lines.append(
            [
                arm,
                mean_and_spread(accuracies(places)),
                mean_and_spread(lost) + " %",
                mean_and_spread(times, 1, 0),
                mean_and_spread(reached, 1, 0),
            ]
        )
    head = ["", "test_acc", "dropped updates", "virtual seconds", "virtual seconds to val_acc 0.9"]
    return table(head, lines)


def privacy_table(out: Path, seeds: Sequence[int]) -> str:
    """Return what privacy costs."""
    lines = []
    for arm in PRIVACY:
        places = ended(out, "privacy", arm, seeds)
        spent = mean_and_spread([last(p, "epsilon") for p in places[:1]], 1, 2)
        norms = mean_and_spread([last(p, "clip_norm") for p in places], 1, 2)
        lines.append([arm, spent, mean_and_spread(accuracies(places)), norms])
    return table(["", "epsilon", "test_acc", "final clipping norm"], lines)


def time_picture(out: Path, seed: int, path: Path) -> None:
    """Draw accuracy over virtual time."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for arm in FAULTS:
        for place in ended(out, "faults", arm, [seed]):
            found = [(float(r["virtual_time"]), float(r["val_acc"])) for r in rows(place)]
            axes.plot(*zip(*found, strict=True), label=arm)
    axes.set(xlabel="virtual seconds", ylabel="val_acc", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, show what is there."""
    own, extra = apart(arguments)
    parser = shared_options(__doc__, "trust")
    parser.set_defaults(seeds=[1])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args(own)
    if wrong := check_options(args.out, extra):
        parser.error(wrong)
    failed: list[str] = []
    if not args.show:
        wanted = (
            Run(folder(args.out, part, arm, seed), [*options(part, arm, seed), *extra])
            for part in args.parts
            for arm, seed in product(PARTS[part][1], args.seeds)
        )
        failed = fit_and_test_all(wanted, args.jobs)
    tables = {"faults": fault_table, "attacks": attack_tables, "privacy": privacy_table}
    text = [machine_line(args.out)]
    text += [f"## {part}\n\n{tables[part](args.out, args.seeds)}" for part in args.parts]
    if args.markdown and "faults" in args.parts:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        png = args.markdown.with_name(f"{args.markdown.stem}-faults.png")
        time_picture(args.out, args.seeds[0], png)
    publish("\n\n".join(text) + "\n", args.markdown, failed)


if __name__ == "__main__":
    main()
