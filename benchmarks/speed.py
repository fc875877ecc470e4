"""How fast a round is, and what a federation costs beyond the mathematics.

    python benchmarks/speed.py rounds --workloads W1 W2 W4 --json out.json --markdown out.md
    python benchmarks/speed.py growth
    python benchmarks/speed.py costs --repeats 7

``rounds`` compares the library with a bare PyTorch loop at the better of one and two threads.
Workloads: W1 and W2 are MLPs of 10 and 100 clients with 30 steps of 64 samples, W4 is 100 of 1,000
clients of 60 samples with 5 steps, W3 and W5 are the convolutional networks for CIFAR-10 and for
keywords, 10 clients with 10 and 5 steps. Workloads that others publish: ``blazefl`` (10 of 100
clients with 50 steps of 50 CIFAR-10 samples, a small CNN), ``pfl`` (50 of 1,000 clients with 5
steps of 10 CIFAR-10 samples) and ``femnist`` (10 of 3,400 clients with 5 steps of 20).
``--device cuda`` trains on a GPU. ``--peer`` adds other libraries, each by a script in ``peers``
and in an environment that ``peers/install.sh`` makes. ``--record`` adds the result to the records
from which ``records/README.md`` is generated.

``agreement`` compares results with those of the loop. ``growth`` measures rounds of 100 clients in
federations that grow, their memory and checkpoints; see ``growth.py``. ``costs`` tells apart what a
local step, a client switch and a round cost; see ``costs.py``.

Samples are synthetic, in memory; training is plain SGD. Contestants take turns, each turn in a
process of its own. Time is wall time, everything included: loader, callback, aggregation, table. A
turn's figure is the median of its rounds without the first (which compiles), the result is the
median of the turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.nn.utils import parameters_to_vector

import costs
import growth
import records
from contestants import (
    LR,
    WORKLOADS,
    Federation,
    Run,
    bare,
    fit_per_client,
    library,
    mlp_federation,
    peak,
    quiet,
    threads,
)
from runs import machine, table

#: Workloads that are measured where none is named.
USUAL = ("W1", "W2", "W4", "W3", "W5")


def turn(name: str, contestant: str, rounds: int, device: str) -> dict[str, Any]:
    """Let a contestant train in a process of its own; return what :func:`alone` writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, __file__, "rounds", "--device", device, "--alone"]
        command += [name, contestant, str(rounds), str(time.time()), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(f"{name}, {contestant} failed:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def alone(name: str, contestant: str, rounds: str, began: str, out: str, device: str) -> None:
    """Train in this process; write what :func:`records.figures` shows."""
    chosen, problem = contestants(device)[contestant], Federation(WORKLOADS[name], device)
    with threads(chosen.threads):
        seconds, parameters, _ = chosen.run(problem, int(rounds))
    first = time.time() - float(began) - sum(seconds[1:])
    if rank_zero_only.rank == 0:
        figures = {"seconds": seconds, "first": first, "MiB": peak()}
        figures["accuracy"] = problem.accuracy(parameters)
        Path(out).write_text(json.dumps(figures))


class Contestant(NamedTuple):
    """How a workload is trained: torch's threads and the function."""

    threads: int
    run: Callable[[Any, int], Run]


def _library(threads: int = 2, processes: int = 1, **options: Any) -> Contestant:
    def run(problem: Federation, rounds: int) -> Run:
        return library(problem, rounds, processes, **options)

    return Contestant(threads, run)


#: By name. With two processes each has one thread.
CONTESTANTS: dict[str, Contestant] = {
    "bare loop, 1 thread": Contestant(1, bare),
    "bare loop, 2 threads": Contestant(2, bare),
    "Trainer.fit per client": Contestant(2, fit_per_client),
    "library, plain module": _library(plain=True),
    "library, sequential": _library(),
    "vectorized, groups of 1": _library(group_size=1),
    "vectorized, groups of 10": _library(group_size=10, compile=False),
    "vectorized, groups of 10, compiled": _library(group_size=10, compile=True),
    "the same, 1 thread": _library(threads=1, group_size=10, compile=True),
    "vectorized, groups of 100, compiled": _library(group_size=100, compile=True),
    "2 processes, plain module": _library(processes=2, plain=True),
    "2 processes, sequential": _library(processes=2),
    "2 processes, vectorized, groups of 1": _library(processes=2, group_size=1),
    "2 processes, auto": _library(processes=2, group_size="auto"),
    "2 processes, auto, compiled": _library(processes=2, group_size="auto", compile=True),
    "2 processes, vectorized, groups of 10, compiled": _library(
        processes=2, group_size=10, compile=True
    ),
    "auto": _library(group_size="auto"),
    "auto, compiled": _library(group_size="auto", compile=True),
    "library, sequential, with matching": _library(matching=True),
    "vectorized, groups of 10, compiled, with matching": _library(
        matching=True, group_size=10, compile=True
    ),
}
#: One for each lever.
LEVERS = (
    "library, plain module",
    "vectorized, groups of 1",
    "vectorized, groups of 10",
    "vectorized, groups of 10, compiled",
    "auto",
    "auto, compiled",
)
#: What there is for a GPU beside.
ON_A_GPU: dict[str, Contestant] = {
    "bare loop": Contestant(2, bare),
    **{
        name: CONTESTANTS[name]
        for name in ("Trainer.fit per client", "library, sequential", "vectorized, groups of 1")
    },
    **{
        name: CONTESTANTS[name]
        for name in (
            "vectorized, groups of 10",
            "vectorized, groups of 10, compiled",
            "vectorized, groups of 100, compiled",
        )
    },
    "vectorized, groups of 1,000, compiled": _library(group_size=1000, compile=True),
    "auto": CONTESTANTS["auto"],
}


def contestants(device: str) -> dict[str, Contestant]:
    """Return what there is for a device."""
    return CONTESTANTS if device == "cpu" else ON_A_GPU


# --- other libraries ------------------------------------------------------------------------------

PEERS = ("flower", "fedjax", "drjax", "pfl", "blazefl", "fluke", "nvflare")


def environment(peer: str) -> Path:
    """Return the Python that a peer is installed in."""
    folder = os.environ.get("LIGHTNING_FL_PEERS", Path(__file__).parents[1] / ".peers")
    return Path(folder, peer, "bin", "python")


def turn_of_a_peer(name: str, peer: str, rounds: int, threads: int = 2) -> dict[str, Any]:
    """Let another library train, by a script in an environment of its own; NaN if it fails."""
    what = {k: v for k, v in WORKLOADS[name]._asdict().items() if k != "net"}
    what |= {"name": name, "rounds": rounds, "lr": LR, "threads": threads}
    script = Path(__file__).parent / "peers" / f"run_{peer}.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        command = [str(environment(peer)), str(script), json.dumps(what), str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if out.exists():  # some fail as they end
            found: dict[str, Any] = json.loads(out.read_text())
            return found
    print(f"{peer} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
    return {"seconds": [math.nan] * rounds}


def measure(
    names: Sequence[str], chosen: Sequence[str], peers: Sequence[str], repeats: int, device: str
) -> dict[str, Any]:
    """Let contestants and other libraries take turns.

    Returns:
        By workload: the work of a round, and by contestant the figures of its turns.
    """
    found: dict[str, Any] = {}
    for name in names:
        workload = WORKLOADS[name]
        turns: dict[str, list[dict[str, Any]]] = {each: [] for each in (*chosen, *peers)}
        for repeat in range(repeats):
            for each in turns:
                if each in peers:
                    one = turn_of_a_peer(name, each, workload.rounds)
                else:
                    one = turn(name, each, workload.rounds, device)
                turns[each].append(one)
                print(f"{name} {repeat + 1} {each}: {one['seconds'][-1]:.4f}", file=sys.stderr)
        work = {"steps": workload.cohort * workload.steps, "flops": Federation(workload).flops()}
        found[name] = work | {"turns": turns}
    return found


def agreement(
    names: Sequence[str], chosen: Sequence[str], clients: int | None = None
) -> dict[str, Any]:
    """Compare the parameters after a round with those of the bare loop.

    Dropout is off, since the library draws random numbers for each client and step, and the loop
    does not.

    Args:
        names: Of the workloads.
        chosen: The contestants.
        clients: That train; ``None``: as many as in a round of the workload.

    Returns:
        By workload and contestant, the largest difference in each precision, the largest one
        between single precision and the loop in double precision, and how far a round moves a
        parameter.
    """
    found: dict[str, Any] = {}
    for name in names:
        found[name], exact = {each: {} for each in chosen}, torch.empty(0)
        for dtype in (torch.float64, torch.float32):
            few = clients or WORKLOADS[name].cohort
            problem = Federation(WORKLOADS[name]._replace(clients=few, cohort=few), dtype=dtype)
            for module in problem.net.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            start = parameters_to_vector(problem.net.parameters()).detach()
            expected = bare(problem, 1).parameters
            exact = expected if dtype == torch.float64 else exact
            for each, result in found[name].items():
                with threads(CONTESTANTS[each].threads):
                    got = CONTESTANTS[each].run(problem, 1).parameters
                result[str(dtype).removeprefix("torch.")] = float((got - expected).abs().max())
                result["rounding"] = float((got.double() - exact).abs().max())
                result["moved"] = float((expected - start).abs().max())
    return found


def matmul_peak() -> float:
    """Return the floating-point operations per second of a product of large matrices."""
    a = torch.randn(2048, 2048)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / median(times[1:])


# --- commands -------------------------------------------------------------------------------------


def rounds_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Compare contestants on workloads."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA GPU here")
    if args.alone:
        alone(*args.alone, args.device)
        return {}
    known = contestants(args.device)
    if unknown := [name for name in args.contestants or [] if name not in known]:
        parser.error(f"no contestant {unknown[0]!r} on {args.device}, there are {list(known)}")
    chosen = args.contestants or list(known)
    if not any(c.startswith("bare") for c in chosen):
        parser.error("the bare loop is what the others are compared with: name it too")
    for peer in args.peer:
        if not environment(peer).exists():
            parser.error(
                f"{peer} is not installed in {environment(peer).parents[1]}: its script,"
                f" benchmarks/peers/run_{peer}.py, says how to make that environment"
            )
    with threads(2):
        outcome = records.header() | {"machine": machine(), "peak": matmul_peak()}
        outcome["workloads"] = measure(args.workloads, chosen, args.peer, args.repeats, args.device)
    if args.record:
        records.add(outcome)
    return publish(outcome, records.tables(outcome), args)


def agreement_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Compare results with the bare loop, in double and in single precision."""
    found = agreement(args.workloads, args.contestants, args.clients)
    rows = [
        [name, each, *(f"{one[what]:.1e}" for what in ("float64", "float32", "rounding", "moved"))]
        for name, results in found.items()
        for each, one in results.items()
    ]
    columns = ["float64", "float32", "float32 to the loop in float64", "moved in a round"]
    head = ["workload", "contestant", *columns]
    outcome = {"machine": machine(), "agreement": found}
    return publish(outcome, table(head, rows) + "\n", args)


def growth_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Measure federations that grow."""
    if args.grown:
        print(json.dumps(growth.grown(*args.grown[:2], bool(args.grown[2]))))
        return {}
    states = {"no": [False], "yes": [True], "both": [False, True]}[args.state]
    found = growth.measure(args.clients, states, args.rounds, args.repeats)
    outcome = {"machine": machine(), "rounds": args.rounds, "growth": found}
    return publish(outcome, table(list(growth.COLUMNS.values()), growth.rows(found)) + "\n", args)


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
    add("--record", action="store_true", help="add the result to records/README.md")
    add("--alone", nargs=5, help=argparse.SUPPRESS)
    add = command("agreement", agreement_command).add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=USUAL, help="what is trained")
    add("--contestants", nargs="+", choices=CONTESTANTS, default=LEVERS, help="who trains it")
    add("--clients", type=int, help="how many train; by default those of a round of the workload")
    numbers: dict[str, Any] = {"type": int, "nargs": "*"}
    add = command("growth", growth_command).add_argument
    add("--clients", **numbers, default=[100, 1000, 10_000, 100_000], help="sizes of federation")
    add("--rounds", type=int, default=50, help="rounds of a run")
    add("--state", choices=("no", "yes", "both"), default="both", help="whether clients keep state")
    add("--grown", type=int, nargs=3, help=argparse.SUPPRESS)
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
        "--memory-clients", **numbers, default=[10, 1000], help="sizes for peak memory; may be none"
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
