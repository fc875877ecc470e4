"""What a federation costs beyond the mathematics: per step, client switch and round; memory.

A run's first round warms up and is not counted, except with more than 200 clients, where a run is
one round. The costs come from rounds of 1 to 20 clients with 1 to 20 steps: the time beyond the
bare loop is fitted by least squares to ``step * clients * steps + client * clients + round``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from contestants import (
    MOST_FITS,
    SEED,
    Federation,
    Run,
    bare,
    fit_per_client,
    fresh,
    library,
    lightning_alone,
    mlp_federation,
    peak,
)
from lightning_fl.models import MLPClassifier
from runs import table

#: Clients, and steps of each, that tell the costs of a step, a client and a round apart.
GRID = (1, 5, 20)

CONTESTANTS: dict[str, Callable[[Federation, int], Run]] = {
    "bare": bare,
    "fit per client": fit_per_client,
    "library": library,
    "library, plain module": partial(library, plain=True),
    "Lightning alone": lightning_alone,
}
#: Those that do the same mathematics as the bare loop.
FEDERATIONS = ("fit per client", "library", "library, plain module")
#: Whose time is fitted, and beyond whose; None is all of its time.
COSTS: dict[str, tuple[str, str | None]] = {
    "bare": ("bare", None),
    "fit per client": ("fit per client", "bare"),
    "library": ("library", "bare"),
    "library, plain module": ("library, plain module", "bare"),
    "Lightning alone": ("Lightning alone", "bare"),
    "FederatedLoop": ("library, plain module", "Lightning alone"),
}


class Result:
    """What was measured on a problem, one figure a repeat.

    Args:
        problem: What was trained.
        rounds: Rounds of a run, the first of several is not counted.
    """

    def __init__(self, problem: Federation, rounds: int) -> None:
        self.clients, self.steps, self.rounds = problem.clients, problem.steps, rounds
        self.seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        self.setup: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        #: Largest difference of a parameter to the bare loop's.
        self.difference: dict[str, float] = {}

    def ratio(self, name: str, to: str) -> float | None:
        """Return how many times longer one took than another, None where one did not run."""
        pairs = zip(self.seconds[name], self.seconds[to], strict=False)
        ratios = [a / b for a, b in pairs]
        return median(ratios) if ratios else None

    def extra(self, name: str, beyond: str | None) -> np.ndarray:
        """Return the seconds of a round beyond another contestant's, ``[repeats]``."""
        seconds = np.array(self.seconds[name])
        return seconds if beyond is None else seconds - np.array(self.seconds[beyond])

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, medians over repeats."""
        return {
            "clients": self.clients,
            "steps": self.steps,
            "rounds": self.rounds,
            "seconds": {name: median(s) for name, s in self.seconds.items() if s},
            "ratio": {name: self.ratio(name, "bare") for name, s in self.seconds.items() if s},
            "fit_per_client_to_library": self.ratio("fit per client", "library"),
            "setup_seconds": {name: median(s) for name, s in self.setup.items() if any(s)},
            "all_seconds": self.seconds,
            "difference": self.difference,
        }


def measure(problems: Sequence[Federation], repeats: int, rounds: int) -> list[Result]:
    """Let the contestants take turns on each problem, repeat after repeat.

    Args:
        problems: What to train.
        repeats: How often.
        rounds: Timed rounds of a run; more where they are short, fewer from 100 clients on.
    """
    results = []
    for p in problems:
        timed = min(rounds, 200 // p.clients)
        results.append(Result(p, 1 + max(timed, 25 * rounds // (p.clients * p.steps))))
    for repeat in range(repeats):
        for problem, result in zip(problems, results, strict=True):
            print(
                f"repeat {repeat + 1}: {problem.clients} clients, {problem.steps} steps",
                file=sys.stderr,
            )
            _take_turns(problem, result, repeat)
    return results


def _take_turns(problem: Federation, result: Result, repeat: int) -> None:
    names = [n for n in CONTESTANTS if n != "Lightning alone" or problem.clients <= MOST_FITS]
    turn = repeat % len(names)  # Nobody always goes first.
    runs = {}
    for name in names[turn:] + names[:turn]:
        runs[name] = run = CONTESTANTS[name](problem, result.rounds)
        result.seconds[name].append(median(run.seconds[1:] or run.seconds))
        result.setup[name].append(run.setup)
    if repeat:
        return
    for name in FEDERATIONS:
        expected = runs["bare"]
        if name == "fit per client" and problem.clients > MOST_FITS:
            expected = bare(problem, result.rounds, MOST_FITS)
        difference = (runs[name].parameters - expected.parameters).abs().max()
        result.difference[name] = float(difference)


def fit_costs(grid: Sequence[Result]) -> dict[str, dict[str, list[float]]]:
    """Tell apart what a step, a client and a round cost, by least squares over the grid.

    What is fitted are medians over the repeats. Errors are taken as relative to the contestant's
    time: a point counts by its inverse.

    Returns:
        For each row of :data:`COSTS` microseconds a ``step``, ``client`` and ``round``: the
        estimate, and the 5th and 95th percentile of 1,000 estimates from resampled repeats.
    """
    factors = np.array([(r.clients * r.steps, r.clients, 1) for r in grid], dtype=float)
    repeats = len(grid[0].seconds["bare"])
    draws = np.random.default_rng(SEED).integers(repeats, size=(1000, repeats))
    costs = {}
    for row, (name, beyond) in COSTS.items():
        extra = np.stack([r.extra(name, beyond) for r in grid]) * 1e6
        scale = 1 / np.array([median(r.seconds[name]) for r in grid])[:, None]
        solve = np.linalg.pinv(factors * scale)
        estimate = solve @ (np.median(extra, axis=1, keepdims=True) * scale)
        resampled = solve @ (np.median(extra[:, draws], axis=2) * scale)
        figures = np.hstack([estimate, np.percentile(resampled, (5, 95), axis=1).T])
        costs[row] = dict(zip(("step", "client", "round"), figures.tolist(), strict=True))
    return costs


# --- memory ---------------------------------------------------------------------------------------

MEMORY_SIZES = (64, 950, 950, 10)
MEMORY_SAMPLES = 4000


def peak_memory(clients: int) -> float:
    """Train two rounds of the library in this process; return its peak memory in MiB.

    The samples are the same ones however many clients share them, a client makes one step: what
    grows is what the library keeps of clients.
    """
    library(mlp_federation(clients, 1, MEMORY_SAMPLES // clients, 4, MEMORY_SIZES), 2)
    return peak()


def memory(script: str, clients: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure peak memory for each number of clients, each time in a fresh process.

    Args:
        script: What to run in it.
        clients: Numbers of clients.
        repeats: Processes for each of them.
    """
    peaks: dict[int, list[float]] = {n: [] for n in clients}
    for _ in range(repeats):
        for n in clients:
            print(f"peak memory of {n} clients", file=sys.stderr)
            peaks[n].append(float(fresh(script, "costs", "--peak-memory-of", str(n))))
    parameters = sum(p.numel() for p in MLPClassifier(MEMORY_SIZES).parameters())
    model = parameters * 4 / 2**20
    growth = median(peaks[clients[-1]]) - median(peaks[clients[0]])
    return {
        "sizes": list(MEMORY_SIZES),
        "parameters": parameters,
        "model_mib": model,
        "peak_mib": {str(n): median(p) for n, p in peaks.items()},
        "all_peak_mib": {str(n): p for n, p in peaks.items()},
        "growth_mib": growth,
        "growth_models": growth / model,
    }


