"""Traces of durations, and durations from a model (see also ``tests/callbacks/test_faults.py``)."""

import pytest

from lightning_fl.callbacks import ClientFaults
from lightning_fl.samplers.durations import SimulatedDurations, read_durations
from lightning_fl.types import FederationError


def test_a_trace_lists_the_durations_of_clients(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\ufeffdevice,seconds, client\nphone,1.5,0\nwatch,9,1\n\nphone, 2e-1 ,0\n")
    assert read_durations(path) == {0: [1.5, 0.2], 1: [9.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the first line of the trace .* must name the columns client and seconds"),
        ("client,time\n0,1\n", "must name the columns client and seconds, .* got 'client,time'"),
        ("client,seconds,client\n", "each column once"),
        ("client,seconds\n", "has no durations"),
        ("client,seconds\n0,1\n0\n", "line 3 of the trace .* must contain a client .* got '0'"),
        ("client,seconds\n0,1,2\n", "line 2 .* in 2 cells"),
        ("client,seconds\n-1,1\n", "line 2"),
        ("client,seconds\n0,0\n", "a finite number of seconds above 0"),
        ("client,seconds\n0,nan\n", "line 2"),
        ("client,seconds\n0,inf\n", "line 2"),
        ("client,seconds\n0,soon\n", "line 2"),
        ('client,seconds\n"0,1\n', "cannot be read"),
    ],
)
def test_bad_traces(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(FederationError, match=message):
        read_durations(path)


def test_no_file_is_no_trace(tmp_path):
    with pytest.raises(FederationError, match=r"the trace .* cannot be read"):
        read_durations(tmp_path / "none.csv")


def test_faults_and_a_sampler_have_one_model_of_durations():
    faults = ClientFaults(0.1, straggler=0.5, straggler_factor=3.0, speed_sigma=0.2, bandwidth=9.0)
    same = SimulatedDurations(0.5, 3.0, bandwidth=9.0, speed_sigma=0.2)
    assert faults.durations == same != SimulatedDurations()
    slow = [same.seconds_of(1, t, 4, 2, 0) / same.seconds_of(1, t, 4, 1, 0) for t in range(9)]
    assert slow == pytest.approx([2.0] * 9)


def test_a_speed_that_would_overflow_is_refused():
    with pytest.raises(FederationError, match=r"speed_sigma must be a number in \[0, 50\]"):
        SimulatedDurations(speed_sigma=1000.0)
