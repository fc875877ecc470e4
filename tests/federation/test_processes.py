from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_fl import ClientParallelStrategy, VectorizedClients
from lightning_fl.federation import processes
from lightning_fl.federation.processes import Alone, ClientsShared, SamplesShared, processes_of
from lightning_fl.types import FederationError, RoundPlan


def trainer(rank=0, count=1, strategy=None):
    return SimpleNamespace(global_rank=rank, world_size=count, strategy=strategy)


def shared(rank, count):
    return ClientsShared(trainer(rank, count, ClientParallelStrategy()))


def test_the_kind_follows_from_the_strategy():
    assert type(processes_of(trainer())) is Alone
    assert type(processes_of(trainer(count=2))) is SamplesShared
    for count in (1, 2):
        found = processes_of(trainer(count=count, strategy=ClientParallelStrategy()))
        assert type(found) is ClientsShared


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_weighted_means_of_processes_are_the_mean_of_the_batch(count, num_samples):
    losses = torch.arange(1.0, num_samples + 1, dtype=torch.float64)
    total = 0.0
    for rank in range(count):
        own = losses[rank::count]  # as DistributedSampler gives them out
        factor = SamplesShared(trainer(rank, count)).scale(num_samples)
        total += factor * float(own.mean() if len(own) else 0) / count  # DDP takes the mean
    assert total == pytest.approx(float(losses.mean()), abs=1e-15)


def test_only_shared_clients_are_placed():
    plan = RoundPlan(0, 0, torch.arange(4), torch.ones(4, dtype=torch.int64), None, {})
    assert Alone(trainer()).place(plan) is plan
    assert SamplesShared(trainer(1, 2)).place(plan) is plan
    placed = shared(1, 2).place(plan)
    assert (placed.rank, placed.world_size) == (1, 2)
    parts = [shared(rank, 3).place(plan).rows for rank in range(3)]
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]


def test_one_process_has_all_results_already():
    alone, tensor = Alone(trainer()), torch.ones(2)
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


@pytest.mark.parametrize("kind", [SamplesShared, lambda made: shared(1, made.world_size)])
def test_values_that_differ_between_processes_are_refused(monkeypatch, kind):
    Alone(trainer()).check_same("data: seed it", "a")
    every = ["a", "a", "b"]
    monkeypatch.setattr(processes, "gathered", lambda value: every)
    with pytest.raises(FederationError, match="processes 0 and 2 have different data: seed it"):
        kind(trainer(1, 3)).check_same("data: seed it", "a")
    every[2] = "a"
    kind(trainer(1, 3)).check_same("data: seed it", "a")


@pytest.mark.parametrize(("vectorized", "cores"), [(False, 4), (False, 1), (True, 4)])
def test_a_fit_on_one_of_several_cores_says_how_to_use_them(
    fit, data, foreign, monkeypatch, caplog, vectorized, cores
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    module = foreign(batchnorm=False)
    module = VectorizedClients(module, 2) if vectorized else module
    with caplog.at_level("INFO", "lightning.pytorch"):
        fit(module, datamodule=data(), rounds=2)
    hints = [record for record in caplog.records if "client_parallel" in record.message]
    assert len(hints) == (cores > 1 and not vectorized)
