"""What ``speed.py`` measures: federations, and functions that train one and time its rounds.

Contestants train the same clients on the same batches. In doubt the others are favored: only the
library draws the order of samples while the clock runs.
"""

from __future__ import annotations

import copy
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.flop_counter import FlopCounterMode

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.datamodules.batches import Batching, RoundBatches, client_batches
from lightning_fl.datamodules.loader import Batches, RoundLoader
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.models import CifarCNN, KeywordCNN, MLPClassifier
from lightning_fl.objectives import RepresentationMatching
from lightning_fl.policies import Schedule
from lightning_fl.types import RoundPlan

# The scripts of other libraries import these modules by these names, in their own environments.
sys.path.append(str(Path(__file__).with_name("peers")))
from networks import PUBLISHED, accuracy
from samples import drawn

SEED, LR = 0, 0.1
#: More clients than these are not given to :func:`fit_per_client`: its time is scaled up from them.
MOST_FITS = 100
#: Rounds of the federation that the library believes in: what ``auto`` chooses depends on it.
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
        classes: Of the samples.
    """

    clients: int
    cohort: int
    steps: int
    samples: int
    batch_size: int
    shape: tuple[int, ...]
    net: Callable[[], nn.Module]
    rounds: int
    classes: int = 10


def mlp() -> nn.Module:
    """784-100-100-10, 89,610 parameters."""
    return MLPClassifier([784, 100, 100, 10])


WORKLOADS = {
    "W1": Workload(10, 10, 30, 640, 64, (784,), mlp, 8),
    "W2": Workload(100, 100, 30, 640, 64, (784,), mlp, 3),
    "W4": Workload(1000, 100, 5, 60, 60, (784,), mlp, 8),
    "W3": Workload(10, 10, 10, 640, 64, (3, 32, 32), CifarCNN, 2),
    "W5": Workload(10, 10, 5, 320, 64, (1, 32, 32), KeywordCNN, 2),
    "blazefl": Workload(100, 10, 50, 500, 50, (3, 32, 32), PUBLISHED["blazefl"], 4),
    # The next two have as many rounds as compiled sums need to be the usual case.
    "pfl": Workload(1000, 50, 5, 50, 10, (3, 32, 32), PUBLISHED["pfl"], 10),
    "femnist": Workload(3400, 10, 5, 100, 20, (1, 28, 28), PUBLISHED["femnist"], 12, 62),
    # W1 with 1,000 clients, for a GPU: 2 GiB of samples.
    "W1000": Workload(1000, 1000, 30, 640, 64, (784,), mlp, 3),
}


class Federation:
    """Synthetic samples in memory and a network.

    Args:
        workload: What is trained.
        device: Where.
        dtype: Of samples and parameters.
    """

    def __init__(
        self, workload: Workload, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.workload, self.device = workload, torch.device(device)
        w = workload
        self.clients, self.steps, self.batch_size = w.cohort, w.steps, w.batch_size
        x, y = map(torch.from_numpy, drawn(w.clients * w.samples, w.shape, w.classes))
        self.data = InMemory(x.to(dtype), y)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.net = w.net().to(dtype)
        split = self.federated()
        split.setup("fit")
        self.parts = split.parts

    def federated(self) -> FederatedDataModule:
        """Return the samples as the library takes them."""
        w = self.workload
        return FederatedDataModule(
            self.data, num_clients=w.clients, batch_size=w.batch_size, val_size=0, seed=SEED
        )

    def flops(self) -> int:
        """Return the floating-point operations of a client's local step."""
        samples, labels = self.data.fetch(torch.arange(self.batch_size))
        with FlopCounterMode(display=False) as counter:
            cross_entropy(self.net(samples), labels).backward()
        self.net.zero_grad()
        return int(counter.get_total_flops())

    def accuracy(self, parameters: Tensor) -> float:
        """Return the accuracy of parameters on the test samples."""
        net = copy.deepcopy(self.net).float()
        vector_to_parameters(parameters.float().cpu(), net.parameters())
        return accuracy(net, self.workload.shape, self.workload.classes)

    def order(self, round: int, clients: int) -> list[list[Tensor]]:
        """Return the indices of each client's batches in a round, as the library draws them.

        Clients are sampled, if not all of them take part.
        """
        random = torch.Generator().manual_seed(round)
        sampled = torch.randperm(self.workload.clients, generator=random)[: self.clients]
        return [
            list(
                islice(
                    client_batches(
                        self.parts[client],
                        Batching(self.batch_size),
                        generator(SEED, RandomStream.BATCHES, round, client),
                    ),
                    self.steps,
                )
            )
            for client in sampled.sort().values.tolist()[:clients]
        ]


def mlp_federation(
    clients: int, steps: int, samples: int, batch_size: int, sizes: Sequence[int]
) -> Federation:
    """Return a federation that trains an MLP of these widths, with all clients in each round."""
    net = partial(MLPClassifier, sizes)
    shape, classes = (sizes[0],), sizes[-1]
    return Federation(
        Workload(clients, clients, steps, samples, batch_size, shape, net, 0, classes)
    )


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


def bare(problem: Federation, rounds: int, clients: int | None = None) -> Run:
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


def fit_per_client(problem: Federation, rounds: int) -> Run:
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


class Stop(Callback):
    """Ends a long federation after a few rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the fit after the last of the rounds."""
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


def library(
    problem: Federation,
    rounds: int,
    processes: int = 1,
    matching: bool = False,
    plain: bool = False,
    **vectorized: Any,
) -> Run:
    """Train with the library.

    Args:
        problem: What is trained.
        rounds: How many rounds of a long federation.
        processes: How many share the clients.
        matching: Whether the loss has a term of representation matching.
        plain: Whether the module is an ordinary LightningModule.
        vectorized: Options of ``VectorizedClients``; without, clients train one after another.
    """
    net = copy.deepcopy(problem.net)
    terms = [RepresentationMatching(0.1, reduction="mean")] if matching else ()
    sgd = partial(torch.optim.SGD, lr=LR)
    module: Any = PlainModule(net) if plain else ClientModule(net, terms, sgd)
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        loop = FederatedLoop(
            clients_per_round=problem.clients, policy=Schedule(num_steps=problem.steps), seed=SEED
        )
        trainer(
            LONG,
            folder,
            *(loop, clock, Stop(rounds)),
            accelerator=problem.device.type,
            devices=processes,
            strategy="auto" if processes == 1 else "client_parallel",
        ).fit(
            VectorizedClients(module, **vectorized) if vectorized else module,
            datamodule=problem.federated(),
        )
    return clock.run(net)


class PlannedData(LightningDataModule):
    """The library's loader without the loop."""

    def __init__(self, problem: Federation) -> None:
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


def lightning_alone(problem: Federation, rounds: int) -> Run:
    """Train one model through the same batches, an epoch for a round."""
    module = PlainModule(copy.deepcopy(problem.net))
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        quiet = trainer(rounds, folder, clock)
        quiet.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # as the loop does
        quiet.fit(module, datamodule=PlannedData(problem))
    return clock.run(module)


def peak(field: str = "VmHWM") -> float:
    """Return the peak memory of this process in MiB; with ``VmRSS`` that of now, on Linux only."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the parent's memory at the fork.
        return int(status.read_text().partition(f"{field}:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def fresh(script: str, *arguments: str) -> str:
    """Run a script in a process of its own, whose memory is measured; return its last line."""
    # Freed tensors go back at once: else what glibc keeps of them varies by several models a run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout.splitlines()[-1]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's notes, one set for each of hundreds of Trainers."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
