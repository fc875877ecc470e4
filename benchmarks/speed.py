"""How fast a round is, against a bare PyTorch loop at the better of one and two threads.

Workloads: W1 and W2 are MLPs of 10 and 100 clients with 30 steps of 64 samples, W4 is 100 of 1,000
clients of 60 samples with 5 steps, W3 and W5 are the convolutional networks for CIFAR-10 and for
keywords, 10 clients with 10 and 5 steps. Samples are synthetic, in memory, plain SGD.

Contestants take turns, everything included: loader, callback, aggregation, table. A repeat's figure
is the median of its rounds without the first (which compiles), the result that of the repeats.
The library's runs are the first rounds of a long federation: what ``auto`` chooses depends on it.

With ``--growth`` it measures rounds of 100 clients in federations that grow, and their memory; with
``--switch`` what it takes to go from one client to the next; with ``--device cuda`` the same on a
GPU; with ``--peer`` other libraries, each by a script in ``peers`` that says how to make the
environment that it runs in.

    python benchmarks/speed.py --workloads W1 W2 W4 --json out.json --markdown out.md
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from lightning_fl import ClientModule, Lanes
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.models import CifarCNN, KeywordCNN, MLPClassifier
from lightning_fl.objectives import RepresentationMatching
from lightning_fl.policies import Schedule
from overhead import (
    GRID,
    LR,
    SEED,
    Clock,
    Problem,
    Run,
    _cost,
    _quiet,
    _table,
    bare,
    fit_costs,
    fit_per_client,
    fresh,
    machine,
    peak,
    publish,
    trainer,
)
from overhead import measure as measure_costs

#: Rounds of the federation that the library believes in.
LONG = 2000


class Workload(NamedTuple):
    """What is trained.

    Args:
        clients: In the federation.
        cohort: In a round.
        steps: Local steps of each.
        samples: Of each.
        batch_size: Samples a step.
        shape: Of a sample.
        net: Makes the network.
        rounds: Rounds of a run, the first of which is not counted.
    """

    clients: int
    cohort: int
    steps: int
    samples: int
    batch_size: int
    shape: tuple[int, ...]
    net: Callable[[], nn.Module]
    rounds: int


def mlp() -> nn.Module:
    """784-100-100-10, 89,610 parameters."""
    return MLPClassifier([784, 100, 100, 10])


WORKLOADS = {
    "W1": Workload(10, 10, 30, 640, 64, (784,), mlp, 8),
    "W2": Workload(100, 100, 30, 640, 64, (784,), mlp, 3),
    "W4": Workload(1000, 100, 5, 60, 60, (784,), mlp, 8),
    "W3": Workload(10, 10, 10, 640, 64, (3, 32, 32), CifarCNN, 2),
    "W5": Workload(10, 10, 5, 320, 64, (1, 32, 32), KeywordCNN, 2),
    # W1 with 1,000 clients, for a GPU: 2 GiB of samples.
    "W1000": Workload(1000, 1000, 30, 640, 64, (784,), mlp, 3),
}
#: Those that are measured where none is named.
USUAL = ("W1", "W2", "W4", "W3", "W5")


class Federation(Problem):
    """A workload's samples and network."""

    def __init__(self, workload: Workload, device: str = "cpu") -> None:
        self.workload, self.device = workload, torch.device(device)
        w = workload
        # The bare loop and the Trainers take the first clients: which does not matter for time.
        self.clients, self.steps, self.batch_size = w.cohort, w.steps, w.batch_size
        random = torch.Generator().manual_seed(SEED)
        n = w.clients * w.samples
        x = torch.randn(n, *w.shape, generator=random)
        self.data = InMemory(x, torch.randint(10, (n,), generator=random))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.net = w.net()
        split = self.federated()
        split.setup("fit")
        self.parts = split.parts

    def federated(self) -> FederatedDataModule:
        """Return the samples as the library takes them."""
        w = self.workload
        return FederatedDataModule(
            self.data, num_clients=w.clients, batch_size=w.batch_size, val_size=0, seed=SEED
        )


class Stop(Callback):
    """Ends a long federation after a few rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the fit after the last of the rounds."""
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


def library(
    problem: Federation, rounds: int, processes: int = 1, matching: bool = False, **lanes: Any
) -> Run:
    """Train with the library; in lanes, where options of theirs are given."""
    net = copy.deepcopy(problem.net)
    terms = [RepresentationMatching(0.1, reduction="mean")] if matching else ()
    module: Any = ClientModule(net, terms, lambda params: torch.optim.SGD(params, lr=LR))
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        loop = FederatedLoop(problem.clients, policy=Schedule(num_steps=problem.steps), seed=SEED)
        strategy = "auto" if processes == 1 else "client_parallel"
        trainer(
            LONG,
            folder,
            *(loop, clock, Stop(rounds)),
            accelerator=problem.device.type,
            devices=processes,
            strategy=strategy,
        ).fit(Lanes(module, **lanes) if lanes else module, datamodule=problem.federated())
    return clock.run(net)


