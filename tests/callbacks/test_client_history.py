"""The history of clients, its file, and its checkpoint."""

import gzip

import torch

from lightning_fl.callbacks.client_history import ClientHistory


def test_each_client_of_a_round_has_a_row():
    history = ClientHistory()
    dropped = {1: "dropped_out", 4: "low_battery"}
    history.add(1, [4, 0, 1], dropped, {0: 0.25, 4: float("nan")}, {0: 0.5, 2: 1 / 3})
    history.add(2, [], {}, {})
    assert gzip.decompress(history.csv_gz()).decode().splitlines() == [
        "round,client,outcome,loss,score",
        "1,0,arrived,0.25,0.5",
        "1,1,dropped_out,,",
        "1,2,not_sampled,,0.333333",
        "1,4,low_battery,nan,",
    ]
    assert history.counts() == ({0: 1, 1: 1, 4: 1}, {1: 1, 4: 1})


def test_a_restored_history_goes_on_with_the_same_bytes(tmp_path):
    whole = ClientHistory()
    whole.add(1, [0, 3], {3: "low_battery"}, {0: 0.5})
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    whole.add(2, [1, 2], {1: "late"}, {2: 0.5})
    resumed = ClientHistory()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.add(2, [1, 2], {1: "late"}, {2: 0.5})
    assert resumed.csv_gz() == whole.csv_gz()
