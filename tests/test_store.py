"""State that clients keep from round to round."""

from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

import lightning_fl.store as store_module
from lightning_fl.store import ClientStore


@pytest.fixture(params=[10**9, 0], ids=["in memory", "in a file"])
def store(request, tmp_path):
    """Client 3 left 1, 1 in an earlier round."""
    store = ClientStore(request.param, tmp_path)
    store.put(3, {"momentum": torch.ones(2)})
    store.commit()
    return store


def test_a_round_that_is_cut_short_leaves_nothing(store):
    store.put(3, {"momentum": torch.full((2,), 5.0)})
    store.put(4, {"momentum": torch.full((2,), 6.0)})
    assert store.get(3)["momentum"].tolist() == [1, 1]
    store.discard()
    store.commit()
    assert store.get(3)["momentum"].tolist() == [1, 1]
    assert store.get(4) == {}


def test_a_store_is_saved_and_loaded_without_a_round_that_has_not_ended(store, tmp_path):
    store.put(3, {"momentum": torch.full((2,), 5.0)})
    torch.save(store.state_dict(), tmp_path / "store.pt")
    again = ClientStore()
    again.put(9, {"momentum": torch.zeros(1)})
    again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
    again.commit()
    assert again.rows.keys() == {3}
    assert again.get(3)["momentum"].tolist() == [1, 1]


# --- in a file ------------------------------------------------------------------------------------


def rows(value, size=1000):
    return {"weight": torch.full((size, 3), float(value)), "steps": torch.tensor(value)}


@pytest.fixture
def large(tmp_path):
    """Five clients, more than is to stay in memory."""
    store = ClientStore(most=30_000, folder=tmp_path / "made" / "here")
    for client in range(5):
        store.put(client, rows(client))
        store.commit()
    return store


def in_the_file(tensor):
    """Whether the system has mapped a deleted file at a tensor's place in memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return "here/" in line and "(deleted)" in line
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_what_is_too_much_for_memory_is_in_a_file_without_a_name(large, tmp_path):
    assert all(in_the_file(large.get(c)["weight"]) for c in range(5))
    assert list((tmp_path / "made" / "here").iterdir()) == []
    small = ClientStore()
    small.put(0, rows(0))
    small.commit()
    assert not in_the_file(small.get(0)["weight"])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_files_are_few_and_at_most_three_times_as_large_as_the_tensors(tmp_path):
    store, folder, last = ClientStore(0, tmp_path / "here"), f"{tmp_path}/here/", {}
    random = torch.Generator().manual_seed(0)
    for round in range(60):
        for client in torch.randperm(70, generator=random)[:10].tolist():  # of 16 KiB each
            store.put(client, {"row": torch.full((4096,), float(round))})
            last[client] = round
        store.commit()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    sizes = [int(high, 16) - int(low, 16) for low, high in (x.split()[0].split("-") for x in lines)]
    assert len(lines) <= 16
    assert sum(sizes) <= 3 * 70 * 2**14
    assert {client: int(store.get(client)["row"].unique()) for client in last} == last


def test_a_round_that_stores_nothing_makes_no_file(large, monkeypatch):
    monkeypatch.setattr(ClientStore, "_in_file", lambda *_: pytest.fail("a file was made"))
    large.commit()
    assert len(large.rows) == 5


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_files_stay_few_where_each_client_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_FILES", 5)
    store = ClientStore(0, tmp_path / "here")
    for client in range(23):
        store.put(client, rows(client))
        store.commit()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(f"{tmp_path}/here/" in line for line in maps) <= 5
    assert [int(store.get(client)["steps"]) for client in range(23)] == list(range(23))


def test_what_a_checkpoint_may_still_be_written_from_stays(large):
    saved = large.snapshot()
    large.put(2, rows(9))
    large.commit()
    weights = next(s for s in saved() if s["name"] == "weight")["rows"]
    assert weights[2].unique().tolist() == [2.0]


def test_what_is_saved_of_much_is_in_a_file_too(large):
    for each in large.state_dict():
        assert in_the_file(each["rows"])
        assert each["clients"].tolist() == [0, 1, 2, 3, 4]


def test_the_number_of_tensors_in_a_file_does_not_grow_with_clients(tmp_path):
    store = ClientStore()
    for client in range(3000):
        store.put(client, {f"optimizer.{i}.momentum": torch.ones(4) for i in range(4)})
    store.commit()
    torch.save(store.state_dict(), tmp_path / "store.pt")
    with ZipFile(tmp_path / "store.pt") as archive:
        assert len(archive.namelist()) < 20
    again = ClientStore()
    again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
    assert len(again.rows) == 3000


def test_a_checkpoint_holds_the_rows_and_no_more(large, tmp_path):
    torch.save(large.state_dict(), tmp_path / "store.pt")
    assert (tmp_path / "store.pt").stat().st_size < 5 * 12_100 + 20_000
    for most in (0, 10**9):
        again = ClientStore(most, tmp_path)
        again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
        assert [again.get(c)["steps"].item() for c in range(5)] == [0, 1, 2, 3, 4]
        again.put(0, rows(1))
        again.commit()
        assert large.get(0)["steps"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_every_dtype_fits_into_the_file(tmp_path, dtype):
    row = torch.tensor([1, 0, 1]).to(dtype)
    store = ClientStore(0, tmp_path)
    store.put(
        0, {"odd": torch.ones(3, dtype=torch.uint8), "row": row, "none": row[:0], "one": row[0]}
    )
    store.commit()
    torch.save(store.state_dict(), tmp_path / "store.pt")
    again = ClientStore(0, tmp_path)
    again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
    found = again.get(0)
    assert torch.equal(found["row"], row)
    assert found["one"].shape == ()
    assert found["none"].numel() == 0