# --- tables ---------------------------------------------------------------------------------------


def _cost(figures: Sequence[float]) -> str:
    estimate, low, high = (f"{f:,.0f}" for f in figures)
    return f"{estimate} ({low} to {high})"


def markdown(outcome: dict[str, Any]) -> str:
    """Show the outcome as tables."""
    m, w = outcome["machine"], outcome["workload"]
    text = [
        f"{m['cpus']} CPU cores, {'GPU not used' if m['gpu'] else 'no GPU'}, torch threads:"
        f" {m['threads']};"
        f" torch {m['torch']}, lightning {m['lightning']}, Python {m['python']}. Network"
        f" {'-'.join(map(str, w['sizes']))}, {w['samples']} samples a client in memory, batches of"
        f" {w['batch_size']}, SGD, everyone takes part. Medians of {w['repeats']} repeats.",
        *_rounds(outcome),
        *_costs(outcome),
    ]
    if outcome["rounds"]:
        differences = {
            name: max(r["difference"][name] for r in outcome["rounds"]) for name in FEDERATIONS
        }
        listed = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
        text.append(f"Largest difference of a final parameter to the bare loop's: {listed}.")
    return "\n\n".join([*text, *_memory(outcome["memory"])]) + "\n"


def _extra(r: dict[str, Any]) -> float:
    """Return the seconds of a round of the library beyond the bare loop's."""
    return float(r["seconds"]["library"] - r["seconds"]["bare"])


