"""Power-of-choice: who is drawn, what the rule notes, and what is refused."""

import pytest
import torch

from lightning_fl.aggregators import AFL, FedAvg, PowerOfChoice
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule
from lightning_fl.samplers import HighLossSampler, WeightedSampler
from lightning_fl.types import FederationError
from rounds import of
from two_classes import samples
from written_plainly import Lost, Noted, module, of_all_samples, vector

SIZES = torch.tensor([5.0, 1.0, 2.0, 8.0, 4.0, 4.0])


def drawn(losses, candidates, count=2, round=0):
    rule, sampler = of(len(SIZES), PowerOfChoice(), count), HighLossSampler(candidates)
    of(len(SIZES), sampler, count, aggregator=rule)
    if losses is not None:
        rule.losses = torch.tensor(losses, dtype=torch.float64)
    return sampler.sample(round, count, SIZES, torch.Generator().manual_seed(round)).tolist()


def test_all_candidates_are_the_worst_clients():
    assert sorted(drawn([0.1, 0.7, 0.2, 0.9, 0.3, 0.4], 6)) == [1, 3]
    assert sorted(drawn([0.1, 0.7, float("inf"), 0.9, 0.3, 0.4], 6)) == [2, 3]


def test_few_candidates_are_a_weighted_draw():
    for round in range(5):
        random = torch.Generator().manual_seed(round)
        expected = WeightedSampler().sample(round, 2, SIZES, random).tolist()
        assert sorted(drawn([0.1, 0.7, 0.2, 0.9, 0.3, 0.4], 2, round=round)) == sorted(expected)
        assert drawn(None, 4, round=round) == expected  # before the first round


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_the_rule_notes_the_losses_of_the_received_model(fit):
    rule, data = PowerOfChoice(), samples()
    options = {"seed": 1, "clients_per_round": 2, "sampler": HighLossSampler(4)}
    loop = Noted(rule, Schedule(num_steps=2), **options)
    made = module()
    start = vector(made)
    fit(made, loop, data, rounds=3, callbacks=[Lost(0)])
    models, expected = [start, *loop.models], {}
    for model, clients in zip(models, loop.batches, strict=False):
        for client in clients:
            if client != 0:
                expected[client] = of_all_samples(model, data, client)[0]
    for client, loss in enumerate(rule.losses):
        torch.testing.assert_close(loss, expected.get(client, torch.tensor(torch.inf)).double())


@pytest.mark.parametrize(
    ("rule", "candidates", "message"),
    [
        (FedAvg(), 3, "set aggregator=PowerOfChoice"),
        (AFL(mode="sampling"), 3, "set aggregator=PowerOfChoice"),
        (PowerOfChoice(), 1, r"candidates must be an integer in \[2, "),
        (PowerOfChoice(), 9, r"candidates must be an integer in \[2, "),
    ],
)
def test_other_rules_and_numbers_are_refused(fit, rule, candidates, message):
    options = {"sampler": HighLossSampler(candidates), "clients_per_round": 2, "seed": 1}
    with pytest.raises(FederationError, match=message):
        fit(module(), FederatedLoop(rule, **options), samples(), rounds=1)
