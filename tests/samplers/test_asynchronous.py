"""Where durations come from, and what becomes of clients that are lost."""

import pytest
import torch

from lightning_fl.aggregators import FedBuff
from lightning_fl.callbacks import ClientFaults
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.samplers import AsynchronousSampler
from lightning_fl.samplers.durations import SimulatedDurations
from lightning_fl.types import FederationError


class Timed(SimulatedDurations):
    """Clients take 1, 2, 3 and 2.5 seconds, and client 0 takes 5 in a later round."""

    def seconds_of(self, seed, round, client, steps, num_bytes):
        return 5.0 if round and not client else (1.0, 2.0, 3.0, 2.5)[client]


@pytest.fixture
def rounds(simulate):
    """Train with FedBuff and given durations; return the loop."""

    def run(*callbacks, size=1, concurrency=2, durations=None, **options):
        callbacks = callbacks or (ClientFaults(),)
        callbacks[0].durations = durations or Timed()
        _, loop = simulate(
            *callbacks,
            aggregator=FedBuff(),
            sampler=AsynchronousSampler(concurrency),
            clients_per_round=size,
            **options,
        )
        return loop

    return run


class Lost(ClientFaults):
    """Clients that are lost in the first rounds."""

    def fault_of(self, seed, round, client):
        return {(0, 0): "dropout", (0, 1): "crash", (1, 3): "nan"}.get((round, client))


def test_clients_start_again_when_they_have_finished(rounds):
    loop = rounds(concurrency=4, rounds=9)
    times = [row["virtual_time"] for row in loop.rows]
    assert times == [1.0, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 6.0, 6.0]  # 0: 1, 6; 1: 2, 4, 6; ...
    sampler = loop.options.sampler
    assert [sampler.flush(t).clients for t in range(9)] == [
        *((0,), (1,), (3,), (2,), (1,), (3,), (0,), (1,), (2,))
    ]
    assert [row["staleness_max"] for row in loop.rows] == [0, 1, 2, 3, 2, 2, 5, 2, 4]


def test_clients_that_are_lost_free_their_place_and_fill_the_buffer(rounds):
    callbacks = [Lost()], [ClientFaults()]
    lost, whole = (rounds(*each, concurrency=4, size=2, rounds=4) for each in callbacks)
    names = ("virtual_time", "staleness_mean", "clients")
    assert [[r[n] for n in names] for r in lost.rows] == [[r[n] for n in names] for r in whole.rows]
    assert [row["dropped"] for row in lost.rows] == [2, 1, 0, 0]
    assert [row["num_samples"] for row in lost.rows] == [0, 30, 60, 60]


def test_bytes_are_part_of_a_duration(rounds):
    loop = rounds(durations=SimulatedDurations(step_seconds=0.0, bandwidth=4.0), rounds=2)
    assert [row["virtual_time"] for row in loop.rows] == [2 * 21 * 8 / 4] * 2  # both finish


class Changing(HyperparameterPolicy):
    """Local work that changes."""

    def sample(self, round, clients):
        return {"num_steps": torch.full((len(clients),), 2 + (round == 4))}


class InPairs(HyperparameterPolicy):
    """Local work that depends on who else is there."""

    def sample(self, round, clients):
        return {"num_steps": torch.full((len(clients),), len(clients))}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (InPairs(), r"InPairs changes the number of local steps"),
        (Changing(), r"Changing changes the number of local steps \(client ., round 5\)"),
    ],
)
def test_what_the_clock_cannot_know_is_refused(rounds, policy, message):
    with pytest.raises(FederationError, match=message):
        rounds(policy=policy, rounds=8)


def test_without_durations_there_is_no_clock(simulate):
    with pytest.raises(FederationError, match=r"needs the durations of clients: add the callback"):
        simulate(aggregator=FedBuff(), sampler=AsynchronousSampler(2), clients_per_round=1)


def test_samples_that_arrive_over_time_are_refused(rounds, data):
    streaming = data(stream_steps=2)
    with pytest.raises(FederationError, match="remove stream_steps, or use another sampler"):
        rounds(datamodule=streaming)


def test_rates_may_change_and_be_learned(rounds):
    """Only the amount of work must be known when a client starts."""
    loop = rounds(policy=Schedule(lr=0.1, num_steps=2, decay=0.5))
    assert [row["lr"] for row in loop.rows] == [0.1, 0.05, 0.025]


def test_outside_of_a_fit_there_is_no_clock():
    sampler = AsynchronousSampler(2)
    random = torch.Generator().manual_seed(3)
    assert len(sampler.sample(0, 3, torch.ones(5), random)) == 3


def test_a_loader_that_was_made_before_the_clock_is_refused(rounds):
    """Its first round would have the clients that start first, not those that finish first."""

    def early(module):
        configure = module.configure_optimizers

        def configured():
            module.trainer.fit_loop.setup_data()
            return configure()

        module.configure_optimizers = configured
        return module

    with pytest.raises(FederationError, match="AsynchronousSampler does not know which clients"):
        rounds(wrap=early)


def test_a_trial_run_has_rounds_too(rounds):
    loop = rounds(size=2, fast_dev_run=4)
    assert [row["clients"] for row in loop.rows] == [2]
