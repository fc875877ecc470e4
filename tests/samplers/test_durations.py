"""Durations from a model; see also ``tests/callbacks/test_faults.py``."""

import pytest

from lightning_fl.callbacks import ClientFaults
from lightning_fl.samplers.durations import SimulatedDurations


def test_faults_and_a_sampler_have_one_model_of_durations():
    faults = ClientFaults(0.1, straggler=0.5, straggler_factor=3.0, speed_sigma=0.2, bandwidth=9.0)
    same = SimulatedDurations(0.5, 3.0, bandwidth=9.0, speed_sigma=0.2)
    assert faults.durations == same != SimulatedDurations()
    slow = [same.seconds_of(1, t, 4, 2, 0) / same.seconds_of(1, t, 4, 1, 0) for t in range(9)]
    assert slow == pytest.approx([2.0] * 9)