def elsewhere(name: str, contestant: str, rounds: int) -> list[float]:
    """Run a contestant of several processes as a script of its own; seconds of each round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seconds.json")
        command = [sys.executable, __file__, "--alone", name, contestant, str(rounds), str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return list(json.loads(out.read_text()))


def alone(name: str, contestant: str, rounds: str, out: str) -> None:
    """Be one of the processes of a contestant."""
    found = CONTESTANTS[contestant].run(Federation(WORKLOADS[name]), int(rounds)).seconds
    if rank_zero_only.rank == 0:
        Path(out).write_text(json.dumps(found))


@contextmanager
def threads(count: int) -> Any:
    """Set torch's threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    "library, one client at a time": _library(),
    "1 lane": _library(lanes=1),
    "10 lanes": _library(lanes=10, compile=False, fast_matmul=False),
    "10 lanes, compiled": _library(lanes=10, compile=True, fast_matmul=False),
    "10 lanes, compiled, fast matmul": _library(lanes=10, compile=True),
    "the same, 1 thread": _library(threads=1, lanes=10, compile=True),
    "100 lanes, compiled, fast matmul": _library(lanes=100, compile=True),
    "2 processes, one client at a time": _library(processes=2),
    "2 processes, 1 lane": _library(processes=2, lanes=1),
    "2 processes, 10 lanes, compiled, fast matmul": _library(processes=2, lanes=10, compile=True),
    "auto": _library(lanes="auto"),
    "library, one client at a time, with matching": _library(matching=True),
    "10 lanes, compiled, fast matmul, with matching": _library(
        matching=True, lanes=10, compile=True
    ),
}
#: What there is for a GPU beside.
ON_A_GPU: dict[str, Contestant] = {
    "bare loop": Contestant(2, bare),
    **{
        name: CONTESTANTS[name]
        for name in ("Trainer.fit per client", "library, one client at a time", "1 lane")
    },
    "10 lanes": _library(lanes=10, compile=False),
    "10 lanes, compiled": _library(lanes=10, compile=True),
    "100 lanes, compiled": _library(lanes=100, compile=True),
    "1,000 lanes, compiled": _library(lanes=1000, compile=True),
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
        what = {k: v for k, v in w._asdict().items() if k != "net"}
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
    found = library(problem, rounds, lanes=10, compile=False).seconds
    return {"seconds": median(found[1:]), "MiB": peak() - problem.data.bytes / 2**20}


def growth(numbers: Sequence[int], repeats: int) -> dict[int, dict[str, float]]:
    """Measure federations of these sizes in turns, each time in a fresh process."""
    found: dict[int, list[dict[str, float]]] = {n: [] for n in numbers}
    for _ in range(repeats):
        for n in numbers:
            found[n].append(json.loads(fresh(__file__, "--grown", str(n))))
    return {
        n: {what: median(one[what] for one in each) for what in each[0]}
        for n, each in found.items()
    }


def switch(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Measure what a step, a client and a round take, in microseconds, as ``overhead.py`` does."""
    sizes = [784, 100, 100, 10]
    grid = [Problem(clients, steps, 64, 32, sizes) for clients in GRID for steps in GRID]
    return fit_costs(measure_costs(grid, repeats, rounds=3))


def _median(times: Sequence[float]) -> float:
    """The median of the turns that did not fail."""
    return median([time for time in times if not math.isnan(time)] or [math.nan])


def markdown(seconds: dict[str, dict[str, list[float]]]) -> str:
    """Show seconds a round, and how many times faster than the better bare loop, as a table."""
    names = list(seconds)
    rows = []
    for contestant in seconds[names[0]]:
        row = [contestant]
        for name in names:
            each = {c: _median(times) for c, times in seconds[name].items()}
            best = min(t for c, t in each.items() if c.startswith("bare"))
            row.append(f"{each[contestant]:.3f} ({best / each[contestant]:.2f})")
        rows.append(row)
    return _table(["seconds a round (times the better bare loop)", *names], rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, write the files that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(USUAL))
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="default: all of them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=[], help="other libraries, too")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant")
    parser.add_argument(
        "--growth",
        nargs="*",
        type=int,
        help="clients of federations that grow; without: 10 to 10^4",
    )
    parser.add_argument("--switch", action="store_true", help="time from client to client, too")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--grown", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
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
    if args.growth == []:
        args.growth = [10, 100, 1000, 10_000]
    with _quiet(torch.get_num_threads()):
        if args.alone:
            alone(*args.alone)
            return {}
        if args.grown:
            print(json.dumps(grown(args.grown)))
            return {}
        seconds, first = measure(args.workloads, contestants, args.repeats, args.device)
        outcome = {"machine": machine(), "seconds": seconds, "first round": first}
        if args.growth:
            outcome["growth"] = growth(args.growth, args.repeats)
        if args.switch:
            outcome["costs"] = switch(args.repeats)
    table = ""
    if args.workloads:
        table += markdown(seconds)
    if args.growth:
        rows = [
            [f"{n:,}", f"{one['seconds']:.3f}", f"{one['MiB']:.0f}"]
            for n, one in outcome["growth"].items()
        ]
        table += (
            "\n" + _table(["clients", "seconds a round", "MiB beside the samples"], rows) + "\n"
        )
    if args.switch:
        rows = [
            [name, *(_cost(cost[what]) for what in ("step", "client", "round"))]
            for name, cost in outcome["costs"].items()
        ]
        head = ["microseconds, beyond the bare loop", "a step", "a client switch", "a round"]
        table += "\n" + _table(head, rows) + "\n"
    publish(outcome, table, args)
    return outcome


if __name__ == "__main__":
    main()
