"""What a federation in one Trainer costs beyond the mathematics, per step, client and round.

Contestants train the same clients on the same batches:

- ``bare``: a PyTorch loop, the yardstick;
- ``fit per client``: one ``Trainer.fit`` a client and round;
- ``library``: one ``Trainer.fit`` with ``FederatedLoop`` and ``ClientModule``;
- ``library, plain module``: the same with an ordinary LightningModule;
- ``Lightning alone``: the library's loader and an ordinary LightningModule without
  ``FederatedLoop``. It trains one model through all batches and averages nothing: the difference
  to ``library, plain module`` is the callback, the rest is Lightning's own.

In doubt the others are favoured: only the library draws the order of samples while the clock runs.

Time is wall time. Contestants take turns within a repeat; a run's first round warms up and is not
counted, except with more than 200 clients, where a run is one round; a repeat's figure is the
median of its rounds, the result the median of the repeats. The costs come from rounds of 1 to 20
clients with 1 to 20 steps: the time beyond the bare loop is fitted by least squares to
``step * clients * steps + client * clients + round``.

    python benchmarks/overhead.py --json out.json --markdown out.md
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.datamodules.batches import Batching, RoundBatches, client_batches
from lightning_fl.datamodules.loader import Batches, RoundLoader
from lightning_fl.functional import Purpose, generator
from lightning_fl.models import MLPClassifier
from lightning_fl.policies import Schedule
from lightning_fl.types import RoundPlan

SEED, LR = 0, 0.1
#: More clients than these are not given to ``fit per client``: its time is scaled up from them.
MOST_FITS = 100
#: Clients, and steps of each, that tell the costs of a step, a client and a round apart.
GRID = (1, 5, 20)


class Problem:
    """A federation of equal clients with synthetic samples in memory.

    It trains on :attr:`device`.

    Args:
        clients: Number of clients, all of which take part.
        steps: Local steps of each a round.
        samples: Samples of each.
        batch_size: Samples a step.
        sizes: Widths of the network.
    """

    device = torch.device("cpu")

    def __init__(
        self, clients: int, steps: int, samples: int, batch_size: int, sizes: Sequence[int]
    ) -> None:
        self.clients, self.steps, self.batch_size = clients, steps, batch_size
        random = torch.Generator().manual_seed(SEED)
        n = clients * samples
        x = torch.randn(n, sizes[0], generator=random)
        self.data = InMemory(x, torch.randint(sizes[-1], (n,), generator=random))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.net = MLPClassifier(sizes)
        split = self.federated()
        split.setup("fit")
        self.parts = split.parts

    def federated(self) -> FederatedDataModule:
        """Return the samples as the library takes them."""
        return FederatedDataModule(
            self.data,
            num_clients=self.clients,
            batch_size=self.batch_size,
            val_size=0,
            seed=SEED,
        )

    def order(self, round: int, clients: int) -> list[list[Tensor]]:
        """Return the indices of each client's batches in a round, as the library draws them."""
        return [
            list(
                islice(
                    client_batches(
                        self.parts[client],
                        Batching(self.batch_size),
                        generator(SEED, Purpose.BATCHES, round, client),
                    ),
                    self.steps,
                )
            )
            for client in range(clients)
        ]


class Run(NamedTuple):
    """What a contestant did.

    Args:
        seconds: Time of each round.
        parameters: The server's at the end, ``[P]``.
        setup: Seconds before the first round.
    """

    seconds: list[float]
    parameters: Tensor
    setup: float = 0.0


def now() -> float:
    """Return the time in seconds, when a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Average:
    """The mean of equal clients' parameters, summed in float64 as the library does."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.server = [p.clone() for p in self.params]
        self.total = [torch.zeros_like(p, dtype=torch.float64) for p in self.params]

    @property
    def params(self) -> list[Tensor]:
        """The module's parameters, others when it has been on another device."""
        return [p.detach() for p in self.net.parameters()]

    def load(self) -> None:
        """Give the module the server's parameters."""
        torch._foreach_copy_(self.params, self.server)

    def add(self) -> None:
        """Count the module's parameters in."""
        torch._foreach_add_(self.total, self.params)

    def close(self, clients: int) -> None:
        """Make the mean the server's."""
        torch._foreach_div_(self.total, clients)
        torch._foreach_copy_(self.server, self.total)
        torch._foreach_zero_(self.total)
        self.load()


