"""How fast a round is, and what a federation costs beyond the mathematics.

    python benchmarks/speed.py rounds --workloads W1 W2 W4 --json out.json --markdown out.md
    python benchmarks/speed.py growth
    python benchmarks/speed.py costs --repeats 7

``rounds`` compares the library with a bare PyTorch loop at the better of one and two threads.
Workloads: W1 and W2 are MLPs of 10 and 100 clients with 30 steps of 64 samples, W4 is 100 of 1,000
clients of 60 samples with 5 steps, W3 and W5 are the convolutional networks for CIFAR-10 and for
keywords, 10 clients with 10 and 5 steps. ``--device cuda`` trains on a GPU. ``--peer`` adds other
libraries, each by a script in ``peers`` that says how to make the environment that it runs in.
``growth`` measures rounds of 100 clients in federations that grow, and their memory. ``costs``
tells apart what a local step, a client switch and a round cost; see ``costs.py``.

Samples are synthetic, in memory; training is plain SGD. Contestants take turns. Time is wall time,
everything included: loader, callback, aggregation, table. A repeat's figure is the median of its
rounds without the first (which compiles), the result is the median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import costs
from contestants import (
    LR,
    WORKLOADS,
    Federation,
    Run,
    Workload,
    bare,
    fit_per_client,
    fresh,
    library,
    mlp,
    mlp_federation,
    peak,
    quiet,
    threads,
)
from runs import machine, table

#: Workloads that are measured where none is named.
USUAL = ("W1", "W2", "W4", "W3", "W5")


def elsewhere(name: str, contestant: str, rounds: int) -> list[float]:
    """Run a contestant of several processes as a script of its own; seconds of each round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        command = [sys.executable, __file__, "rounds", "--alone"]
        command += [name, contestant, str(rounds), str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return list(json.loads(out.read_text()))


def alone(name: str, contestant: str, rounds: str, out: str) -> None:
    """Be one of the processes of a contestant."""
    found = CONTESTANTS[contestant].run(Federation(WORKLOADS[name]), int(rounds)).seconds
    if rank_zero_only.rank == 0:
        Path(out).write_text(json.dumps(found))


class Contestant(NamedTuple):
    """How a workload is trained: torch's threads, the function, and how many processes it takes."""

    threads: int
    run: Callable[[Any, int], Run]
    processes: int = 1


def _library(threads: int = 2, processes: int = 1, **options: Any) -> Contestant:
    def run(problem: Federation, rounds: int) -> Run:
        return library(problem, rounds, processes, **options)

    return Contestant(threads, run, processes)


#: By name. With two processes each has one thread.
CONTESTANTS: dict[str, Contestant] = {
    "bare loop, 1 thread": Contestant(1, bare),
    "bare loop, 2 threads": Contestant(2, bare),
    "Trainer.fit per client": Contestant(2, fit_per_client),
    "library, sequential": _library(),
    "vectorized, groups of 1": _library(group_size=1),
    "vectorized, groups of 10": _library(group_size=10, compile=False, fast_matmul=False),
    "vectorized, groups of 10, compiled": _library(group_size=10, compile=True, fast_matmul=False),
    "vectorized, groups of 10, compiled, fast matmul": _library(group_size=10, compile=True),
    "the same, 1 thread": _library(threads=1, group_size=10, compile=True),
    "vectorized, groups of 100, compiled, fast matmul": _library(group_size=100, compile=True),
    "2 processes, sequential": _library(processes=2),
    "2 processes, vectorized, groups of 1": _library(processes=2, group_size=1),
    "2 processes, vectorized, groups of 10, compiled, fast matmul": _library(
        processes=2, group_size=10, compile=True
    ),
    "auto": _library(group_size="auto"),
    "library, sequential, with matching": _library(matching=True),
    "vectorized, groups of 10, compiled, fast matmul, with matching": _library(
        matching=True, group_size=10, compile=True
    ),
}
#: What there is for a GPU beside.
ON_A_GPU: dict[str, Contestant] = {
    "bare loop": Contestant(2, bare),
    **{
        name: CONTESTANTS[name]
        for name in ("Trainer.fit per client", "library, sequential", "vectorized, groups of 1")
    },
    "vectorized, groups of 10": _library(group_size=10, compile=False),
    "vectorized, groups of 10, compiled": _library(group_size=10, compile=True),
    "vectorized, groups of 100, compiled": _library(group_size=100, compile=True),
    "vectorized, groups of 1,000, compiled": _library(group_size=1000, compile=True),
    "auto": CONTESTANTS["auto"],
}

# --- other libraries ------------------------------------------------------------------------------

PEERS = ("flower", "fedjax", "pfl")


def environment(peer: str) -> Path:
    """Return the Python that a peer is installed in."""
    folder = os.environ.get("LIGHTNING_FL_PEERS", Path(__file__).parents[1] / ".peers")
    return Path(folder, peer, "bin", "python")


def of_a_peer(peer: str) -> Contestant:
    """Return a peer as a contestant: a script of its own, in an environment of its own."""

    def run(problem: Federation, rounds: int) -> Run:
        w = problem.workload
        what = {k: v for k, v in w._asdict().items() if k not in ("net", "classes")}
        what |= {"rounds": rounds, "lr": LR, "threads": torch.get_num_threads()}
        script = Path(__file__).parent / "peers" / f"run_{peer}.py"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "seconds.json")
            command = [str(environment(peer)), str(script), json.dumps(what), str(out)]
            done = subprocess.run(command, capture_output=True, text=True)
            if out.exists():  # some fail as they end
                return Run(json.loads(out.read_text()), torch.zeros(0))
        print(f"{peer} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return Run([math.nan] * rounds, torch.zeros(0))

    return Contestant(2, run)


def measure(
    names: Sequence[str],
    contestants: dict[str, Contestant],
    repeats: int,
    device: str = "cpu",
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Let the contestants take turns.

    Returns:
        Seconds a round, by workload and contestant; seconds of the longest first round.
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    first: dict[str, dict[str, float]] = {}
    for name in names:
        problem = Federation(WORKLOADS[name], device)
        seconds[name], first[name] = {c: [] for c in contestants}, dict.fromkeys(contestants, 0.0)
        for repeat in range(repeats):
            for contestant, (count, run, processes) in contestants.items():
                with threads(count):
                    if processes == 1:
                        found = run(problem, problem.workload.rounds).seconds
                    else:
                        found = elsewhere(name, contestant, problem.workload.rounds)
                seconds[name][contestant].append(median(found[1:]))
                first[name][contestant] = max(first[name][contestant], found[0])
                print(f"{name} {repeat + 1} {contestant}: {found[-1]:.4f}", file=sys.stderr)
    return seconds, first


# --- federations that grow ------------------------------------------------------------------------

GROWTH = Workload(100, 100, 5, 60, 60, (784,), mlp, 8)


def grown(clients: int, rounds: int = GROWTH.rounds) -> dict[str, float]:
    """Train rounds of 100 clients in this process, among so many.

    Returns:
        Seconds a round, and MiB at the peak beyond what the samples take.
    """
    cohort = min(clients, GROWTH.cohort)
    problem = Federation(GROWTH._replace(clients=clients, cohort=cohort))
    found = library(problem, rounds, group_size=10, compile=False).seconds
    return {"seconds": median(found[1:]), "MiB": peak() - problem.data.nbytes / 2**20}


def growth(numbers: Sequence[int], repeats: int) -> dict[int, dict[str, float]]:
    """Measure federations of these sizes in turns, each time in a fresh process."""
    found: dict[int, list[dict[str, float]]] = {n: [] for n in numbers}
    for _ in range(repeats):
        for n in numbers:
            found[n].append(json.loads(fresh(__file__, "growth", "--grown", str(n))))
    return {
        n: {what: median(one[what] for one in each) for what in each[0]}
        for n, each in found.items()
    }


def _median(times: Sequence[float]) -> float:
    """The median of the turns that did not fail."""
    return median([time for time in times if not math.isnan(time)] or [math.nan])


def markdown(seconds: dict[str, dict[str, list[float]]]) -> str:
    """Show seconds per round and the speedup over the faster bare loop, as a table."""
    names = list(seconds)
    rows = []
    for contestant in seconds[names[0]]:
        row = [contestant]
        for name in names:
            each = {c: _median(times) for c, times in seconds[name].items()}
            best = min(t for c, t in each.items() if c.startswith("bare"))
            row.append(f"{each[contestant]:.3f} ({best / each[contestant]:.2f})")
        rows.append(row)
    return table(["seconds per round (speedup over the faster bare loop)", *names], rows) + "\n"


# --- commands -------------------------------------------------------------------------------------


def rounds_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Compare contestants on workloads."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA GPU here")
    known = CONTESTANTS if args.device == "cpu" else ON_A_GPU
    if unknown := [name for name in args.contestants or [] if name not in known]:
        parser.error(f"no contestant {unknown[0]!r} on {args.device}, there are {list(known)}")
    contestants = {name: known[name] for name in args.contestants or known}
    if not any(c.startswith("bare") for c in contestants):
        parser.error("the bare loop is what the others are compared with: name it too")
    for peer in args.peer:
        if not environment(peer).exists():
            parser.error(
                f"{peer} is not installed in {environment(peer).parents[1]}: its script,"
                f" benchmarks/peers/run_{peer}.py, says how to make that environment"
            )
        contestants[peer] = of_a_peer(peer)
    if args.alone:
        alone(*args.alone)
        return {}
    seconds, first = measure(args.workloads, contestants, args.repeats, args.device)
    outcome = {"machine": machine(), "seconds": seconds, "first round": first}
    return publish(outcome, markdown(seconds), args)


def growth_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Measure federations that grow."""
    if args.grown:
        print(json.dumps(grown(args.grown)))
        return {}
    outcome = {"machine": machine(), "growth": growth(args.clients, args.repeats)}
    rows = [
        [f"{n:,}", f"{one['seconds']:.3f}", f"{one['MiB']:.0f}"]
        for n, one in outcome["growth"].items()
    ]
    head = ["clients", "seconds per round", "MiB without the samples"]
    return publish(outcome, table(head, rows) + "\n", args)


def costs_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Tell apart what a step, a client switch and a round cost; measure memory."""
    if args.peak_memory_of:
        print(costs.peak_memory(args.peak_memory_of))
        return {}
    points = [(clients, steps) for clients in args.grid for steps in args.grid]
    points += [(clients, args.steps) for clients in args.clients]
    with threads(args.threads):
        results = costs.measure(
            [mlp_federation(*point, args.samples, args.batch_size, args.sizes) for point in points],
            args.repeats,
            args.rounds,
        )
        used = machine()
    grid, sized = results[: len(args.grid) ** 2], results[len(args.grid) ** 2 :]
    names = ("sizes", "samples", "batch_size", "steps", "grid", "repeats")
    outcome = {
        "machine": used,
        "workload": {name: vars(args)[name] for name in names},
        "rounds": [r.to_dict() for r in sized],
        "grid": [r.to_dict() for r in grid],
        "costs": costs.fit_costs(grid),
        "memory": None,
    }
    if args.memory_clients:
        outcome["memory"] = costs.memory(__file__, args.memory_clients, args.memory_repeats)
    return publish(outcome, costs.markdown(outcome), args)


def publish(outcome: dict[str, Any], tables: str, args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, write the files that were asked for, return the outcome."""
    print(tables)
    if args.json:
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(tables)
    return outcome


def options() -> argparse.ArgumentParser:
    """Return the options of all commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[..., dict[str, Any]]) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        added.set_defaults(run=run, parser=added)
        added.add_argument("--repeats", type=int, default=5, help="turns of each contestant")
        added.add_argument("--json", type=Path, help="write all figures here")
        added.add_argument("--markdown", type=Path, help="write the tables here")
        return added

    add = command("rounds", rounds_command).add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=USUAL, help="what is trained")
    add("--contestants", nargs="+", metavar="NAME", help="by default all of them")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--peer", nargs="+", choices=PEERS, default=[], help="other libraries, too")
    add("--alone", nargs=4, help=argparse.SUPPRESS)
    numbers: dict[str, Any] = {"type": int, "nargs": "*"}
    add = command("growth", growth_command).add_argument
    add("--clients", **numbers, default=[10, 100, 1000, 10_000], help="sizes of federation")
    add("--grown", type=int, help=argparse.SUPPRESS)
    add = command("costs", costs_command).add_argument
    add("--clients", **numbers, default=[10, 100, 1000], help="sizes of federation; may be none")
    add("--grid", **numbers, default=costs.GRID, help="clients and steps of the fit")
    add("--steps", type=int, default=5, help="local steps of a client a round")
    add("--samples", type=int, default=64, help="samples of a client")
    add("--batch-size", type=int, default=32, help="samples a step")
    add("--sizes", **numbers, default=[784, 100, 100, 10], help="network's widths")
    add("--rounds", type=int, default=3, help="timed rounds a run; fewer if long")
    add("--threads", type=int, default=1, help="torch threads")
    add(
        "--memory-clients",
        **numbers,
        default=[10, 1000],
        help="sizes for peak memory; may be none",
    )
    add("--memory-repeats", type=int, default=3, help="processes for each of them")
    add("--peak-memory-of", type=int, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables, write the files that were asked for."""
    args = options().parse_args(arguments)
    with quiet():
        return dict(args.run(args.parser, args))


if __name__ == "__main__":
    main()
