"""State that clients keep from round to round."""

from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

import lightning_fl.store as store_module
from lightning_fl.store import ClientStore


def keep(store, client, row):
    """Let a round end in which one client leaves something."""
    store.put(client, row)
    store.commit()


def restored(store, path, again):
    """Save a store to a file, and load it into another one."""
    torch.save(store.state_dict(), path)
    again.load_state_dict(torch.load(path, weights_only=True))
    return again


@pytest.fixture(params=[10**9, 0], ids=["in memory", "in a file"])
def store(request, tmp_path):
    """Client 3 left 1, 1 in an earlier round."""
    store = ClientStore(request.param, tmp_path)
    keep(store, 3, {"momentum": torch.ones(2)})
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
    other = ClientStore()
    other.put(9, {"momentum": torch.zeros(1)})
    again = restored(store, tmp_path / "store.pt", other)
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
        keep(store, client, rows(client))
    return store


MAPS = Path("/proc/self/maps")
mapped_files = pytest.mark.skipif(not MAPS.exists(), reason="needs Linux's list of mappings")


def places(folder):
    """Yield the first and last address of each deleted file of a folder that is mapped."""
    for line in MAPS.read_text().splitlines():
        if f"{folder}/" in line and "(deleted)" in line:
            yield [int(end, 16) for end in line.split()[0].split("-")]


def in_the_file(tensor):
    """Whether the system has mapped a deleted file at a tensor's place in memory."""
    return any(low <= tensor.data_ptr() < high for low, high in places("here"))


@mapped_files
def test_what_is_too_much_for_memory_is_in_a_file_without_a_name(large, tmp_path):
    assert all(in_the_file(large.get(c)["weight"]) for c in range(5))
    assert list((tmp_path / "made" / "here").iterdir()) == []
    keep(small := ClientStore(), 0, rows(0))
    assert not in_the_file(small.get(0)["weight"])


@mapped_files
def test_files_are_few_and_at_most_three_times_as_large_as_the_tensors(tmp_path):
    store, last = ClientStore(0, tmp_path / "here"), {}
    random = torch.Generator().manual_seed(0)
    for round in range(60):
        for client in torch.randperm(70, generator=random)[:10].tolist():  # of 16 KiB each
            store.put(client, {"row": torch.full((4096,), float(round))})
            last[client] = round
        store.commit()
    sizes = [high - low for low, high in places(tmp_path / "here")]
    assert len(sizes) <= 16
    assert sum(sizes) <= 3 * 70 * 2**14
    assert {client: int(store.get(client)["row"].unique()) for client in last} == last


def test_a_round_that_stores_nothing_makes_no_file(large, monkeypatch):
    monkeypatch.setattr(ClientStore, "_in_file", lambda *_: pytest.fail("a file was made"))
    large.commit()
    assert len(large.rows) == 5


@mapped_files
def test_files_stay_few_where_each_client_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_FILES", 5)
    store = ClientStore(0, tmp_path / "here")
    for client in range(23):
        keep(store, client, rows(client))
    assert len(list(places(tmp_path / "here"))) <= 5
    assert [int(store.get(client)["steps"]) for client in range(23)] == list(range(23))


def test_what_a_checkpoint_may_still_be_written_from_stays(large):
    saved = large.snapshot()
    keep(large, 2, rows(9))
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
    assert len(restored(store, tmp_path / "store.pt", ClientStore()).rows) == 3000
    with ZipFile(tmp_path / "store.pt") as archive:
        assert len(archive.namelist()) < 20


def test_a_checkpoint_holds_the_rows_and_no_more(large, tmp_path):
    for most in (0, 10**9):
        again = restored(large, tmp_path / "store.pt", ClientStore(most, tmp_path))
        assert [again.get(c)["steps"].item() for c in range(5)] == [0, 1, 2, 3, 4]
        keep(again, 0, rows(1))
        assert large.get(0)["steps"] == 0
    assert (tmp_path / "store.pt").stat().st_size < 5 * 12_100 + 20_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int8])
def test_every_dtype_fits_into_the_file(tmp_path, dtype):
    row = torch.tensor([1, 0, 1]).to(dtype)
    odd = {"odd": torch.ones(3, dtype=torch.uint8), "row": row, "none": row[:0], "one": row[0]}
    keep(store := ClientStore(0, tmp_path), 0, odd)
    found = restored(store, tmp_path / "store.pt", ClientStore(0, tmp_path)).get(0)
    assert torch.equal(found["row"], row)
    assert found["one"].shape == ()
    assert found["none"].numel() == 0
