"""State that clients keep from round to round."""

import pytest
import torch

from lightning_fl.store import ClientStore


@pytest.fixture
def store():
    """Client 3 left 1, 1 in an earlier round."""
    store = ClientStore()
    store.put(3, {"momentum": torch.ones(2)})
    store.commit()
    return store


def test_a_client_finds_nothing_before_it_left_something(store):
    assert store.get(4) == {}


def test_what_is_left_counts_from_the_end_of_the_round(store):
    store.put(3, {"momentum": torch.full((2,), 5.0)})
    assert store.get(3)["momentum"].tolist() == [1, 1]
    store.commit()
    assert store.get(3)["momentum"].tolist() == [5, 5]


def test_a_round_that_is_cut_short_leaves_nothing(store):
    store.put(3, {"momentum": torch.full((2,), 5.0)})
    store.put(4, {"momentum": torch.full((2,), 6.0)})
    store.discard()
    store.commit()
    assert store.get(3)["momentum"].tolist() == [1, 1]
    assert store.get(4) == {}


def test_others_keep_what_they_have(store):
    store.put(4, {"count": torch.tensor(7)})
    store.commit()
    assert store.get(3)["momentum"].tolist() == [1, 1]
    assert store.get(4)["count"].item() == 7


def test_a_copy_is_kept_with_its_dtype():
    store, row = ClientStore(), torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
    store.put(0, {"row": row})
    row.zero_()
    store.commit()
    assert store.get(0)["row"].tolist() == [1.5, 2.0]
    assert store.get(0)["row"].dtype == torch.bfloat16


def test_a_client_that_leaves_nothing_costs_nothing():
    store = ClientStore()
    store.put(0, {})
    store.commit()
    assert store.state_dict() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_are_kept_on_the_cpu():
    store = ClientStore()
    store.put(0, {"row": torch.ones(2, device="cuda")})
    store.commit()
    assert store.get(0)["row"].device.type == "cpu"


def test_a_store_is_saved_and_loaded_without_a_round_that_has_not_ended(store, tmp_path):
    store.put(3, {"momentum": torch.full((2,), 5.0)})
    torch.save(store.state_dict(), tmp_path / "store.pt")
    again = ClientStore()
    again.put(9, {"momentum": torch.zeros(1)})
    again.load_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
    again.commit()
    assert again.state_dict().keys() == {3}
    assert again.get(3)["momentum"].tolist() == [1, 1]


def test_later_rounds_do_not_change_what_was_saved(store):
    saved = store.state_dict()
    again = ClientStore()
    again.load_state_dict(saved)
    for each in (store, again):
        each.put(3, {"momentum": torch.zeros(2)})
        each.put(4, {"momentum": torch.zeros(2)})
        each.commit()
    assert saved.keys() == {3}
    assert saved[3]["momentum"].tolist() == [1, 1]
