"""The record of who participated when, its file, and its checkpoint."""

import gzip

import numpy as np
import pytest
import torch

from lightning_fl.callbacks.participation import OUTCOMES, Participation


def lines(participation):
    return gzip.decompress(participation.csv_gz()).decode().splitlines()


def test_a_round_is_a_line_with_one_character_per_client():
    record = Participation(5)
    record.add([0, 1, 4], {1: "dropped_out", 4: "low_battery"})
    record.add([], {})
    legend = "0=not_sampled 1=arrived 2=dropped_out 3=crashed 4=late 5=non_finite 6=low_battery"
    assert lines(record) == [f"round,{legend}", "1,12006", "2,00000"]
    assert record.counts().tolist() == [[1, 1, 0, 0, 1], [0, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("share", "limit"), [(0.01, 700_000), (0.5, 3_500_000), (1.0, 100_000)], ids=str
)
def test_the_file_of_a_large_federation_is_small(share, limit):
    record, random = Participation(10_000), np.random.default_rng(0)
    for _ in range(40):  # instead of 2,000
        sampled = random.random(10_000) < share
        record.add(np.flatnonzero(sampled).tolist(), {})
    assert len(record.csv_gz()) < limit / 50
    assert sum(map(len, record.state_dict()["rounds"])) < limit / 50


def test_a_restored_record_goes_on_with_the_same_bytes(tmp_path):
    whole = Participation(4)
    whole.add([0, 3], {3: "low_battery"})
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    whole.add([1, 2], {1: "late"})
    resumed = Participation(0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.add([1, 2], {1: "late"})
    assert resumed.csv_gz() == whole.csv_gz()


def test_the_outcomes_name_every_cause_of_the_table_of_rounds():
    from lightning_fl.federation.dropped import CAUSES

    assert OUTCOMES[2:] == tuple(CAUSES)
