"""Federations that run on any number of processes, and what tests compare.

``forks.py`` runs these functions in each of the processes. As a script that torchrun starts:

python tests/processes.py DEVICES OUT CASE ...
"""

import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from adapted import Adapted
from frozen import frozen_once
from lightning_fl import ClientModule, ClientParallelStrategy, VectorizedClients
from lightning_fl.aggregators import (
    AFL,
    PFNM,
    ClusteredFL,
    CoordinateMedian,
    Downpour,
    DPFedAvg,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedControl,
    FedDyn,
    FedMA,
    FedNova,
    FedPIDAvg,
    FlexLoRA,
    GeometricMedian,
    Gossip,
    QFedAvg,
    Scaffold,
    Staged,
    StreamingPFNM,
    ZeroPadding,
)
from lightning_fl.callbacks import (
    Backdoor,
    ClientFaults,
    FederatedLoop,
    RoundCheckpoint,
    RunReport,
)
from lightning_fl.callbacks.report import client_accuracies
from lightning_fl.datamodules import Digits, FederatedDataModule
from lightning_fl.models import MLPClassifier
from lightning_fl.objectives import (
    APFL,
    MOON,
    Ditto,
    FedEM,
    PerFedAvg,
    Proximal,
    RepresentationMatching,
)
from lightning_fl.partition import IID, Dirichlet
from lightning_fl.policies import (
    DiscreteGaussianReinforce,
    HyperparameterPolicy,
    PersonalizedPolicyGradient,
    Schedule,
    Stragglers,
)
from lightning_fl.runners import Phase
from lightning_fl.samplers import AFLSampler, AsynchronousSampler, ClientSampler, PoissonSampler

FEATURES, CLASSES, CLIENTS = 6, 3, 7


class Uneven(HyperparameterPolicy):
    """Steps and rates that differ from client to client and round to round.

    Its figure is what the clients report, which the table of rounds holds.
    """

    learns_from = frozenset({"client_losses"})

    def sample(self, round, clients):
        return {"num_steps": 1 + (clients + round) % 4, "lr": 0.05 + 0.01 * clients}

    def update(self, feedback):
        losses = feedback.losses.nan_to_num()  # of clients that were dropped
        self.reported = float(losses @ (feedback.plan.clients + 1.0).double())

    def metrics(self):
        return {"reported": self.reported}


