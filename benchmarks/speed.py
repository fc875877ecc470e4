"""How fast a round is, against a bare PyTorch loop at the better of one and two threads.

Workloads: W1 and W2 are MLPs of 10 and 100 clients with 30 steps of 64 samples, W4 is 100 of 1,000
clients of 60 samples with 5 steps, W3 and W5 are the convolutional networks for CIFAR-10 and for
keywords, 10 clients with 10 and 5 steps. Samples are synthetic, in memory, plain SGD.

Contestants take turns in one process, everything included: loader, callback, aggregation, table.
The first rounds of a run warm up (and compile, which is reported apart) and are not counted; a
repeat's figure is the median of its rounds, the result the median of the repeats.

    python benchmarks/speed.py --workloads W1 W2 W4 --json out.json --markdown out.md
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from overhead import (
    LR,
    SEED,
    Clock,
    Problem,
    Run,
    _quiet,
    _table,
    bare,
    fit_per_client,
    machine,
    trainer,
)
from torch import nn

from lightning_fl import ClientModule, Lanes
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.datamodules.federated import InMemory
from lightning_fl.models import CifarCNN, MLPClassifier
from lightning_fl.policies import Schedule


def keyword_cnn() -> nn.Module:
    """Four 3x3 convolutions of 64 maps, pooling after each pair, a layer of 1024 (W5)."""
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(64 if i else 1, 64, 3, padding=1)]
        layers += [nn.MaxPool2d(2)] if i % 2 else []
        layers += [nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


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
    "W5": Workload(10, 10, 5, 320, 64, (1, 32, 32), keyword_cnn, 2),
}


class Federation(Problem):
    """A workload's samples and network."""

    def __init__(self, workload: Workload) -> None:
        self.workload = w = workload
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


def library(problem: Federation, rounds: int, **lanes: Any) -> Run:
    """Train with the library; in lanes, where options of theirs are given."""
    net = copy.deepcopy(problem.net)
    module: Any = ClientModule(net, optimizer=lambda params: torch.optim.SGD(params, lr=LR))
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        loop = FederatedLoop(problem.clients, policy=Schedule(num_steps=problem.steps), seed=SEED)
        trainer(rounds, folder, loop, clock).fit(
            Lanes(module, **lanes) if lanes else module, datamodule=problem.federated()
        )
    return clock.run(net)


@contextmanager
def threads(count: int) -> Any:
    """Set torch's threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _lanes(**options: Any) -> Callable[[Federation, int], Run]:
    return lambda problem, rounds: library(problem, rounds, **options)


#: Name: torch threads, and how it trains.
CONTESTANTS: dict[str, tuple[int, Callable[[Any, int], Run]]] = {
    "bare loop, 1 thread": (1, bare),
    "bare loop, 2 threads": (2, bare),
    "Trainer.fit per client": (2, fit_per_client),
    "library, one client at a time": (2, library),
    "one lane": (2, _lanes(lanes=1)),
    "10 lanes": (2, _lanes(lanes=10, compile=False, fast_matmul=False)),
    "10 lanes, compiled": (2, _lanes(lanes=10, compile=True, fast_matmul=False)),
    "10 lanes, compiled, fast matmul": (2, _lanes(lanes=10, compile=True)),
    "the same, 1 thread": (1, _lanes(lanes=10, compile=True)),
    "auto": (2, _lanes(lanes="auto")),
}


def measure(
    names: Sequence[str], contestants: Sequence[str], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Let the contestants take turns; seconds a round, by workload and contestant."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for name in names:
        problem = Federation(WORKLOADS[name])
        seconds[name] = {c: [] for c in contestants}
        for repeat in range(repeats):
            for contestant in contestants:
                count, run = CONTESTANTS[contestant]
                with threads(count):
                    found = run(problem, problem.workload.rounds).seconds
                seconds[name][contestant].append(median(found[1:]))
                print(f"{name} {repeat + 1} {contestant}: {found[-1]:.4f}", file=sys.stderr)
    return seconds


def markdown(seconds: dict[str, dict[str, list[float]]]) -> str:
    """Show seconds a round, and how many times faster than the better bare loop, as a table."""
    names = list(seconds)
    rows = []
    for contestant in seconds[names[0]]:
        row = [contestant]
        for name in names:
            each = {c: median(times) for c, times in seconds[name].items()}
            best = min(t for c, t in each.items() if c.startswith("bare"))
            row.append(f"{each[contestant]:.3f} ({best / each[contestant]:.2f})")
        rows.append(row)
    return _table(["seconds a round (times the better bare loop)", *names], rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, write the files that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    if not any(c.startswith("bare") for c in args.contestants):
        parser.error("the bare loop is what the others are compared with: name it too")
    with _quiet(torch.get_num_threads()):
        outcome = {
            "machine": machine(),
            "seconds": measure(args.workloads, args.contestants, args.repeats),
        }
    table = markdown(outcome["seconds"])
    print(table)
    if args.json:
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(table)
    return outcome


if __name__ == "__main__":
    main()
