"""Stages: each rule in its rounds, with the state that it has, in a federation and resumed."""

import lightning as L
import pytest
import torch

from lightning_fl.aggregators import (
    ClusteredFL,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedControl,
    Gossip,
    Staged,
)
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule, StagedPolicy
from lightning_fl.types import FederationError
from rounds import aggregate, of, sent


def rounds(rule, deltas, server):
    for delta in deltas:
        server = aggregate(rule, server, sent(delta, [1, 2, 3, 4]))
    return server


def test_stages_are_the_rules_one_after_another():
    random = torch.Generator().manual_seed(0)
    deltas = torch.randn(7, 4, 3, generator=random, dtype=torch.float64)
    start = torch.zeros(3, dtype=torch.float64)
    rule = Staged([3, 2], [FedAvgM(), FedAdam(), FedAvg("uniform")])
    expected = rounds(FedAvgM(), deltas[:3], start)
    expected = rounds(FedAdam(), deltas[3:5], expected)
    expected = rounds(FedAvg("uniform"), deltas[5:], expected)
    torch.testing.assert_close(rounds(rule, deltas, start), expected, atol=1e-14, rtol=0)
    assert rule.metrics()["stage"] == 3


def test_models_of_clients_begin_with_what_the_stage_before_has_left():
    random = torch.Generator().manual_seed(0)
    deltas = torch.randn(3, 4, 3, generator=random, dtype=torch.float64)
    rule = of(4, Staged([2], [FedAvg(), Gossip("ring")]))
    server = rounds(rule, deltas[:2], torch.zeros(3, dtype=torch.float64))
    rule.start(server)
    assert torch.equal(rule.models_for(torch.arange(4)), server.expand(4, -1))


def test_stages_that_do_not_fit():
    with pytest.raises(
        FederationError, match="aggregators must have one more entry than rounds, got 1"
    ):
        Staged([3], [FedAvg()])
    with pytest.raises(
        FederationError, match=r"rounds\[0\] must be an integer of at least 1, got 0"
    ):
        StagedPolicy([0], [Schedule(), Schedule()])


@pytest.mark.filterwarnings("ignore:round 1")
def test_rules_and_policies_stay_in_step_where_too_few_return(fit, linear, data):
    """A round in which nobody is of use counts for both."""
    rule = Staged([2], [FedAvgM(), ClusteredFL(warmup=0)])
    policy = StagedPolicy([2], [Schedule(num_steps=3), Schedule(num_steps=1)])
    loop = FederatedLoop(aggregator=rule, policy=policy, seed=0)

    class Poison(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 0 and not loop.plan().schedule[batch_idx].last:
                next(pl_module.parameters()).data.fill_(torch.inf)

    fit(linear(features=6), loop, data(), rounds=4, callbacks=[Poison()])
    assert [row["num_steps"] for row in loop.rows] == [12, 12, 4, 4]
    assert [row["stage"] for row in loop.rows] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    "rule", [FedControl(decay=0.5), ClusteredFL(), Staged([1], [FedAvg(), FedAvg()])]
)
def test_rules_that_count_rounds_count_those_without_an_update(rule):
    rule.start(torch.zeros(3))
    assert rule.conclude(returned=0, min_clients=1) is None
    assert rule.round == 1
