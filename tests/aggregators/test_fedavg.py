"""Federated averaging: by hand, and what an average is."""

import pytest
import torch

from lightning_fl.aggregators import FedAvg
from lightning_fl.contracts.context import Federation
from lightning_fl.types import ClientUpdate, Cohort


def fedavg(server, models, num_samples, **options):
    rule = FedAvg(**options)
    rule.start(server)
    rule.update(ClientUpdate(torch.arange(len(models)), models - server, num_samples))
    return rule.compute()


def test_two_clients_of_one_weight_by_hand():
    server = torch.tensor([1.0], dtype=torch.float64)
    models = torch.tensor([[2.0], [6.0]], dtype=torch.float64)
    # 3 samples at 2, 1 sample at 6: (3 * 2 + 6) / 4 = 3.
    assert fedavg(server, models, torch.tensor([3, 1])).tolist() == [3.0]
    assert fedavg(server, models, torch.tensor([3, 1]), weighting="uniform").tolist() == [4.0]


def test_the_weights_are_those_of_the_round():
    """A step must not shrink with participation: one client alone is the new server."""
    server, model = torch.zeros(2), torch.tensor([[5.0, 7.0]])
    assert fedavg(server, model, torch.tensor([1])).tolist() == [5, 7]


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 1.0), ("uniform", 2.0)])
def test_weights_may_be_normalized_over_all_clients(weighting, expected):
    """Two of four clients: 1 and 3 of 8 samples, with updates 2 and 2, or a quarter each of 8."""
    rule = FedAvg(weighting, normalization="all")
    samples = torch.tensor([1, 3, 2, 2])
    rule.setup(Federation(4, Cohort(2, 4), num_samples=samples))
    rule.start(torch.zeros(1))
    delta = torch.tensor([[2.0], [2.0]]) if weighting == "samples" else torch.tensor([[3.0], [5.0]])
    rule.update(ClientUpdate(torch.tensor([0, 1]), delta, samples[:2]))
    assert rule.compute().tolist() == [expected]


def test_half_precision_is_summed_in_double():
    """Ten thousand equal steps: in bfloat16 a sum stops growing at 256."""
    rule = FedAvg()
    rule.start(torch.zeros(1, dtype=torch.bfloat16))
    one = ClientUpdate(torch.tensor([0]), torch.ones(1, 1, dtype=torch.bfloat16), torch.tensor([1]))
    for _ in range(10_000):
        rule.update(one)
    assert rule.compute().tolist() == [1.0]


@pytest.mark.parametrize("size", [1, 3])
def test_without_a_start_it_is_a_metric_of_updates(size):
    rule = FedAvg()
    delta = torch.tensor([[1.0], [5.0]]).expand(2, size)
    rule.update(ClientUpdate(torch.tensor([0, 1]), delta, torch.tensor([1, 3])))
    assert rule.compute().tolist() == [4.0] * size
    rule.reset()
    rule.update(ClientUpdate(torch.tensor([0]), delta[:1], torch.tensor([1])))
    assert rule.compute().tolist() == [1.0] * size


def test_a_trainer_of_one_process_has_clients_of_its_own(fit, linear, monkeypatch):
    """Other processes may train other federations, and know each other."""

    def refuse(*args, **options):
        raise AssertionError("it asks the other processes")

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for name in ("all_reduce", "all_gather", "barrier"):
            monkeypatch.setattr(torch.distributed, name, refuse)
        fit(linear(features=6), rounds=1, limit_val_batches=0)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("clients", [1, 30])  # whose updates wait, or are in bins
def test_a_released_rule_holds_no_update_and_starts_anew(clients):
    rule = FedAvg()
    for _ in range(2):
        rule.start(torch.zeros(3))
        ids = torch.arange(clients)
        rule.update(ClientUpdate(ids, torch.ones(clients, 3), torch.ones(clients)))
        assert rule.compute().tolist() == [1] * 3
        rule.release()
        assert rule._computed is None
        assert not rule.total._waiting
