"""The table of federations: each rule, term, policy, sampler and data module is in a row.

It imports all of them. ``test_federations.py`` passes the rows through ``check_federation``,
``accelerator_cases.py`` trains them on another device, and ``test_strategies.py`` trains some on
several processes.
"""

# ruff: noqa: F403, F405

from functools import partial
from importlib.util import find_spec

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import linear
from adapted import Adapted
from layouts import cifar_layout, mnist_layout, speech_commands_layout, spoken_digits_layout
from lightning_fl import ClientModule
from lightning_fl.aggregators import *
from lightning_fl.callbacks import *
from lightning_fl.datamodules import *
from lightning_fl.models import *
from lightning_fl.objectives import *
from lightning_fl.optimizers import Adaptive, PFedMe
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import *
from lightning_fl.runners import Phase
from lightning_fl.samplers import *
from lightning_fl.testing import Run
from lightning_fl.transforms import *

FEATURES, CLASSES, CLIENTS = 6, 3, 5

# --- parts ----------------------------------------------------------------------------------------

SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


def samples(count=80, **options):
    random = torch.Generator().manual_seed(0)
    y = torch.arange(count + 21) % CLASSES
    x = torch.randn(count + 21, FEATURES, generator=random) + y[:, None]
    held = TensorDataset(x[count:], y[count:])
    options = {"partition": Dirichlet(0.5, min_size=8), "batch_size": 4} | options
    return FederatedDataModule(
        *(TensorDataset(x[:count], y[:count]), held, held),
        **{"num_clients": CLIENTS, "eval_batch_size": 16, "seed": 1} | options,
    )


def module(*terms, optimizer=SGD):
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    return ClientModule(net, terms, optimizer)


def with_norm(**options):
    norm = nn.BatchNorm1d(5, **options)
    return nn.Sequential(nn.Linear(FEATURES, 5), norm, nn.ReLU(), nn.Linear(5, CLASSES))


def matched(net, **options):
    """Match the representations of a network, whose pooling is reversed."""
    return ClientModule(net, [RepresentationMatching(0.01, **options), Proximal(0.1)], SGD)


def frozen(*terms):
    made = module(*terms)
    made.net[0].requires_grad_(False)
    return made


class Foreign(linear.Foreign):
    """A scheduler a step, a metric and more logging; it knows no processes."""

    def __init__(self, batchnorm=False, dropout=0.2, optimizer=torch.optim.Adam, metric=True):
        super().__init__(FEATURES, CLASSES, batchnorm, dropout, optimizer)
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

    test_step = linear.Foreign.validation_step

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


#: A foreign module whose clients can be vectorized.
normalized = partial(Foreign, True, 0.0, MOMENTUM, metric=False)


class Plateau(Foreign):
    """What validation and training find changes the learning rate, and may end the run."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        monitored = [("val_loss", 0.7), ("val_sum", 0.9), ("loss", 0.8), ("accuracy", 0.9)]
        return [optimizer], [
            {"scheduler": plateau(optimizer, factor=factor, patience=0), "monitor": name}
            for name, factor in monitored
        ]

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.current_epoch % 2 == 0:  # the schedule of other rounds has its last value
            self.log("val_sum", self.net(batch[0]).square().sum(), reduce_fx="sum", on_epoch=True)


class Scheduled(Foreign):
    """A rate that ends at zero with the run, a warm-up, and hooks that write to the parameters."""

    def __init__(self):
        super().__init__(dropout=0.0, metric=False, optimizer=MOMENTUM)

    def on_train_epoch_start(self):
        for param in self.parameters():
            param.data.mul_(0.9)

    def training_step(self, batch, batch_idx):
        return (1 + batch_idx + self.global_step) * super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for param in self.parameters():
            param.data.clamp_(-0.3, 0.3)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=0.05)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Adversaries(L.LightningModule):
    """A generator that steps in every second batch, and a critic with a scheduler a step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        real, noise = batch[0], batch[0][:, :2]
        of_generator, of_critic = self.optimizers()
        with self.toggled_optimizer(of_critic):
            judged = self.critic(real), self.critic(self.generator(noise).detach())
            loss = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_critic, 0.1, "norm")
            of_critic.step()
        if self.global_step % 3 != 2:
            with self.toggled_optimizer(of_generator):

                def closure():
                    of_generator.zero_grad()
                    self.manual_backward(F.softplus(-self.critic(self.generator(noise))).mean())

                of_generator.step(closure=closure)
        self.lr_schedulers().step()
        self.log("critic", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.critic(batch[0]).mean(), batch_size=len(batch[0]))

    test_step = validation_step

    def configure_optimizers(self):
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        of_critic = MOMENTUM(self.critic.parameters(), lr=0.1)
        return [of_generator, of_critic], [torch.optim.lr_scheduler.StepLR(of_critic, 3, 0.7)]


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


