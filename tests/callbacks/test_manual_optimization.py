"""Modules that optimize manually, with one or several optimizers."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.aggregators import FedAvg, FedCM, FedDyn, FedNova, QFedAvg, Scaffold
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.policies import Schedule
from lightning_fl.runners import Phase
from lightning_fl.testing import Run, check_federation
from lightning_fl.types import FederationError
from only import Only

ALONE = "ignore:.*one client after another, not at once. it optimizes manually"


class GAN(L.LightningModule):
    """A generator that steps in every second batch, and a critic with a scheduler a step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
        self.critic = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        self.double()
        self.counts, self.states = [], []

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = real.roll(1, 0)[:, :4]  # the same in a federation and outside
        of_generator, of_critic = self.optimizers()
        trainer = self.trainer
        self.counts.append((batch_idx, self.global_step, trainer.is_last_batch))
        if batch_idx == 0:
            self.states.append((len(of_generator.state), len(of_critic.state)))
        with self.toggled_optimizer(of_critic):
            judged = self.critic(real), self.critic(self.generator(noise).detach())
            loss = F.softplus(-judged[0]).mean() + F.softplus(judged[1]).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(of_critic, 0.1, "norm")
            of_critic.step()
        if batch_idx % 2 == 0:
            with self.toggled_optimizer(of_generator):

                def closure():
                    of_generator.zero_grad()
                    self.manual_backward(F.softplus(-self.critic(self.generator(noise))).mean())

                of_generator.step(closure=closure)
        self.lr_schedulers().step()
        self.log("critic", loss, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.log("judged", self.critic(batch[0]).mean())

    def configure_optimizers(self):
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        return [of_generator, of_critic], [torch.optim.lr_scheduler.StepLR(of_critic, 3, 0.7)]


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


def test_the_check_of_a_federation_passes(data):
    def make():
        loop = FederatedLoop(buffers="average", optimizer_state="keep")
        return Run(GAN(), data(num_clients=3), loop, trainer={"limit_val_batches": 0})

    columns = "order", "resume", "vectorized", "plain"
    results = check_federation(make, columns=columns)
    outcomes = [(result.column, result.outcome) for result in results]
    expected = ["equal", "equal", "refused", "equal"]
    assert outcomes == list(zip(columns, expected, strict=True)), results
    assert results[2].detail.endswith("not at once: it optimizes manually")


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("wrap", [lambda m: m, VectorizedClients], ids=["plain", "vectorized"])
def test_a_client_is_not_changed_by_others(fit, flat, wrap):
    found = []
    for clients in ([0], [2], [0, 2]):
        module, rule = GAN(), FedAvg(weighting="uniform")
        loop = FederatedLoop(rule, Schedule(num_steps=4), Only(clients), buffers="average")
        fit(wrap(module), loop, rounds=1)
        found.append(flat(module))
    assert not torch.allclose(found[0], found[1])
    assert torch.allclose((found[0] + found[1]) / 2, found[2], rtol=0, atol=1e-12)


def test_a_module_counts_the_steps_of_its_client(fit):
    module = GAN()
    loop = FederatedLoop(policy=Schedule(num_steps=3), buffers="average", clients_per_round=2)
    fit(module, loop, rounds=2)
    # A batch has one step of the critic, every second one of the generator before.
    first = [(0, 0, False), (1, 2, False), (2, 3, True)]
    second = [(0, 5, False), (1, 7, False), (2, 8, True)]
    assert module.counts == [*first, *first, *second, *second]
    assert [row["num_steps"] for row in loop.rows] == [6, 6]


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
@pytest.mark.parametrize(
    ("options", "later"),
    [
        ({}, (0, 0)),
        ({"optimizer_state": "keep"}, (6, 4)),
        ({"optimizer_state": "local", "local_parameters": ["generator.*"]}, (6, 0)),
        ({"optimizer_state": "local", "local_parameters": ["critic.*"]}, (0, 4)),
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
    message = f"{type(rule).__name__}.* needs one optimizer step .*, and GAN optimizes manually"
    with pytest.raises(FederationError, match=message):
        fit(module, FederatedLoop(rule, buffers="average"))


def test_parts_that_add_to_gradients_are_refused(fit):
    class Part(ClientPart):
        def start(self, client, memory, broadcast):
            client.add_to_gradients(lambda params, gradients: {})

        def end(self, client, memory):
            return {}

    class Rule(FedAvg):
        def client_parts(self):
            return [Part()]

    with pytest.raises(FederationError, match="GAN optimizes manually, and a client part"):
        fit(GAN(), FederatedLoop(Rule(), buffers="average"))


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
