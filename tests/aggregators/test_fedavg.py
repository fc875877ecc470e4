"""Federated averaging: by hand, and what an average is."""

import pytest
import torch

from lightning_fl.aggregators import FedAvg
from rounds import aggregate, of, sent


def test_two_clients_of_one_weight_by_hand():
    server, update = torch.ones(1, dtype=torch.float64), sent([[1.0], [5.0]], [3, 1])
    # 3 samples at 2, 1 sample at 6: (3 * 2 + 6) / 4 = 3.
    assert aggregate(FedAvg(), server, update).tolist() == [3.0]
    assert aggregate(FedAvg(weighting="uniform"), server, update).tolist() == [4.0]


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 1.0), ("uniform", 2.0)])
def test_weights_may_be_normalized_over_all_clients(weighting, expected):
    """Two of four clients: 1 and 3 of 8 samples, with updates 2 and 2, or a quarter each of 8."""
    samples = torch.tensor([1, 3, 2, 2])
    rule = of(4, FedAvg(weighting, normalization="all"), 2, num_samples=samples)
    update = sent([[2.0], [2.0]] if weighting == "samples" else [[3.0], [5.0]], samples[:2])
    assert aggregate(rule, torch.zeros(1), update).tolist() == [expected]


def test_half_precision_is_summed_in_double():
    """Ten thousand equal steps: in bfloat16 a sum stops growing at 256."""
    server, ones = torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    assert aggregate(FedAvg(), server, *[sent(ones)] * 10_000).tolist() == [1.0]


@pytest.mark.parametrize("size", [1, 3])
def test_without_a_start_it_is_a_metric_of_updates(size):
    rule = FedAvg()
    delta = torch.tensor([[1.0], [5.0]]).expand(2, size)
    rule.update(sent(delta, [1, 3]))
    assert rule.compute().tolist() == [4.0] * size
    rule.reset()
    rule.update(sent(delta[:1]))
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
        update = sent(torch.ones(clients, 3))
        assert aggregate(rule, torch.zeros(3), update).tolist() == [1] * 3
        rule.release()
        assert rule._computed is None
        assert not rule.total._waiting