class Loaded(LightningDataModule):
    """A user's data module."""

    def train_dataloader(self):
        x = torch.rand(24, FEATURES, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=4, shuffle=True)


def write_data(root):
    """Write small data sets in the layouts of the real ones."""
    mnist_layout(root)
    mnist_layout(root, "FashionMNIST")
    cifar_layout(root)
    spoken_digits_layout(root)
    speech_commands_layout(root)


def small(kind, root, **options):
    return kind(str(root), num_clients=2, batch_size=4, **options)


def writers():
    """Four clients with pictures."""
    x = torch.rand(4, 6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    clients = [TensorDataset(each, torch.arange(6)) for each in x]
    return FromClients(clients, val_size=4, batch_size=3)


def sequences(**options):
    """Sequences of letters whose next one is known."""
    x = torch.arange(24)[:, None] + torch.arange(5)
    train = TensorDataset(x % 7, (x[:, -1] + 1) % 7)
    return FederatedDataModule(train, train, num_clients=3, batch_size=4, seed=1, **options)


def rows_of_texts():
    datasets = pytest.importorskip("datasets", reason='needs pip install ".[hf]"')
    texts = [[(i * j) % 7 for j in range(5)] for i in range(24)]
    columns = {"x": texts, "label": [i % 7 for i in range(24)], "role": [i % 3 for i in range(24)]}
    rows = datasets.Dataset.from_dict(columns)
    return FromHuggingFace(rows, "x", partition_by="role", val_size=4, batch_size=4)


def text():
    """Return a text network, with an adapter where peft is installed."""
    net = TextTransformer(40, 3, 8, 1, 2, 8)
    return LoRA(net, 2, target_modules=["query"]) if find_spec("peft") else net


# --- rows -----------------------------------------------------------------------------------------


def row(made=None, data=None, callbacks=(), trainer=None, **options):
    """Return a federation; a network is trained with SGD."""
    made = module() if made is None else made
    if not isinstance(made, L.LightningModule):
        made = ClientModule(made, optimizer=SGD)
    options = {"policy": Schedule(num_steps=2), "buffers": "average", "seed": 3} | options
    loop = FederatedLoop(**options)
    loop.table_name = None
    data = samples() if data is None else data
    return Run(made.float(), data, loop, callbacks, {"accelerator": "cpu"} | (trainer or {}))


def uneven(*args, **options):
    """Return a federation whose clients differ in work and rate."""
    return row(*args, policy=Uneven(), **options)


GRID = {"lr": [0.05, 0.1], "num_steps": [1, 2, 3]}
MATCHED = {"gamma": 1.0, "client_variance": 0.5, "prior_variance": 5.0}
RANKS = {1: 0.4, 2: 0.6}
#: Functions of the folder of :func:`write_data` that return a federation.
ROWS = {
    "FedAvg, Proximal, uneven steps": lambda root: uneven(
        module(Proximal(0.1)), samples(batch_size=7), aggregator=FedAvg("uniform")
    ),
    "FedOpt, WeightDivergence, WeightedSampler": lambda root: row(
        module(WeightDivergence(0.1)),
        aggregator=FedOpt(),
        policy=Schedule(lr=0.1, num_steps=3, decay=0.9),
        sampler=WeightedSampler(),
        clients_per_round=3,
    ),
    "Downpour, EntropyRegularizer, UniformSampler": lambda root: row(
        module(EntropyRegularizer(0.9, 0.1)),
        samples(batch_size=7),
        aggregator=Downpour(),
        sampler=UniformSampler(),
        clients_per_round=3,
    ),
    "FedAvgM, RepresentationMatching": lambda root: row(
        module(
            RepresentationMatching(0.1, optimizer=partial(torch.optim.Adam, eps=0.1), lr_factor=0.5)
        ),
        aggregator=FedAvgM(scheduler=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1])),
        policy=Stragglers(0.9, Schedule(num_steps=3)),
    ),
    "FedAdagrad, Ditto, RoundRobinSampler": lambda root: row(
        module(Ditto(0.5, lr_factor=0.5)),
        aggregator=FedAdagrad(),
        sampler=RoundRobinSampler(),
        clients_per_round=3,
    ),
    "FedAdam, MOON, DiscreteGaussianReinforce": lambda root: row(
        module(MOON()),
        aggregator=FedAdam(),
        policy=DiscreteGaussianReinforce(GRID, learn_precision=True),
    ),
    "FedYogi, APFL": lambda root: uneven(module(APFL(0.9)), aggregator=FedYogi()),
    "FedNova, momentum": lambda root: uneven(module(optimizer=MOMENTUM), aggregator=FedNova()),
    "Scaffold I, Quantize": lambda root: row(
        aggregator=Scaffold("I"), update_transforms=[TopK(0.3), Quantize(4)], clients_per_round=3
    ),
    "Scaffold II, momentum": lambda root: uneven(
        module(optimizer=MOMENTUM), aggregator=Scaffold("II"), clients_per_round=4
    ),
    "FedDyn, TopK": lambda root: uneven(aggregator=FedDyn(0.1), update_transforms=[TopK(0.3)]),
    "FedExP, FedNTD": lambda root: uneven(module(FedNTD(temperature=2.0)), aggregator=FedExP()),
    "FedCM, FedLC": lambda root: row(
        module(FedLC()), samples(batch_size=7), aggregator=FedCM(), clients_per_round=3
    ),
    "FedRS, FedDecorr": lambda root: row(
        module(FedRS(0.5), FedDecorr()),
        policy=PersonalizedPolicyGradient([{"alpha": 0.2}, {"alpha": 0.8}]),
    ),
    "FedProto, local networks": lambda root: uneven(
        module(FedProto()), samples(batch_size=7), local_parameters=["net.*"], clients_per_round=3
    ),
    "FedRoD, clients with uneven work": lambda root: uneven(
        module(FedRoD()), samples(batch_size=7), clients_per_round=3
    ),
    "FedSAM, PowerOfChoice": lambda root: uneven(
        FedSAM(nn.Linear(FEATURES, CLASSES), adaptive=True, optimizer=SGD),
        aggregator=PowerOfChoice(),
        sampler=HighLossSampler(4),
        clients_per_round=2,
    ),
    "QFedAvg, FromDataModule": lambda root: row(
        MLPClassifier([FEATURES, 4, CLASSES]),
        FromDataModule(Loaded(), num_clients=3, val_size=4),
        aggregator=QFedAvg(2.0),
        policy=Stragglers(0.5, Schedule(num_steps=4), drop=True),
    ),
    "AFL, PersonalizedEvaluation, unseen clients": lambda root: row(
        None,
        samples(local_test_size=0.3, partition=Dirichlet(0.5, min_size=10), unseen_clients=0.2),
        [PersonalizedEvaluation(steps=2, local_steps=2)],
        aggregator=AFL(0.1),
    ),
    "AFLSampler, learned steps": lambda root: row(
        aggregator=AFL(0.3, mode="sampling"),
        sampler=AFLSampler(),
        clients_per_round=3,
        policy=DiscreteGaussianReinforce(GRID, loss="clients"),
    ),
    "FedControl, PersonalizedPolicyGradient": lambda root: row(
        module(Proximal(0.1)),
        aggregator=FedControl(),
        policy=PersonalizedPolicyGradient([{"mu": 0.0}, {"mu": 2.0}], floor=0.0),
    ),
    "FedCostWAvg, SpokenDigits": lambda root: row(
        KeywordCNN(width=2, hidden=8),
        small(SpokenDigits, root, val_size=10, augment=Augment()),
        aggregator=FedCostWAvg(),
        policy=PersonalizedPolicyGradient([{"num_steps": 1}, {"num_steps": 2}], method="reward"),
    ),
    "FedPIDAvg, SpeechCommands": lambda root: row(
        KeywordCNN(width=2, hidden=8),
        small(SpeechCommands, root, keywords=["yes", "no"]),
        aggregator=FedPIDAvg(cancellation=0.0),
        policy=Schedule(num_steps=1),
    ),
    "ClusteredFL, RunReport": lambda root: uneven(
        None,
        samples(local_test_size=0.3, partition=Dirichlet(0.5, min_size=10)),
        [RunReport()],
        aggregator=ClusteredFL(eps1=99.0, eps2=0.0, warmup=0, min_size=2),
    ),
    "Gossip, a foreign module": lambda root: uneven(Foreign(), aggregator=Gossip("ring")),
    "FedALA, PersonalizedEvaluation": lambda root: uneven(
        module(),
        samples(local_test_size=0.3, partition=Dirichlet(0.5, min_size=10)),
        [PersonalizedEvaluation(steps=0)],
        aggregator=FedALA(first_passes=2),
        clients_per_round=4,
    ),
    "FedAMP, Proximal": lambda root: uneven(
        module(Proximal(0.5)), aggregator=FedAMP(), clients_per_round=3
    ),
    "HeteroFL, BatchNorm": lambda root: uneven(
        ClientModule(with_norm(track_running_stats=False), optimizer=partial(SGD, momentum=0.9)),
        samples(drop_last=True),
        aggregator=HeteroFL([1, 0.5, 0.2], drawn=True, window="rolling"),
        clients_per_round=4,
    ),
    "IFCA, BatchNorm": lambda root: uneven(
        with_norm(), samples(drop_last=True), aggregator=IFCA(3), clients_per_round=4
    ),
    "CoordinateMedian, Backdoor": lambda root: row(
        callbacks=[Backdoor([0, 2], target=1, boost=3.0), ClientFaults(dropout=0.2)],
        aggregator=CoordinateMedian(),
    ),
    "TrimmedMean, ClientAttack": lambda root: row(
        callbacks=[ClientAttack([0, 2], "noise", 3.0)], aggregator=TrimmedMean()
    ),
    "Krum, LabelFlip": lambda root: row(callbacks=[LabelFlip([0, 2])], aggregator=Krum()),
    "GeometricMedian, ClientFaults": lambda root: row(
        callbacks=[ClientFaults(nan=0.2, blowup=0.3, dropout=0.2)], aggregator=GeometricMedian()
    ),
    "NormClipping, PerFedAvg": lambda root: row(
        PerFedAvg(nn.Linear(FEATURES, CLASSES), 0.1, True, SGD),
        samples(drop_last=True),
        aggregator=NormClipping(0.1),
    ),
    "DPFedAvg, PoissonSampler": lambda root: row(
        aggregator=DPFedAvg(quantile=0.5, count_noise=2.0, clip_norm=0.1),
        sampler=PoissonSampler(),
        clients_per_round=2,
    ),
    "SecureAggregation, DPFedAvg": lambda root: row(
        callbacks=[ClientFaults(dropout=0.3)],
        aggregator=SecureAggregation(DPFedAvg(clip_norm=0.1, noise_by="clients"), bits=24),
        update_transforms=[TopK(0.3)],
        sampler=UniformSampler(),
        clients_per_round=4,
    ),
    "Staged, StagedPolicy": lambda root: row(
        aggregator=Staged([1], [ClusteredFL(9.0, 0.0, 0), FedControl()]),
        policy=StagedPolicy([1], [Schedule(lr=0.1), DiscreteGaussianReinforce(GRID)]),
    ),
    "PFNM": lambda root: row(aggregator=PFNM(**MATCHED)),
    "StreamingPFNM, a stream": lambda root: row(
        None, samples(stream_steps=2), aggregator=StreamingPFNM(**MATCHED)
    ),
    "FedMA": lambda root: row(aggregator=FedMA(**MATCHED)),
    "FedBuff, AsynchronousSampler": lambda root: row(
        normalized(),
        samples(drop_last=True),
        [ClientFaults(dropout=0.2, speed_sigma=1.0)],
        aggregator=FedBuff(max_staleness=3, momentum=0.5),
        sampler=AsynchronousSampler(4),
        clients_per_round=2,
    ),
    "FedAsync": lambda root: row(
        callbacks=[ClientFaults(speed_sigma=1.0)],
        aggregator=FedAsync(),
        sampler=AsynchronousSampler(4),
        clients_per_round=1,
    ),
    "FlexLoRA": lambda root: uneven(Adapted(2), aggregator=FlexLoRA(RANKS)),
    "ZeroPadding": lambda root: row(Adapted(2), aggregator=ZeroPadding(RANKS, "norm")),
    "FedEM": lambda root: row(FedEM(nn.Linear(FEATURES, CLASSES), 2, SGD), clients_per_round=3),
    "FedEM, Gossip": lambda root: row(
        FedEM(nn.Linear(FEATURES, CLASSES), 2, SGD), aggregator=Gossip("ring")
    ),
    "AdaptiveMu, frozen layers": lambda root: row(
        frozen(Proximal(0.1)),
        policy=AdaptiveMu(0.5, policy=Schedule(num_steps=2), patience=1),
        trainer={"gradient_clip_val": 0.1},
    ),
    "BatchNorm, a policy that learns": lambda root: row(
        normalized(metric=True),
        samples(drop_last=True),
        [ClientFaults(dropout=0.3)],
        aggregator=FedAdam(),
        policy=Learner(),
    ),
    "BatchNorm, kept": lambda root: row(
        normalized(),
        samples(drop_last=True),
        buffers="local",
        optimizer_state="keep",
        clients_per_round=4,
    ),
    "BatchNorm, of the server, clipped": lambda root: row(
        Foreign(True, 0.0, torch.optim.Adam, metric=False),
        samples(drop_last=True),
        buffers="server",
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "partly local": lambda root: row(
        normalized(),
        samples(drop_last=True),
        local_parameters=["type:_BatchNorm", "net.4.*"],
        policy=Schedule(num_steps=3, phases=[Phase("local", num_steps=1), Phase("shared")]),
        optimizer_state="keep",
        clients_per_round=4,
        trainer={"check_val_every_n_epoch": 2},
    ),
    # Without dropout: after BatchNorm, torch draws it on accelerators in another order.
    "plateau, EarlyStopping": lambda root: row(
        Plateau(True, dropout=0.0, metric=False),
        samples(drop_last=True),
        [EarlyStopping("val_loss", patience=1)],
    ),
    "a schedule that ends with the run": lambda root: row(Scheduled(), clients_per_round=4),
    "two optimizers, kept": lambda root: uneven(
        Adversaries(), optimizer_state="keep", clients_per_round=4
    ),
    "accumulated gradients": lambda root: uneven(
        Foreign(metric=False), trainer={"accumulate_grad_batches": 2}
    ),
    "PFedMe, batches that are weighted": lambda root: uneven(
        module(optimizer=partial(PFedMe, inner_steps=2)),
        samples(batch_size=None),
        optimizer_state="keep",
        clients_per_round=3,
    ),
    "Adaptive, kept": lambda root: row(
        module(optimizer=partial(Adaptive, rule="adam", lr=0.05, tau=0.1)),
        optimizer_state="keep",
        clients_per_round=3,
    ),
    "FromClients, FemnistCNN": lambda root: row(FemnistCNN(width=2, hidden=4), writers()),
    "FromHuggingFace, TextTransformer": lambda root: row(
        TextTransformer(7, 7, 4, 1, 1, length=5), rows_of_texts()
    ),
    "CharLSTM": lambda root: row(CharLSTM(7, 2, 3, 1), sequences()),
    "Digits, augmented": lambda root: uneven(
        MLPClassifier([64, 4, 10]),
        Digits(num_clients=3, batch_size=8, augment=True, client_rotations=[0, 90, 180], seed=1),
    ),
    "MNIST, LeNet": lambda root: row(LeNet(), small(MNIST, root, val_size=4)),
    "FashionMNIST": lambda root: row(
        matched(FashionCNN(width=2)), small(FashionMNIST, root, val_size=4)
    ),
    "CIFAR10, augmented": lambda root: row(
        CifarCNN(width=2, hidden=8), small(CIFAR10, root, val_size=4, augment=True)
    ),
    "SpokenDigits, cached": lambda root: row(
        matched(KeywordCNN(width=2, hidden=8), source="same"),
        small(SpokenDigits, root, val_size=0, cache_features=True),
    ),
    "TopicText, LoRA": lambda root: row(
        text(), TopicText(3, 40, 8, 60, 20, num_clients=2, batch_size=4)
    ),
}
#: Rows with a state that only a third round shows; the others have two rounds.
LONG = (
    *("FedAdam, MOON, DiscreteGaussianReinforce", "FedPIDAvg, SpeechCommands", "FedMA"),
    *("ClusteredFL, RunReport", "Staged, StagedPolicy", "StreamingPFNM, a stream"),
    *("DPFedAvg, PoissonSampler", "SecureAggregation, DPFedAvg", "FedBuff, AsynchronousSampler"),
    *("FedAsync", "BatchNorm, kept"),
    *("BatchNorm, a policy that learns", "plateau, EarlyStopping", "FedSAM, PowerOfChoice"),
    *("PFedMe, batches that are weighted", "Adaptive, kept", "two optimizers, kept"),
    *("FedAMP, Proximal", "FedRoD, clients with uneven work", "FedProto, local networks"),
    *("IFCA, BatchNorm", "FedALA, PersonalizedEvaluation", "HeteroFL, BatchNorm"),
)
#: Rows that cannot be vectorized, with the reason that is given.
NOT_VECTORIZED = {
    "Gossip, a foreign module": "training_step logs a metric",
    "BatchNorm, a policy that learns": "training_step logs a metric",
    "a schedule that ends with the run": "overrides hooks that run per step",
    "CharLSTM": "Batching rule not implemented",
    "two optimizers, kept": "it optimizes manually",
    "accumulated gradients": "it accumulates gradients",
}
if find_spec("opacus"):
    NOT_VECTORIZED["DPSGD"] = "boolean mask"
    LONG += ("DPSGD",)
    ROWS["DPSGD"] = lambda root: row(
        DPSGD(nn.Linear(FEATURES, CLASSES), batch_size=6, delta=0.01, optimizer=SGD),
        samples(batch_size=None),
        clients_per_round=3,
    )
