"""The event simulation against one that moves time tick by tick, and by hand."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.samplers.clock import VirtualClock
from lightning_fl.types import FederationError


def permuted(num_clients, seed=0):
    def order(version):
        ids = list(range(num_clients))
        random.Random(f"{seed} {version}").shuffle(ids)
        return ids

    return order


def tick_by_tick(num_clients, concurrency, buffer_size, order, seconds, flushes, tick):
    """Move time by one tick after another: first those who finish arrive, then others start."""
    now, version, training, buffer, found = Fraction(0), 0, {}, [], []
    while True:
        arriving = sorted(c for c, (finish, _) in training.items() if finish == now)
        for client in arriving:
            buffer.append((client, training.pop(client)[1]))
            if len(buffer) == buffer_size:
                in_use = sorted({v for _, v in training.values()})
                found.append((now, *zip(*buffer, strict=True), tuple(in_use)))
                buffer, version = [], version + 1
                if len(found) == flushes:
                    return found
        waiting = {client for client, _ in buffer}
        for client in order(version):
            if len(training) < concurrency and client not in training and client not in waiting:
                training[client] = now + seconds(client, version), version
        now += tick


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_clock_equals_a_simulation_tick_by_tick(data):
    n = data.draw(st.integers(1, 9))
    concurrency, buffer_size = (data.draw(st.integers(1, n)) for _ in range(2))
    # Few different durations: many clients finish at the same time.
    table = data.draw(st.lists(st.integers(1, 6), min_size=4 * n, max_size=4 * n))
    tick = Fraction(1, data.draw(st.sampled_from([1, 3, 7])))
    seed = data.draw(st.integers(0, 99))

    def seconds(client, version):
        return tick * table[4 * client + version % 4]

    given_ = n, concurrency, buffer_size, permuted(n, seed), seconds
    plain = tick_by_tick(*given_, flushes=12, tick=tick)
    clock = VirtualClock(*given_)
    found = [clock.flush(version) for version in range(12)]
    assert [tuple(flush) for flush in found] == plain
    # Versions that are dropped are never asked for again; few are kept.
    for now, flush in enumerate(found):
        later = {v for each in found[now + 1 :] for v in each.started if v <= now}
        assert later <= set(flush.in_use)
        assert len(flush.in_use) <= concurrency
    # An old flush, or one far ahead, is the same.
    for version in (2, 11, 10, 0):
        assert clock.flush(version) == found[version]


def test_equal_durations_are_synchronous_rounds():
    order = permuted(8)
    clock = VirtualClock(8, 3, 3, order, lambda c, v: 2.5)
    for version in range(6):
        clients = tuple(sorted(order(version)[:3]))
        assert tuple(clock.flush(version)) == (2.5 * (version + 1), clients, (version,) * 3, ())


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_duration_that_is_none_is_refused(seconds):
    clock = VirtualClock(2, 1, 1, permuted(2), lambda c, v: seconds if v else 1.0)
    clock.flush(0)
    with pytest.raises(FederationError, match=r"in round 2 is (nan|inf|-1.0) seconds: it must be"):
        clock.flush(1)
