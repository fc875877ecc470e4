"""Faults: counts, replay, the virtual clock, and a federation that stands them."""

import math
import warnings
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import TensorDataset

from lightning_fl.aggregators import CoordinateMedian
from lightning_fl.callbacks import ClientFaults, OnUpdates
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.federation.dropped import CAUSES
from lightning_fl.types import FederationError


class Written(ClientFaults):
    """Faults by round (from 1) and client."""

    def __init__(self, faults, **options):
        super().__init__(**options)
        self.faults = faults

    def fault_of(self, seed, round, client):
        return self.faults.get((round + 1, client))


def test_faults_are_those_of_the_seed_whatever_the_rule(simulate):
    rules = None, CoordinateMedian()
    loops = [simulate(ClientFaults(dropout=0.3), aggregator=rule)[1] for rule in rules]
    one, other = ([row["dropped_clients"] for row in loop.rows] for loop in loops)
    assert one == other
    assert any(one)


def test_a_callback_of_an_earlier_run_starts_anew(simulate):
    faults = ClientFaults(dropout=0.3)
    assert simulate(faults)[1].rows == simulate(faults)[1].rows


@pytest.mark.parametrize("group_size", [None, 3])
def test_each_cause_has_a_column_and_is_named_in_the_first_warning(simulate, group_size):
    faults = {(1, 2): "dropout", (1, 0): "nan", (2, 3): "crash", (2, 0): "blowup", (3, 1): "late"}
    logged = []

    class Read(Callback):
        def on_train_epoch_end(self, trainer, module):
            found = trainer.callback_metrics
            logged.append([int(found[f"federation/{name}"]) for name in ("dropped", *CAUSES)])

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _, loop = simulate(Read(), Written(faults), group_size=group_size, quiet=False)
    messages = [str(w.message) for w in found if "dropped" in str(w.message)]
    first, last = messages
    assert "client 2 (dropped out), client 0 (non-finite values). Non-finite values are in" in first
    assert "dropped 4 of 12 client updates in 3 of 3 rounds: dropped_clients in" in last
    columns = ("dropped", "dropped_out", "crashed", "late", "non_finite")
    table = [[row[name] for name in columns] for row in loop.rows]
    assert table == logged == [[2, 1, 0, 0, 1], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0]]
    assert [row["dropped_clients"] for row in loop.rows] == ["0 2", "3", "1"]
    # Who is lost has no part in the round.
    assert [row["num_samples"] for row in loop.rows] == [60, 90, 90]