def bare(problem: Problem, rounds: int, clients: int | None = None) -> Run:
    """Train with a PyTorch loop; only the first clients, where a number is given."""
    clients = clients or problem.clients
    net, data = copy.deepcopy(problem.net).to(problem.device), problem.data.on(problem.device)
    average = Average(net)
    seconds = []
    for round in range(rounds):
        order = problem.order(round, clients)
        start = now()
        for batches in order:
            average.load()
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            for index in batches:
                x, y = data.fetch(index)
                loss = cross_entropy(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            average.add()
        average.close(clients)
        seconds.append(now() - start)
    return Run(seconds, parameters_to_vector(net.parameters()).detach())


class PlainModule(LightningModule):
    """The least LightningModule: it logs nothing."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=LR)


def trainer(rounds: int, folder: str, *callbacks: Callback, **options: Any) -> Trainer:
    """Return a Trainer that only trains."""
    return Trainer(
        max_epochs=rounds,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{"accelerator": "cpu", "devices": 1} | options,
    )


class Ready(Dataset[Any]):
    """Batches that a loader only has to hand out."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def _as_it_is(batch: Any) -> Any:
    return batch


def fit_per_client(problem: Problem, rounds: int) -> Run:
    """Train with a new Trainer for each client and round, from a list of batches."""
    clients = min(problem.clients, MOST_FITS)
    module = PlainModule(copy.deepcopy(problem.net)).to(problem.device)
    average = Average(module)
    samples, seconds = problem.data.on(problem.device), []
    with tempfile.TemporaryDirectory() as folder:
        for round in range(rounds):
            order = problem.order(round, clients)
            start = now()
            for batches in order:
                average.load()
                data = Ready([samples.fetch(index) for index in batches])
                trainer(1, folder, accelerator=problem.device.type).fit(
                    module, DataLoader(data, None, collate_fn=_as_it_is)
                )
                # Lightning takes a module off a GPU when it is done.
                module.to(problem.device)
                average.add()
            average.close(clients)
            seconds.append((now() - start) * problem.clients / clients)
    return Run(seconds, parameters_to_vector(module.parameters()).detach())


class Clock(Callback):
    """Notes when rounds end: from one end to the next is a round with all that belongs to it."""

    def __init__(self) -> None:
        self.built, self.ends = now(), list[float]()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note when the set-up is done."""
        self.began = now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a round."""
        self.ends.append(now())

    def run(self, net: nn.Module) -> Run:
        """Return what was noted."""
        seconds = [b - a for a, b in pairwise([self.began, *self.ends])]
        vector = parameters_to_vector(net.parameters()).detach()
        return Run(seconds, vector, self.began - self.built)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def _federation(problem: Problem, rounds: int, wrap: Callable[[nn.Module], LightningModule]) -> Run:
    net = copy.deepcopy(problem.net)
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        loop = FederatedLoop(policy=Schedule(num_steps=problem.steps), seed=SEED)
        data = problem.federated()
        trainer(rounds, folder, loop, clock).fit(wrap(net), datamodule=data)
    return clock.run(net)


def library(problem: Problem, rounds: int) -> Run:
    """Train with the library's loop and module."""
    return _federation(problem, rounds, lambda net: ClientModule(net, optimizer=_sgd))


def library_plain_module(problem: Problem, rounds: int) -> Run:
    """Train an ordinary LightningModule with the library's loop."""
    return _federation(problem, rounds, PlainModule)


class PlannedData(LightningDataModule):
    """The library's loader without the loop."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.data = Batches(problem.data, default_collate)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the batches that a round of the federation has."""
        problem, clients = self.problem, torch.arange(self.problem.clients)
        epoch = self.trainer.current_epoch if self.trainer else 0
        plan = RoundPlan(SEED, epoch, clients, torch.full_like(clients, problem.steps))
        sampler: Any = RoundBatches(plan, problem.parts, Batching(problem.batch_size))
        return RoundLoader(self.data, sampler=sampler, batch_size=None, collate_fn=_as_it_is)


def lightning_alone(problem: Problem, rounds: int) -> Run:
    """Train one model through the same batches, an epoch for a round."""
    module = PlainModule(copy.deepcopy(problem.net))
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        quiet = trainer(rounds, folder, clock)
        quiet.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # as the loop does
        quiet.fit(module, datamodule=PlannedData(problem))
    return clock.run(module)


CONTESTANTS: dict[str, Callable[[Problem, int], Run]] = {
    "bare": bare,
    "fit per client": fit_per_client,
    "library": library,
    "library, plain module": library_plain_module,
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

    def __init__(self, problem: Problem, rounds: int) -> None:
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


def measure(problems: Sequence[Problem], repeats: int, rounds: int) -> list[Result]:
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


def _take_turns(problem: Problem, result: Result, repeat: int) -> None:
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
    library(Problem(clients, 1, MEMORY_SAMPLES // clients, 4, MEMORY_SIZES), 2)
    return peak()


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the parent's memory at the fork.
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def fresh(script: str, *arguments: str) -> str:
    """Run a script in a process of its own, whose memory is measured; return its last line."""
    # Freed tensors go back at once: else what glibc keeps of them varies by several models a run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout.splitlines()[-1]


def memory(clients: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure peak memory for each number of clients, each time in a fresh process."""
    peaks: dict[int, list[float]] = {n: [] for n in clients}
    for _ in range(repeats):
        for n in clients:
            print(f"peak memory of {n} clients", file=sys.stderr)
            peaks[n].append(float(fresh(__file__, "--peak-memory-of", str(n))))
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


# --- what is shown --------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Describe where this runs."""
    return {
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "threads": torch.get_num_threads(),
    }


def machine_line() -> str:
    """Return the machine in a line, for the top of a page."""
    return f"Machine: {', '.join(f'{k} {v}' for k, v in machine().items() if v is not None)}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cost(figures: Sequence[float]) -> str:
    estimate, low, high = (f"{f:,.0f}" for f in figures)
    return f"{estimate} ({low} to {high})"


def markdown(outcome: dict[str, Any]) -> str:
    """Show the outcome as tables."""
    m, w, costs = outcome["machine"], outcome["workload"], outcome["costs"]
    text = [
        f"{m['cpus']} CPU cores, {'GPU not used' if m['gpu'] else 'no GPU'}, torch threads:"
        f" {m['threads']};"
        f" torch {m['torch']}, lightning {m['lightning']}, Python {m['python']}. Network"
        f" {'-'.join(map(str, w['sizes']))}, {w['samples']} samples a client in memory, batches of"
        f" {w['batch_size']}, SGD, everyone takes part. Medians of {w['repeats']} repeats."
    ]
    step, client, round = (costs["library"][what][0] for what in ("step", "client", "round"))
    rows, fitted = [], []
    for r in outcome["rounds"]:
        seconds, n = r["seconds"], r["clients"]
        extra = seconds["library"] - seconds["bare"]
        by_fit = ((step * r["steps"] + client) * n + round) * 1e-6
        fitted.append(f"{n:,} clients {extra * 1e3:,.0f} ms ({by_fit * 1e3:,.0f})")
        times = [f"{seconds[name]:.3f}" for name in ("bare", *FEDERATIONS)]
        times[1] += " *" * (n > MOST_FITS)
        rows.append(
            [
                f"{n:,}",
                *times,
                f"{r['ratio']['library']:.1f}",
                f"{r['fit_per_client_to_library']:.1f}",
                f"{extra / n / r['steps'] * 1e6:,.0f}",
                f"{r['setup_seconds']['library'] * 1e3:,.0f}",
            ]
        )
    head = ["clients", "bare loop", "`Trainer.fit` per client", "library", "library, plain module"]
    head += ["library / bare loop", "fit per client / library"]
    head += ["library's extra a step, all in, us", "library's set-up, ms"]
    text += [f"Seconds a round of {w['steps']} steps a client:", _table(head, rows)]
    if any(r["clients"] > MOST_FITS for r in outcome["rounds"]):
        text.append(f"\\* measured on {MOST_FITS} of the clients and scaled up.")
    names = {
        "bare": "bare loop, all of its time",
        "fit per client": "`Trainer.fit` per client, beyond the bare loop",
        "library": "library, beyond the bare loop",
        "library, plain module": "library with a plain module, beyond the bare loop",
        "Lightning alone": "Lightning without the library, beyond the bare loop",
        "FederatedLoop": "the callback: library with a plain module, beyond Lightning alone",
    }
    rows = [
        [name, *(_cost(costs[key][what]) for what in ("step", "client", "round"))]
        for key, name in names.items()
    ]
    head = ["microseconds (90 % interval over the repeats)", "a local step"]
    head += ["a client switch", "a round"]
    text += [
        f"Least squares over rounds of {', '.join(map(str, w['grid']))} clients and as many steps:",
        _table(head, rows),
        f"The library's extra a round as measured (and by the fit): {', '.join(fitted)}.",
    ]
    differences = {
        name: max(r["difference"][name] for r in outcome["rounds"]) for name in FEDERATIONS
    }
    listed = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    text.append(f"Largest difference of a final parameter to the bare loop's: {listed}.")
    if (mem := outcome["memory"]) is not None:
        rows = [
            [f"{int(n):,}", f"{p:.1f}", f"{min(each):.1f} to {max(each):.1f}"]
            for (n, p), each in zip(
                mem["peak_mib"].items(), mem["all_peak_mib"].values(), strict=True
            )
        ]
        text += [
            f"Peak memory with a model of {mem['parameters']:,} parameters"
            f" ({mem['model_mib']:.1f} MiB), in fresh processes:",
            _table(["clients", "peak, MiB", "lowest to highest"], rows),
            f"Growth: {mem['growth_mib']:.1f} MiB, {mem['growth_models']:.2f} models.",
        ]
    return "\n\n".join(text) + "\n"


@contextmanager
def _quiet(threads: int) -> Iterator[None]:
    """Silence Lightning's notes, one set for each of hundreds of Trainers; set the threads."""
    logger, before = logging.getLogger("lightning.pytorch"), torch.get_num_threads()
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables, write the files that were asked for; return the outcome."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    integers: dict[str, Any] = {"type": int, "nargs": "*"}
    parser.add_argument(
        "--clients", **integers, default=[10, 100, 1000], help="sizes of federation"
    )
    parser.add_argument("--grid", **integers, default=GRID, help="clients and steps of the fit")
    parser.add_argument("--steps", type=int, default=5, help="local steps of a client a round")
    parser.add_argument("--samples", type=int, default=64, help="samples of a client")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a step")
    parser.add_argument("--sizes", **integers, default=[784, 100, 100, 10], help="network's widths")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds a run; fewer if long")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--memory-clients",
        **integers,
        default=[10, 1000],
        help="peak memory of these; none to skip",
    )
    parser.add_argument("--memory-repeats", type=int, default=3, help="processes for each of them")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--peak-memory-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    with _quiet(args.threads):
        if args.peak_memory_of:
            print(peak_memory(args.peak_memory_of))
            return {}
        points = [(clients, steps) for clients in args.grid for steps in args.grid]
        points += [(clients, args.steps) for clients in args.clients]
        results = measure(
            [Problem(*point, args.samples, args.batch_size, args.sizes) for point in points],
            args.repeats,
            args.rounds,
        )
        grid, sized = results[: len(args.grid) ** 2], results[len(args.grid) ** 2 :]
        outcome = {
            "machine": machine(),
            "workload": {
                name: getattr(args, name)
                for name in ("sizes", "samples", "batch_size", "steps", "grid", "repeats")
            },
            "rounds": [r.to_dict() for r in sized],
            "grid": [r.to_dict() for r in grid],
            "costs": fit_costs(grid),
            "memory": None,
        }
        if args.memory_clients:
            outcome["memory"] = memory(args.memory_clients, args.memory_repeats)
    publish(outcome, markdown(outcome), args)
    return outcome


def publish(outcome: dict[str, Any], tables: str, args: argparse.Namespace) -> None:
    """Print the tables, and write the files that were asked for."""
    print(tables)
    if args.json:
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(tables)


if __name__ == "__main__":
    main()
