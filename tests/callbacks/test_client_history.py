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


def test_the_file_of_a_large_federation_is_small():
    """A tenth of 10,000 clients in 2,000 rounds: about 15 MB, all the losses of the rounds."""
    history, random = ClientHistory(), torch.Generator().manual_seed(0)
    for i in range(1, 21):  # instead of 2,000
        clients = torch.randperm(10_000, generator=random)[:1000].tolist()
        losses = torch.rand(1000, generator=random, dtype=torch.float64).tolist()
        history.add(i, clients, {}, dict(zip(clients, losses, strict=True)))
    assert len(history.csv_gz()) < 20e6 / 100


def test_a_restored_history_goes_on_with_the_same_bytes(tmp_path):
    whole = ClientHistory()
    whole.add(1, [0, 3], {3: "low_battery"}, {0: 0.5})
    torch.save(whole.state_dict(), tmp_path / "state.pt")
    whole.add(2, [1, 2], {1: "late"}, {2: 0.5})
    resumed = ClientHistory()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    resumed.add(2, [1, 2], {1: "late"}, {2: 0.5})
    assert resumed.csv_gz() == whole.csv_gz()
