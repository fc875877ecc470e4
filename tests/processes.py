"""Federations that run on any number of processes, and what tests compare.

``forks.py`` runs these functions in each of the processes.
"""

import logging
import os
import signal
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F

from federations import LONG, MOMENTUM, ROWS, Foreign, Learner, Uneven, module, row, samples
from lightning_fl import ClientParallelStrategy, VectorizedClients
from lightning_fl.aggregators import (
    CoordinateMedian,
    FedAdam,
    FedControl,
    GeometricMedian,
    Scaffold,
    Staged,
)
from lightning_fl.callbacks import RoundCheckpoint, RunReport
from lightning_fl.callbacks.report import client_accuracies
from lightning_fl.objectives import Proximal
from lightning_fl.partition import IID
from lightning_fl.policies import Schedule
from lightning_fl.runners import Phase
from lightning_fl.samplers import ClientSampler
from tutorial import trainer


class Measured(Foreign):
    """It tells the loss of each sample, for rules that want to know."""

    def federated_losses(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none")


class Logging(Foreign):
    """Values that are logged in hooks, in single steps, and before the steps of a round."""

    def __init__(self):
        super().__init__(dropout=0.0, optimizer=MOMENTUM, metric=False)

    def on_train_epoch_start(self):
        self.log("started", 1.0, reduce_fx="sum")

    def on_train_batch_start(self, batch, batch_idx):
        self.log("begun", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("last", loss)
        self.log("both", loss, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def on_before_optimizer_step(self, optimizer):
        norm = sum(p.grad.square().sum() for p in self.parameters() if p.grad is not None).sqrt()
        for name in ("mean", "min", "sum"):
            self.log(f"norm/{name}", norm, on_step=False, on_epoch=True, reduce_fx=name)


class Growing(ClientSampler):
    """One client in the first round, and four in the next, so that processes join."""

    def sample(self, round, count, num_samples, generator):
        return torch.arange(1 + 3 * round)


class Counting(L.Callback):
    """Count the local steps, and log their loss."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in {"steps": 1.0, "losses": outputs["loss"]}.items():
            pl_module.log(name, value, on_step=False, on_epoch=True, reduce_fx="sum")


class Late(Foreign):
    """Hooks at the start of the fit write values that differ between processes."""

    def __init__(self):
        super().__init__(batchnorm=True, dropout=0.0, optimizer=MOMENTUM, metric=False)

    def on_fit_start(self):
        with torch.no_grad():
            self.net[4].weight.fill_(0.1 + self.trainer.global_rank)

    def on_train_start(self):
        with torch.no_grad():
            self.net[0].bias.fill_(0.2 + self.trainer.global_rank)
        self.net[1].running_mean = self.net[1].running_mean + 1.0


class Lose(L.Callback):
    """Make the updates of all clients but one infinite, so that processes lose all of theirs."""

    def on_client_updates(self, plan, clients, delta, dropped):
        lost = clients != plan.clients[plan.round % len(plan.clients)]
        return delta.masked_fill(lost[:, None], torch.inf)


class Watch(RunReport):
    """Who took part, and how well the server's model does for each client."""

    def on_train_end(self, trainer, pl_module):
        self.accuracies = client_accuracies(trainer, 20)


class Fail(L.Callback):
    """Let process 1 end in its second round, in one way or another."""

    def __init__(self, how):
        self.how = how

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.current_epoch == 1:
            if self.how == "raise":
                raise ValueError("a client failed")
            if self.how == "freeze":
                time.sleep(120)
            os.kill(os.getpid(), signal.SIGKILL)


def vectorized(make, **options):
    """Return a function that makes a federation of vectorized clients."""

    def vectorize():
        run = make()
        options_of_groups = {"group_size": 2, "compile": False, "fixed_groups": True} | options
        run.module = VectorizedClients(run.module, **options_of_groups)
        return run

    return vectorize


#: The case that resumes.
KEPT = "BatchNorm, kept"
#: Rows of the table whose logged metrics act on later rounds.
ACTS = "BatchNorm, a policy that learns", "plateau, EarlyStopping"
#: Of the table: what two processes of ``test_federations.py`` do not show.
TABLE = (KEPT, *ACTS)
#: Functions that make federations: rows of the table, and what is about processes.
CASES = {name: partial(ROWS[name], None) for name in TABLE} | {
    "one client, median": lambda: row(aggregator=CoordinateMedian(), clients_per_round=1),
    "lost clients": lambda: row(aggregator=GeometricMedian(), policy=Uneven(), callbacks=[Lose()]),
    "started by hooks": lambda: row(
        Late(),
        samples(drop_last=True),
        local_parameters=["type:_BatchNorm", "net.4.*"],
        policy=Schedule(num_steps=3, phases=[Phase("local", num_steps=1), Phase("shared")]),
    ),
    "logs of hooks, processes that join": lambda: row(
        Logging(), sampler=Growing(), policy=Uneven(), callbacks=[Counting()]
    ),
    "vectorized": vectorized(lambda: row(policy=Uneven()), fixed_groups=False),
    "vectorized, fixed groups": vectorized(lambda: row(aggregator=FedAdam(), policy=Uneven())),
    "vectorized, augmented": vectorized(partial(ROWS["Digits, augmented"], None)),
}
#: The same for processes that share the samples of a client's batches.
SHARED = {
    "uneven": lambda: row(module(Proximal(0.1)), samples(batch_size=8), policy=Uneven()),
    "control variates": lambda: row(aggregator=Staged([2], [Scaffold("I"), Scaffold("II")])),
    "batchnorm": lambda: row(
        Measured(batchnorm=True, dropout=0.0, optimizer=MOMENTUM),
        # Two samples of every batch for each of three processes: BatchNorm cannot train on one.
        samples(drop_last=True, partition=IID(), batch_size=8),
        aggregator=FedControl(),
        policy=Learner(),
        buffers="local",
    ),
    "kept": lambda: row(
        Foreign(dropout=0.0, optimizer=MOMENTUM),
        samples(batch_size=None),
        optimizer_state="keep",
        clients_per_round=4,
    ),
}


def fit(
    case,
    devices,
    folder,
    rounds=None,
    callbacks=(),
    ckpt_path=None,
    strategy=None,
    precision="64-true",
):
    """Train a case; return its parameters and its table."""
    L.seed_everything(1, verbose=False)
    run = (SHARED if strategy == "ddp" else CASES)[case]()
    watch = Watch()
    options = {"precision": precision, "num_sanity_val_steps": 0} | run.trainer
    keep = RoundCheckpoint(str(folder))
    made = trainer(
        *(folder, run.loop, watch, keep, *run.callbacks, *callbacks),
        rounds=rounds or (3 if case in LONG else 2),
        devices=devices,
        strategy=strategy or "client_parallel",
        **{"enable_checkpointing": True} | options,
    )
    made.fit(run.module, datamodule=run.data, ckpt_path=ckpt_path)
    # Before a test, for which DDP sends what process 0 has to all.
    is_wrapped = isinstance(run.module, VectorizedClients)
    user = run.module.module if is_wrapped else run.module
    state = {name: t.clone() for name, t in user.state_dict().items()}
    tested = made.test(run.module, datamodule=run.data, verbose=False) if not callbacks else []
    return {
        "state": state,
        "rows": run.loop.rows,
        "store": dict(run.loop.store.rows),
        "test": tested,
        "participation": watch.history.csv_gz(),
        "accuracies": watch.accuracies,
    }


def quiet():
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Several Trainers one after another in a process look like a mistake to Lightning.
    torch.set_num_threads(1)


def save(found, out, devices):
    """Write a file for each process: what they know has to be the same."""
    torch.save(found, Path(out) / f"found.{devices}.{os.environ.get('LOCAL_RANK', '0')}.pt")


def train(devices, out, cases):
    """Train cases, each in a fit."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        save({case: fit(case, devices, folder) for case in cases}, out, devices)


def train_all(devices, out, cases, shared):
    """Train cases, in float32, interrupted, and those in which processes share samples."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        found = {case: fit(case, devices, folder) for case in cases}
        found["float32"] = fit("vectorized, fixed groups", devices, folder, precision="32-true")
        place = Path(out) / f"resumed.{devices}"
        fit(KEPT, devices, place, rounds=2, callbacks=[L.Callback()])
        found["resumed"] = fit(KEPT, devices, folder, ckpt_path=str(place / "last.ckpt"))
        found |= {case: fit(case, devices, folder, strategy="ddp") for case in shared}
    save(found, out, devices)


def resume(devices, out, checkpoint):
    """Go on with a run of the case ``KEPT``."""
    quiet()
    save({"resumed": fit(KEPT, devices, out, ckpt_path=checkpoint)}, out, devices)


def fail(how, devices, out):
    """Let process 1 end in its second round: ``raise``, ``kill`` or ``freeze``."""
    quiet()
    strategy = ClientParallelStrategy(timeout=10 if how == "freeze" else 60)
    fit("vectorized", devices, out, callbacks=[Fail(how)], strategy=strategy)


def miss_a_metric(devices, out):
    """Log a metric of which only one process knows."""
    quiet()
    CASES["one client"] = lambda: row(Foreign(), clients_per_round=1)
    fit("one client", devices, out)


class CountsInValidation(Foreign):
    """The number of validation samples so far is a buffer, on which the loss depends."""

    def __init__(self):
        super().__init__(metric=False)
        self.register_buffer("seen", torch.zeros(()))
        self.found = []

    def on_validation_start(self):
        self.found.append(float(self.seen))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.seen / 100)

    def validation_step(self, batch, batch_idx):
        self.seen += len(batch[0]) * (1 + self.global_rank)
        return super().validation_step(batch, batch_idx)


def count_in_validation(devices, out):
    """Write other values to a buffer on each process between rounds."""
    torch.set_num_threads(1)
    counts = CountsInValidation()
    CASES["counts"] = lambda: row(counts)
    fit("counts", devices, out)
    save(counts.found, out, devices)
