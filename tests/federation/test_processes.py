from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_fl import ClientParallelStrategy
from lightning_fl.federation import processes
from lightning_fl.federation.processes import Processes
from lightning_fl.types import FederationError, RoundPlan


def trainer(rank=0, count=1, strategy=None):
    return SimpleNamespace(global_rank=rank, world_size=count, strategy=strategy)


def shared(rank, count):
    return Processes(trainer(rank, count, ClientParallelStrategy()))


def test_what_is_shared_follows_from_the_strategy():
    def kinds(processes):
        return processes.share_clients, processes.share_samples

    assert kinds(Processes(trainer())) == (False, False)
    assert kinds(Processes(trainer(count=2))) == (False, True)
    assert kinds(shared(0, 1)) == kinds(shared(0, 2)) == (True, False)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_weighted_means_of_processes_are_the_mean_of_the_batch(count, num_samples):
    losses = torch.arange(1.0, num_samples + 1, dtype=torch.float64)
    total = 0.0
    for rank in range(count):
        own = losses[rank::count]  # as DistributedSampler gives them out
        factor = Processes(trainer(rank, count)).scale(num_samples)
        total += factor * float(own.mean() if len(own) else 0) / count  # DDP takes the mean
    assert total == pytest.approx(float(losses.mean()), abs=1e-15)


def test_only_shared_clients_are_placed():
    plan = RoundPlan(0, 0, torch.arange(4), torch.ones(4, dtype=torch.int64), None, {})
    assert Processes(trainer()).place(plan) is plan
    assert Processes(trainer(1, 2)).place(plan) is plan
    placed = shared(1, 2).place(plan)
    assert (placed.rank, placed.world_size) == (1, 2)
    parts = [shared(rank, 3).place(plan).rows for rank in range(3)]
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]


def test_one_process_has_all_results_already():
    alone, tensor = Processes(trainer()), torch.ones(2)
    assert alone.gather("x") == ["x"]
    assert alone.sum(tensor) is alone.same(tensor) is alone.mean(tensor, 3) is tensor
    assert alone.scale(3) == shared(1, 2).scale(3) == 1
    alone.same_model(nn.Linear(2, 2))


def test_a_process_that_waits_tells_its_strategy():
    processes = shared(1, 2)
    processes.wait(is_idle=True)
    processes.repeat_validation(True)
    strategy = processes._strategy
    assert (strategy.is_idle, strategy.repeats_validation) == (True, True)
    processes.wait(is_idle=False)
    assert not strategy.is_idle


@pytest.mark.parametrize("strategy", [None, ClientParallelStrategy()])
def test_values_that_differ_between_processes_are_refused(monkeypatch, strategy):
    Processes(trainer()).check_same("data: seed it", "a")
    every, made = ["a", "a", "b"], Processes(trainer(1, 3, strategy))
    monkeypatch.setattr(processes, "gathered", lambda value: every)
    with pytest.raises(FederationError, match="processes 0 and 2 have different data: seed it"):
        made.check_same("data: seed it", "a")
    every[2] = "a"
    made.check_same("data: seed it", "a")