class Foreign(L.LightningModule):
    """BatchNorm, dropout, Adam, a scheduler a step, a metric, logging; it knows no processes."""

    def __init__(self, batchnorm=False, dropout=0.2, optimizer=torch.optim.Adam, metric=True):
        super().__init__()
        norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
        )
        self.optimizer = optimizer
        self.train_accuracy = MulticlassAccuracy(CLASSES) if metric else None
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        # It even asks to wait for others that are busy with clients of their own.
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if self.train_accuracy is not None:
            self.train_accuracy(scores, y)
            self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("val_loss", F.cross_entropy(scores, y), batch_size=len(x))
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Measured(Foreign):
    """It tells the loss of each sample, for rules that want to know."""

    def federated_losses(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none")


class Plateau(Foreign):
    """What validation and training find changes the learning rate, and may end the run."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        monitored = [("val_loss", 0.7), ("val_sum", 0.9), ("train_loss", 0.8), ("accuracy", 0.9)]
        return [optimizer], [
            {"scheduler": plateau(optimizer, factor=factor, patience=0), "monitor": name}
            for name, factor in monitored
        ]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_sum", self.net(batch[0]).square().sum(), reduce_fx="sum", on_epoch=True)


class Learner(HyperparameterPolicy):
    """A rate that follows every bit of what it is told."""

    learns_from = frozenset({"val_loss", "client_losses"})

    def __init__(self):
        super().__init__()
        self.register_buffer("lr", torch.tensor(0.05, dtype=torch.float64))

    def sample(self, round, clients):
        return {"num_steps": 1 + (clients + round) % 3, "lr": self.lr}

    def update(self, feedback):
        figures = [feedback.val_loss, float(feedback.losses.nansum()), *feedback.metrics.values()]
        self.lr.mul_(0.5 + sum(f * 1e6 % 1 for f in figures) / len(figures))


class Logging(Foreign):
    """Values that are logged in hooks, in single steps, and before the steps of a round."""

    def __init__(self):
        super().__init__(dropout=0.0, optimizer=sgd, metric=False)

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


class Scheduled(Foreign):
    """A rate that ends at zero with the run, and hooks that write to the parameters."""

    def __init__(self, **options):
        super().__init__(**{"dropout": 0.0, "metric": False, "optimizer": sgd} | options)

    def on_train_epoch_start(self):
        for param in self.parameters():
            param.data.mul_(0.9)

    def training_step(self, batch, batch_idx):
        return (1 + batch_idx) * super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for param in self.parameters():
            param.data.clamp_(-0.3, 0.3)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.05)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class LightlyScheduled(Scheduled):
    """The same without hooks for each batch, which can be vectorized."""

    training_step, on_train_batch_end = Foreign.training_step, L.LightningModule.on_train_batch_end


def client_module(**options):
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)


def data(dtype, clients=CLIENTS, augment=False, **options):
    if augment:
        return Digits(num_clients=clients, batch_size=8, seed=1, augment=True)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(261, FEATURES, generator=random, dtype=dtype)
    y = (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 1).long()
    held = TensorDataset(x[:61], y[:61])
    options = {"partition": Dirichlet(0.5, min_size=3), "batch_size": 8, "seed": 1} | options
    return FederatedDataModule(
        TensorDataset(x[61:], y[61:]),
        held,
        held,
        num_clients=clients,
        eval_batch_size=16,
        **options,
    )


def digits_module():
    return ClientModule(MLPClassifier([64, 8, 10]), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def vectorized(module, **options):
    return VectorizedClients(module, **({"group_size": 2, "compile": False} | options))


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def frozen(module):
    module.net[0].requires_grad_(False)
    return module


class Late(Foreign):
    """Hooks at the start of the fit write values that differ between processes."""

    def __init__(self):
        super().__init__(batchnorm=True, dropout=0.0, optimizer=sgd, metric=False)

    def on_fit_start(self):
        with torch.no_grad():
            self.net[4].weight.fill_(0.1 + self.trainer.global_rank)

    def on_train_start(self):
        with torch.no_grad():
            self.net[0].bias.fill_(0.2 + self.trainer.global_rank)
        self.net[1].running_mean = self.net[1].running_mean + 1.0


#: A BatchNorm layer and the last one stay with a client, which trains these and then the others.
PARTLY_LOCAL = {
    "local_parameters": ["type:_BatchNorm", "net.4.*"],
    "policy": Schedule(num_steps=3, phases=[Phase("local", num_steps=1), Phase("shared")]),
}
#: Name: the module, options of the loop, options of the data.
CASES = {
    "client module": lambda: (client_module(), {}, {}),
    "few clients": lambda: (client_module(), {"clients_per_round": 3}, {}),
    "uneven": lambda: (client_module(terms=[Proximal(0.1)]), {"policy": Uneven()}, {}),
    "fewer clients than processes": lambda: (Foreign(metric=False), {"clients_per_round": 1}, {}),
    "foreign": lambda: (Foreign(), {"policy": Uneven()}, {}),
    "batchnorm": lambda: (
        Foreign(batchnorm=True, optimizer=sgd),
        {"buffers": "average", "policy": Uneven()},
        {"drop_last": True},
    ),
    "kept": lambda: (
        Foreign(batchnorm=True, optimizer=sgd),
        {"buffers": "local", "optimizer_state": "keep", "clients_per_round": 4},
        {"drop_last": True},
    ),
    "partly local": lambda: (
        Foreign(batchnorm=True, optimizer=sgd),
        {**PARTLY_LOCAL, "optimizer_state": "keep", "clients_per_round": 4},
        {"drop_last": True},
    ),
    "vectorized, partly local": lambda: (
        vectorized(Foreign(batchnorm=True, dropout=0.0, optimizer=sgd), fixed_groups=True),
        {**PARTLY_LOCAL, "clients_per_round": 5},
        {"drop_last": True},
    ),
    "uniform": lambda: (client_module(), {"aggregator": FedAvg("uniform")}, {}),
    "matching": lambda: (client_module(terms=[RepresentationMatching(0.1)]), {}, {}),
    "vectorized, matching": lambda: (
        vectorized(client_module(terms=[RepresentationMatching(0.1)])),
        {"clients_per_round": 5},
        {},
    ),
    "vectorized": lambda: (vectorized(client_module()), {"policy": Uneven()}, {}),
    "frozen": lambda: (
        frozen(client_module(terms=[Proximal(0.1)])),
        {"policy": Uneven()},
        {},
    ),
    "server optimizer": lambda: (
        Foreign(batchnorm=True, optimizer=sgd),
        {"aggregator": FedAdam(), "clients_per_round": 4, "buffers": "average"},
        {"drop_last": True},
    ),
    "losses": lambda: (
        client_module(),
        {"aggregator": FedControl(), "clients_per_round": 5, "policy": Stragglers(0.5)},
        {},
    ),
    "falls of losses": lambda: (
        vectorized(client_module(), fixed_groups=True),
        {"aggregator": FedPIDAvg(window=2, cancellation=0.0), "clients_per_round": 5},
        {},
    ),
    "clusters": lambda: (
        client_module(),
        {"aggregator": ClusteredFL(eps1=9.0, eps2=0.0, warmup=1), "policy": Uneven()},
        {},
    ),
    "gossip": lambda: (
        vectorized(client_module(), fixed_groups=True),
        {"aggregator": Gossip("ring")},
        {},
    ),
    "neurons": lambda: (
        client_module(),
        {"aggregator": PFNM(prior_variance=10.0, widths=[8, 5]), "clients_per_round": 5},
        {},
    ),
    "stream": lambda: (
        client_module(),
        {"aggregator": StreamingPFNM(prior_variance=10.0, fresh=2), "clients_per_round": 5},
        {"stream_steps": 3},
    ),
    "layers": lambda: (
        vectorized(client_module(), fixed_groups=True),
        {"aggregator": FedMA(widths=[8, 5])},
        {},
    ),
    "downpour": lambda: (client_module(), {"aggregator": Downpour(), "clients_per_round": 5}, {}),
    "private": lambda: (
        client_module(),
        {
            "aggregator": DPFedAvg(quantile=0.5, count_noise=2.0),
            "sampler": PoissonSampler(),
            "clients_per_round": 2,
        },
        {},
    ),
    "attacked": lambda: (
        client_module(),
        {
            "aggregator": CoordinateMedian(),
            "callbacks": [Backdoor([1, 4], target=1, boost=3.0), ClientFaults(dropout=0.2)],
        },
        {},
    ),
    "a policy that learns": lambda: (
        Foreign(batchnorm=True, optimizer=sgd),
        {
            "aggregator": FedAdam(),
            "policy": Learner(),
            "buffers": "average",
            "callbacks": [ClientFaults(dropout=0.3)],
        },
        {"drop_last": True},
    ),
    "reinforce": lambda: (
        client_module(),
        {"policy": DiscreteGaussianReinforce(), "clients_per_round": 5},
        {},
    ),
    "plateau": lambda: (
        Plateau(batchnorm=True, metric=False),
        {"buffers": "average", "callbacks": [EarlyStopping("val_loss", patience=1)]},
        {"drop_last": True},
    ),
    "one client, median": lambda: (
        client_module(),
        {"aggregator": CoordinateMedian(), "clients_per_round": 1},
        {},
    ),
    "one client, neurons": lambda: (
        client_module(),
        {"aggregator": PFNM(prior_variance=10.0, widths=[8, 5]), "clients_per_round": 1},
        {},
    ),
    "one client, gossip": lambda: (
        client_module(),
        {"aggregator": Gossip("ring"), "clients_per_round": 1},
        {},
    ),
    "one client, losses": lambda: (
        client_module(),
        {"aggregator": FedControl(), "clients_per_round": 1},
        {},
    ),
    "lost clients": lambda: (
        client_module(),
        {"aggregator": GeometricMedian(), "callbacks": [Lose()], "policy": Uneven()},
        {},
    ),
    "started by hooks": lambda: (Late(), PARTLY_LOCAL, {"drop_last": True}),
    "vectorized, fixed groups": lambda: (
        vectorized(Foreign(dropout=0.0, optimizer=sgd, metric=False), fixed_groups=True),
        {"policy": Uneven(), "aggregator": FedAdam()},
        {},
    ),
    "stages": lambda: (
        client_module(),
        {"aggregator": Staged([2], [FedAvgM(), FedAdam()]), "clients_per_round": 3},
        {},
    ),
    "control variates": lambda: (
        client_module(),
        {"aggregator": Scaffold("II"), "clients_per_round": 5, "policy": Uneven()},
        {},
    ),
    "vectorized, gradients of clients": lambda: (
        vectorized(client_module(), fixed_groups=True),
        {"aggregator": Scaffold("I"), "clients_per_round": 5},
        {},
    ),
    "dynamic regularizers": lambda: (
        client_module(),
        {"aggregator": FedDyn(0.1), "clients_per_round": 5, "policy": Uneven()},
        {},
    ),
    "fair weights": lambda: (
        client_module(),
        {"aggregator": QFedAvg(2.0), "clients_per_round": 5, "policy": Uneven()},
        {},
    ),
    "worst mixture": lambda: (
        client_module(),
        {
            "aggregator": AFL(0.3, mode="sampling"),
            "sampler": AFLSampler(),
            "clients_per_round": 3,
        },
        {},
    ),
    "numbers of terms": lambda: (
        vectorized(client_module(terms=[Proximal(0.1)]), fixed_groups=True),
        {"policy": PersonalizedPolicyGradient([{"mu": 0.0}, {"mu": 2.0}], floor=0.0)},
        {},
    ),
    "normalized": lambda: (
        client_module(),
        {"aggregator": FedNova(), "clients_per_round": 5, "policy": Uneven()},
        {},
    ),
    "adapters": lambda: (
        Adapted(features=FEATURES, classes=CLASSES),
        {"aggregator": FlexLoRA({1: 0.4, 4: 0.6}), "clients_per_round": 5, "policy": Uneven()},
        {},
    ),
    "padded adapters": lambda: (
        Adapted(features=FEATURES, classes=CLASSES),
        {"aggregator": ZeroPadding({1: 0.4, 4: 0.6}, "norm"), "clients_per_round": 5},
        {},
    ),
    "contributions": lambda: (
        client_module(),
        {"policy": PersonalizedPolicyGradient([{"num_steps": 1}, {"num_steps": 3}], floor=0.0)},
        {},
    ),
    "asynchronous": lambda: (
        Foreign(batchnorm=True, optimizer=sgd),
        {
            "aggregator": FedBuff(max_staleness=3),
            "sampler": AsynchronousSampler(4),
            "clients_per_round": 3,
            "buffers": "average",
            "callbacks": [ClientFaults(dropout=0.2, speed_sigma=1.0)],
        },
        {"drop_last": True},
    ),
    "mixture": lambda: (
        FedEM(nn.Linear(FEATURES, CLASSES), 2, lambda p: torch.optim.SGD(p, lr=0.1)),
        {"clients_per_round": 5},
        {},
    ),
    "second model": lambda: (
        client_module(terms=[APFL(0.9)]),
        {"clients_per_round": 5, "policy": Uneven()},
        {},
    ),
    "vectorized, second model": lambda: (
        vectorized(client_module(terms=[Ditto(0.5, 0.5)])),
        {"clients_per_round": 5},
        {},
    ),
    "previous model": lambda: (client_module(terms=[MOON()]), {"clients_per_round": 5}, {}),
    "inner step": lambda: (
        PerFedAvg(nn.Linear(FEATURES, CLASSES), 0.1, False, lambda p: torch.optim.SGD(p, lr=0.1)),
        {"clients_per_round": 5},
        {"drop_last": True},
    ),
    "processes that join": lambda: (Foreign(metric=False), {"sampler": Growing()}, {}),
    "logs of hooks": lambda: (
        Logging(),
        {"sampler": Growing(), "policy": Uneven(), "callbacks": [Counting()]},
        {},
    ),
    "augmented": lambda: (digits_module(), {"policy": Uneven()}, {"augment": True}),
    "vectorized, augmented": lambda: (
        vectorized(digits_module(), steps_per_batch=2, fixed_groups=True),
        {"policy": Schedule(num_steps=3)},
        {"augment": True},
    ),
    "schedule": lambda: (Scheduled(), {"clients_per_round": 5}, {}),
    "vectorized, schedule": lambda: (
        vectorized(LightlyScheduled(), steps_per_batch=2),
        {"clients_per_round": 5},
        {},
    ),
    "vectorized, kept": lambda: (
        vectorized(Foreign(dropout=0.0, optimizer=sgd, metric=False), steps_per_batch=2),
        {"optimizer_state": "keep", "clients_per_round": 5, "policy": Schedule(num_steps=3)},
        {},
    ),
}
#: The same for processes that share the samples of a client's batches.
SHARED = {
    "client module": CASES["client module"],
    "uneven": CASES["uneven"],
    "matching": CASES["matching"],
    "second model": CASES["second model"],
    "gossip": lambda: (client_module(), {"aggregator": Gossip("ring"), "clients_per_round": 5}, {}),
    "clusters": lambda: (
        client_module(),
        {"aggregator": Staged([1], [FedAvg(), ClusteredFL(eps1=9.0, eps2=0.0, warmup=1)])},
        {},
    ),
    "foreign": lambda: (Foreign(dropout=0.0), {"clients_per_round": 4}, {"batch_size": 5}),
    "contributions": lambda: (
        client_module(),
        {"policy": PersonalizedPolicyGradient([{"num_steps": 1}, {"num_steps": 3}], floor=0.0)},
        {},
    ),
    "losses": CASES["losses"],
    "control variates": lambda: (
        client_module(),
        {"aggregator": Staged([2], [Scaffold("I"), Scaffold("II")]), "clients_per_round": 5},
        {},
    ),
    "batchnorm": lambda: (
        Measured(batchnorm=True, dropout=0.0, optimizer=sgd),
        {
            "aggregator": FedControl(),
            "policy": Learner(),
            "buffers": "local",
            "clients_per_round": 4,
        },
        # Two samples of every batch for each of three processes: BatchNorm cannot train on one.
        {"drop_last": True, "partition": IID()},
    ),
    "augmented": CASES["augmented"],
    "schedule": lambda: (Scheduled(), {"clients_per_round": 4}, {"batch_size": 5}),
    "partly local": lambda: (
        Foreign(dropout=0.0, optimizer=sgd),
        {
            "local_parameters": ["net.4.*"],
            "policy": Schedule(phases=[Phase("local", num_steps=2), Phase("shared")]),
            "clients_per_round": 3,
        },
        {"batch_size": 6},
    ),
    "kept": lambda: (
        Foreign(dropout=0.0, optimizer=sgd),
        {"optimizer_state": "keep", "clients_per_round": 4},
        {"batch_size": None},
    ),
}


class Poison(L.Callback):
    """Make one client's update infinite."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loop = next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))
        step, plan = loop.plan().schedule[batch_idx], loop.plan()
        if 4 in plan.clients[list(step.rows)].tolist() and not step.last:
            next(pl_module.parameters()).data.fill_(torch.inf)


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


#: Cases with a state that only a third round shows; the others have two.
LONG = (
    "kept", "falls of losses", "clusters", "stream", "layers", "private", "a policy that learns",
    "reinforce", "plateau", "stages", "contributions", "vectorized, kept",
)  # fmt: skip


def fit(
    case, devices, folder, rounds=None, callbacks=(), ckpt_path=None, strategy=None, dtype="float64"
):
    """Train a case; return its parameters and its table."""
    L.seed_everything(1, verbose=False)
    module, loop_options, data_options = (SHARED if strategy == "ddp" else CASES)[case]()
    kind = getattr(torch, dtype)
    of_the_case, plugins = loop_options.pop("callbacks", ()), loop_options.pop("plugins", None)
    loop = FederatedLoop(seed=1, **loop_options)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or "client_parallel",
        max_epochs=rounds or (3 if case in LONG else 2),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=plugins,
        callbacks=[loop, watch, RoundCheckpoint(str(folder)), *of_the_case, *callbacks],
        num_sanity_val_steps=0,
    )
    federation = data(kind, **data_options)
    with frozen_once(case == "frozen"):
        trainer.fit(module.to(kind), datamodule=federation, ckpt_path=ckpt_path)
    # Before a test, for which DDP sends what process 0 has to all.
    user = module.module if isinstance(module, VectorizedClients) else module
    state = {name: t.clone() for name, t in user.state_dict().items()}
    tested = trainer.test(module, datamodule=federation, verbose=False) if not callbacks else []
    return {
        "state": state,
        "rows": loop.rows,
        "store": dict(loop.store.rows),
        "test": tested,
        "participation": watch.participation.csv_gz(),
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


def train(devices, out, cases, repeat=False):
    """Train cases, each in a fit; with ``repeat`` five times."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        runs = [{case: fit(case, devices, folder) for case in cases} for _ in range(4 * repeat + 1)]
    save(runs if repeat else runs[0], out, devices)


def train_all(devices, out, cases, shared):
    """Train cases and those that share samples; with ``kept``, resume, fail and have float32."""
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        found = {case: fit(case, devices, folder) for case in cases}
        if "kept" in cases:
            place = Path(out) / f"resumed.{devices}"
            fit("kept", devices, place, rounds=2, callbacks=[L.Callback()])
            found["resumed"] = fit("kept", devices, folder, ckpt_path=str(place / "last.ckpt"))
            found["poison"] = fit("client module", devices, folder, callbacks=[Poison()])
            found["float32"] = fit("uneven", devices, folder, dtype="float32")
        for case in shared:
            found[f"ddp, {case}"] = fit(case, devices, folder, strategy="ddp")
    save(found, out, devices)


def resume(devices, out, checkpoint):
    """Go on with a run of the case ``kept``."""
    quiet()
    save({"resumed": fit("kept", devices, out, ckpt_path=checkpoint)}, out, devices)


def fail(how, devices, out):
    """Let process 1 end in its second round: ``raise``, ``kill`` or ``freeze``."""
    quiet()
    strategy = ClientParallelStrategy(timeout=10 if how == "freeze" else 60)
    fit("uneven", devices, out, callbacks=[Fail(how)], strategy=strategy)


def miss_a_metric(devices, out):
    """Log a metric of which only one process knows."""
    quiet()
    CASES["one client"] = lambda: (Foreign(), {"clients_per_round": 1}, {})
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
    module = CountsInValidation()
    CASES["one client"] = lambda: (module, {}, {})
    fit("one client", devices, out)
    save(module.found, out, devices)


if __name__ == "__main__":
    train(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