def _rounds(outcome: dict[str, Any]) -> list[str]:
    """Show seconds per round for several numbers of clients."""
    if not outcome["rounds"]:
        return []
    rows = []
    for r in outcome["rounds"]:
        n = r["clients"]
        times = [f"{r['seconds'][name]:.3f}" for name in ("bare", *FEDERATIONS)]
        times[1] += " *" * (n > MOST_FITS)
        rows.append(
            [
                f"{n:,}",
                *times,
                f"{r['ratio']['library']:.1f}",
                f"{r['fit_per_client_to_library']:.1f}",
                f"{_extra(r) / n / r['steps'] * 1e6:,.0f}",
                f"{r['setup_seconds']['library'] * 1e3:,.0f}",
            ]
        )
    head = ["clients", "bare loop", "`Trainer.fit` per client", "library", "library, plain module"]
    head += ["library / bare loop", "fit per client / library"]
    head += ["library's extra a step, all in, us", "library's set-up, ms"]
    steps = outcome["workload"]["steps"]
    text = [f"Seconds a round of {steps} steps a client:", table(head, rows)]
    if any(r["clients"] > MOST_FITS for r in outcome["rounds"]):
        text.append(f"\\* measured on {MOST_FITS} of the clients and scaled up.")
    return text


def _costs(outcome: dict[str, Any]) -> list[str]:
    """Show the fitted costs, and how they agree with rounds as measured."""
    costs = outcome["costs"]
    names = {
        "bare": "bare loop, all of its time",
        "fit per client": "`Trainer.fit` per client, beyond the bare loop",
        "library": "library, beyond the bare loop",
        "library, plain module": "library with a plain module, beyond the bare loop",
        "Lightning alone": "Lightning without the library, beyond the bare loop",
        "FederatedLoop": "the callback: library with a plain module, beyond Lightning alone",
    }
    kinds = ("step", "client", "round")
    rows = [[name, *(_cost(costs[key][kind]) for kind in kinds)] for key, name in names.items()]
    head = ["microseconds (90 % interval over the repeats)", "a local step"]
    head += ["a client switch", "a round"]
    grid = ", ".join(map(str, outcome["workload"]["grid"]))
    text = [f"Least squares over rounds of {grid} clients and as many steps:", table(head, rows)]
    step, client, round = (costs["library"][kind][0] for kind in kinds)
    fitted = []
    for r in outcome["rounds"]:
        by_fit = ((step * r["steps"] + client) * r["clients"] + round) * 1e-6
        fitted.append(f"{r['clients']:,} clients {_extra(r) * 1e3:,.0f} ms ({by_fit * 1e3:,.0f})")
    if fitted:
        text.append(
            f"The library's extra a round as measured (and by the fit): {', '.join(fitted)}."
        )
    return text


def _memory(memory: dict[str, Any] | None) -> list[str]:
    """Show peak memory by number of clients."""
    if memory is None:
        return []
    rows = [
        [f"{int(n):,}", f"{peak:.1f}", f"{min(each):.1f} to {max(each):.1f}"]
        for (n, peak), each in zip(
            memory["peak_mib"].items(), memory["all_peak_mib"].values(), strict=True
        )
    ]
    return [
        f"Peak memory with a model of {memory['parameters']:,} parameters"
        f" ({memory['model_mib']:.1f} MiB), in fresh processes:",
        table(["clients", "peak, MiB", "lowest to highest"], rows),
        f"Growth: {memory['growth_mib']:.1f} MiB, {memory['growth_models']:.2f} models.",
    ]
