"""Modules that optimize manually, with one or several optimizers."""

import lightning as L
import pytest
import torch
from torch import nn

from federations import Adversaries
from lightning_fl.aggregators import FedCM, FedDyn, FedNova, QFedAvg, Scaffold
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.policies import Schedule
from lightning_fl.runners import Phase
from lightning_fl.types import FederationError


class GAN(Adversaries):
    """It notes its counts, and how much its optimizers have learned."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.double()
        self.counts, self.states = [], []

    def training_step(self, batch, batch_idx):
        self.counts.append((batch_idx, self.global_step, self.trainer.is_last_batch))
        if batch_idx == 0:
            self.states.append(tuple(len(optimizer.state) for optimizer in self.optimizers()))
        return super().training_step(batch, batch_idx)


class Two(L.LightningModule):
    """Two numbers whose gradients are 1, each with an optimizer, a rate and a scheduler."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in "ab")

    def training_step(self, batch, batch_idx):
        for i, param in enumerate((self.first, self.second)):
            optimizer, scheduler = self.optimizers()[i], self.lr_schedulers()[i]
            optimizer.zero_grad()
            self.manual_backward(param + 0 * batch[0].sum())
            optimizer.step()
            scheduler.step()
        return {"loss": torch.ones(())}

    def validation_step(self, batch, batch_idx):
        self.log("first", self.first)

    def configure_optimizers(self):
        optimizers = [
            torch.optim.SGD([param], lr=lr) for param, lr in ((self.first, 0.1), (self.second, 1.0))
        ]
        halved = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
        return optimizers, halved


def test_a_module_counts_the_steps_of_its_client(fit):
    module = GAN()
    loop = FederatedLoop(policy=Schedule(num_steps=3), buffers="average", clients_per_round=2)
    fit(module, loop, rounds=2)
    # A batch has one step of the critic, and some have one of the generator.
    first = [(0, 0, False), (1, 2, False), (2, 4, True)]
    second = [(0, 5, False), (1, 7, False), (2, 8, True)]
    assert module.counts == [*first, *first, *second, *second]
    assert [row["num_steps"] for row in loop.rows] == [6, 6]


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
@pytest.mark.parametrize(
    ("options", "later"),
    [
        ({}, (0, 0)),
        ({"optimizer_state": "keep"}, (2, 2)),
        ({"optimizer_state": "local", "local_parameters": ["generator.*"]}, (2, 0)),
        ({"optimizer_state": "local", "local_parameters": ["critic.*"]}, (0, 2)),
    ],
)
def test_each_optimizer_of_a_client_is_fresh_or_kept(fit, options, later):
    module, loop = GAN(), FederatedLoop(buffers="average", clients_per_round=4, **options)
    fit(module, loop, rounds=2)
    assert module.states == [(0, 0)] * 4 + [later] * 4


def test_a_policy_scales_the_rates_of_all_optimizers_by_one_ratio(fit):
    module = Two()
    loop = FederatedLoop(policy=Schedule(lr=0.2, num_steps=2), clients_per_round=2)
    fit(module, loop, rounds=2)
    # Twice the rates; each client of a round starts from the same schedule.
    total = (1 + 0.5) + (0.25 + 0.125)
    assert module.first.item() == pytest.approx(-2 * 0.1 * total)
    assert module.second.item() == pytest.approx(-2 * 1.0 * total)
    assert [row["lr"] for row in loop.rows] == pytest.approx([0.15, 0.15 / 4])
    assert [group["lr"] for o in loop.runner.optimizers for group in o.param_groups] == [
        pytest.approx(0.1 / 16),
        pytest.approx(1.0 / 16),
    ]


def test_phases_hold_the_parameters_of_an_optimizer(fit):
    module = GAN()
    start = {name: param.detach().clone() for name, param in module.named_parameters()}
    loop = FederatedLoop(policy=Schedule(phases=[Phase(["critic.*"])]), buffers="average")
    fit(module, loop, rounds=1)
    moved = {n.split(".")[0] for n, p in module.named_parameters() if not torch.equal(p, start[n])}
    assert moved == {"critic"}


@pytest.mark.parametrize(
    "rule",
    [Scaffold(), Scaffold(option="I"), FedNova(), FedDyn(), FedCM(), QFedAvg()],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_that_need_a_step_in_each_batch_are_refused(fit, rule):
    module = GAN()
    module.federated_losses = lambda batch: batch[0].sum(1)
    words = f"{type(rule).__name__} .*GAN optimizes manually|GAN optimizes manually, and a client"
    with pytest.raises(FederationError, match=words):
        fit(module, FederatedLoop(rule, buffers="average"))


def test_personal_models_are_evaluated_but_not_trained(fit, data, tmp_path):
    def metric(module, batch):
        return module.critic(batch[0])[:, 0]

    samples = data(local_test_size=0.3)
    callback = PersonalizedEvaluation(steps=1, metric=metric)
    with pytest.raises(FederationError, match="trains a copy of GAN, which optimizes manually"):
        fit(GAN(), datamodule=samples, callbacks=[callback], rounds=1)
    callback = PersonalizedEvaluation(steps=0, metric=metric)
    fit(GAN(), datamodule=samples, callbacks=[callback], rounds=1)
    assert [set(row) >= {"server"} for row in callback.rows] == [True] * 4