def test_dropped_clients_are_named_as_their_sites(simulate):
    faults = Written({(1, 1): "nan", (1, 0): "late", (1, 2): "nan"})
    blobs = TensorDataset(torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3)
    sites = {"north": blobs, "south's": blobs, "2": blobs}
    named = FederatedDataModule.from_clients(sites, val=blobs, batch_size=4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        simulate(faults, datamodule=named, min_clients=1, quiet=False)
    first = next(str(w.message) for w in found if "dropped" in str(w.message))
    assert "client 0 'north' (too late), clients 1 \"south's\", 2 (non-finite values)" in first


class Battery(OnUpdates):
    """Mark a client in the first round, for a cause that the library does not know."""

    def __init__(self, client, cause):
        self.client, self.cause = client, cause

    def on_client_updates(self, plan, clients, delta, dropped):
        if plan.round == 0 and 2 in clients:
            dropped[self.client] = self.cause
        return delta


def test_a_callback_may_name_a_cause_of_its_own(simulate):
    _, loop = simulate(Battery(2, "low_battery"), rounds=2)
    assert [row.get("low_battery") for row in loop.rows] == [1, None]
    assert [row["num_samples"] for row in loop.rows] == [90, 120]
    lines = loop.table_path(loop.fit.trainer).read_text().splitlines()
    assert "low_battery" in lines[0].split(",")


@pytest.mark.parametrize(
    ("client", "cause", "message"),
    [
        (9, "late", r"drops client 9 .* drop only clients \[2\], with"),
        (2, "no power", "the cause 'no power': .* a column"),
        (2, "clients", "dropped_out, crashed, late, non_finite or a new name"),
    ],
)
def test_a_cause_that_cannot_be_a_column_is_refused(simulate, client, cause, message):
    with pytest.raises(FederationError, match=message):
        simulate(Battery(client, cause))


def test_the_virtual_clock_by_hand(simulate):
    faults = ClientFaults(step_seconds=0.5, bandwidth=100.0, speed_sigma=0.7)
    _, loop = simulate(faults, rounds=2)
    both = 2 * 21 * 8 / 100
    factors = []
    for client in range(4):
        each = faults.seconds_of(3, 0, client, 2)
        assert each == pytest.approx(faults.seconds_of(3, 5, client, 2))  # for good
        factors.append(each / (2 * 0.5 + both))
        twice = faults.seconds_of(3, 0, client, 4)
        assert twice - each == pytest.approx(factors[-1] * 2 * 0.5)
    assert len(set(factors)) == 4
    assert loop.rows[0]["virtual_time"] == pytest.approx(max(factors) * (1 + both), rel=1e-6)
    assert loop.rows[1]["virtual_time"] == pytest.approx(2 * max(factors) * (1 + both), rel=1e-6)
    deviations = torch.tensor(
        [math.log(faults.seconds_of(0, 0, c, 0) / both) for c in range(400)], dtype=torch.float64
    )
    assert float(deviations.std()) == pytest.approx(0.7, abs=0.08)
    assert float(deviations.mean()) == pytest.approx(0.0, abs=0.12)


def test_the_server_waits_for_a_deadline_only_if_somebody_is_missing(simulate):
    options = {"step_seconds": 1.0, "bandwidth": 1e12, "deadline": 50.0}
    _, loop = simulate(Written({(2, 1): "dropout"}, **options))
    assert [row["virtual_time"] for row in loop.rows] == pytest.approx([2.0, 52.0, 54.0], abs=1e-5)
    for nan in (0.0, 1.0):
        _, loop = simulate(ClientFaults(nan=nan, step_seconds=1.0, deadline=1.5), min_clients=1)
        assert all(row["late"] == 4 for row in loop.rows)  # nobody is as fast
        assert loop.rows[-1]["virtual_time"] == pytest.approx(4.5)


def test_who_is_late_is_told_as_it_was_dropped(simulate):
    """A frozen tensor that the module changes is exchanged, which is known after the round only."""

    def moving(module):
        module.mean = torch.nn.Parameter(torch.zeros(50).double(), requires_grad=False)
        step = module.training_step

        def training_step(batch, *args):
            module.mean.add_(1.0)
            return step(batch, *args)

        module.training_step = training_step
        return module

    faults = ClientFaults(step_seconds=0.0, bandwidth=1.0, deadline=2 * 21 * 8 + 1.0)
    _, loop = simulate(faults, wrap=moving)
    assert [row["bytes_up"] for row in loop.rows] == [4 * 71 * 8] * 3
    assert [row["late"] for row in loop.rows] == [0, 0, 0]


def test_faults_are_as_likely_as_said():
    faults = ClientFaults(0.125, 0.125, 0.125, 0.125)
    kinds = Counter(faults.fault_of(3, round, c) for round in range(60) for c in range(60))
    for fault in ("dropout", "crash", "nan", "blowup"):
        assert kinds[fault] == pytest.approx(450, abs=70)  # of 3,600


def test_stragglers_are_slow_as_often_as_said(simulate):
    faults = ClientFaults(straggler=0.25, straggler_factor=4.0, step_seconds=1.0, bandwidth=1e15)
    simulate(faults, rounds=1)
    each = [faults.seconds_of(3, round, 0, 1) for round in range(2000)]
    assert {round(value, 6) for value in each} == {1.0, 4.0}
    assert sum(value > 2 for value in each) / 2000 == pytest.approx(0.25, abs=0.04)


def test_a_client_has_one_fault_at_most():
    with pytest.raises(FederationError, match=r"\[0, 1\], got 1.2: a client has one fault"):
        ClientFaults(dropout=0.6, nan=0.6)
