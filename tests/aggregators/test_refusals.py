"""What rules refuse: use outside of a loop, local training, modules, stages of ``Staged``."""

# ruff: noqa: F403, F405

from functools import partial

import pytest
import torch

from lightning_fl import ClientModule
from lightning_fl.aggregators import *
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.objectives import Proximal
from lightning_fl.types import FederationError
from mlp import MATCHED
from rounds import aggregate, of, sent
from two_classes import samples


@pytest.mark.parametrize(
    ("make", "extras", "words"),
    [
        (AFL, {}, "requires the number of clients"),
        (DPFedAvg, {}, "use it in a FederatedLoop, or call its setup"),
        (FedControl, {}, "requires loss_before of the clients"),
        (FedDyn, {}, "requires the number of clients"),
        (FedNova, {}, "give the update num_steps and lr"),
        (Gossip, {}, "Gossip requires the number of clients"),
        (PFNM, {}, "FederatedLoop"),
        (QFedAvg, {}, "set lr and loss_before"),
        (Scaffold, {}, "add control_change to the extras"),
        (Scaffold, {"control_change": torch.ones(1, 2)}, "requires the number of clients"),
    ],
)
def test_rule_outside_of_a_loop_says_what_it_needs(make, extras, words):
    def train(rule):
        rule.start(torch.zeros(2))
        rule.models_for(torch.tensor([0]))
        rule.update(sent(torch.ones(1, 2), extras=extras))
        rule.compute()

    with pytest.raises(FederationError, match=words):
        train(make())


def test_average_over_all_clients_needs_their_samples():
    rule = of(2, FedAvg(normalization="all"))
    with pytest.raises(FederationError, match="number of samples of all clients"):
        aggregate(rule, torch.zeros(1), sent([[1.0]]))


def test_weights_that_sum_to_more_than_1_are_refused():
    with pytest.raises(FederationError, match=r"sum to at most 1, got 0\.7 and 0\.5"):
        FedControl(0.7, 0.5)


SGD, MOMENTUM = (partial(torch.optim.SGD, lr=0.1, momentum=m) for m in (0.0, 0.9))
CLIPPED = {"gradient_clip_val": 1.0}


@pytest.mark.parametrize(
    ("rule", "optimizer", "options", "words"),
    [
        (FedCM, MOMENTUM, {}, r"SGD\(momentum=...\): leave it out"),
        (FedNova, partial(MOMENTUM, nesterov=True), {}, r"SGD\(nesterov=...\): leave it out"),
        (FedNova, MOMENTUM, {"terms": [Proximal(0.1)]}, "momentum and SGD with a proximal term"),
        (FedNova, MOMENTUM, {"optimizer_state": "keep"}, "set optimizer_state='reset'"),
        (FedNova, torch.optim.Adam, {}, "the optimizer is Adam: choose SGD"),
        (QFedAvg, torch.optim.Adam, {}, "the optimizer is Adam: choose SGD"),
        (QFedAvg, MOMENTUM, {}, r"SGD\(momentum=...\)"),
        (QFedAvg, partial(SGD, weight_decay=0.1), {}, r"SGD\(weight_decay=...\)"),
        (QFedAvg, SGD, CLIPPED, "gradient_clip_val is set"),
        (Scaffold, torch.optim.Adam, {}, "the optimizer is Adam: choose SGD"),
        (Scaffold, SGD, CLIPPED, "gradient_clip_val is set"),
    ],
)
def test_local_training_that_a_rule_cannot_undo_is_refused(fit, rule, optimizer, options, words):
    def train(rule, terms=(), optimizer_state="reset", **options):
        made = ClientModule(torch.nn.Linear(4, 2), terms, optimizer).double()
        loop = FederatedLoop(rule, seed=1, optimizer_state=optimizer_state)
        fit(made, loop, samples(), rounds=1, **options)

    with pytest.raises(FederationError, match=words):
        train(rule(), **options)
    if rule is Scaffold:
        train(Scaffold("I"), **options)


@pytest.mark.parametrize("make", [FedNova, Scaffold, QFedAvg])
def test_learning_rates_that_a_scheduler_makes_different_are_refused(fit, make):
    class Scheduled(ClientModule):
        def configure_optimizers(self):
            groups = [{"params": [p]} for p in self.parameters()]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            factors = [lambda round: 1.0, lambda round: 0.5**round]
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, factors)]

    with pytest.raises(FederationError, match="have different lr: use one group"):
        fit(Scheduled(torch.nn.Linear(4, 2)).double(), FederatedLoop(make(), seed=1), samples())


@pytest.mark.parametrize("make", [FedCostWAvg, QFedAvg])
def test_module_without_losses_is_refused(fit, foreign, make):
    made = foreign(batchnorm=False, optimizer="sgd")
    with pytest.raises(FederationError, match=r"a method federated_losses\(batch\) .*Foreign"):
        fit(made, FederatedLoop(make()))


@pytest.mark.parametrize(
    "make", [partial(AFL, mode="sampling"), DPFedAvg, FedBuff, partial(PFNM, **MATCHED)]
)
def test_rule_that_cannot_be_a_stage_is_refused(fit, make):
    stage = make()
    loop = FederatedLoop(Staged([1], [FedAvg(), stage]), seed=1)
    with pytest.raises(FederationError, match=f"{type(stage).__name__} cannot be a stage"):
        fit(ClientModule(torch.nn.Linear(4, 2)).double(), loop, samples())
