"""Which samples are held out, and which belong to each client."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.datamodules.splits import hold_out, labels_of
from lightning_fl.partition import IID, ByLabel, Dirichlet, FromManifest, Natural, QuantitySkew
from lightning_fl.types import FederationError
from numbered import Lists, federated, fitted, having, held, lists, numbered, rng


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=80).map(torch.tensor),
    share=st.floats(0, 0.99),
)
def test_every_label_gives_its_share_rounded_up_or_down(labels, share):
    count = int(share * len(labels))
    kept, out = hold_out(labels, count, rng())
    assert len(out) == count
    assert sorted([*kept.tolist(), *out.tolist()]) == list(range(len(labels)))
    for label in labels.unique():
        due = count * int((labels == label).sum()) / len(labels)
        assert abs(int((labels[out] == label).sum()) - due) < 1


def test_real_numbers_are_held_out_over_their_whole_range():
    y = torch.rand(100, generator=rng())
    data = federated(TensorDataset(torch.arange(100.0), y), val_size=10)
    rank = y.argsort().argsort()
    assert sorted((rank[held(data)] // 10).tolist()) == list(range(10))


def test_clients_and_validation_share_no_sample_and_leave_none_out():
    for partition in (IID(), ByLabel(2), QuantitySkew(), Dirichlet()):
        data = federated(partition=partition, val_size=0.25)
        everyone = [*torch.cat(data.parts).tolist(), *held(data)]
        assert sorted(everyone) == list(range(60))
        assert data.num_samples.sum() == 45
        assert all(part.tolist() == sorted(part.tolist()) for part in data.parts)


def test_hold_out_and_split_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = federated(val_size=0.25, seed=5)
    torch.manual_seed(2)
    again, other = federated(val_size=0.25, seed=5), federated(val_size=0.25, seed=6)
    assert (lists(first.parts), held(first)) == (lists(again.parts), held(again))
    assert first.checksum == again.checksum != other.checksum
    assert held(first) != held(other)


def test_without_a_seed_it_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    data = federated()
    assert data.checksum == federated(seed=5).checksum != federated(seed=0).checksum
    monkeypatch.setenv("PL_GLOBAL_SEED", "6")  # of another run, for which the split stays
    data.setup("fit")
    assert data.manifest().seed == 5


@pytest.mark.parametrize(
    ("val_size", "count"), [(0, 0), (0.0, 0), (1, 1), (20, 20), (0.25, 15), (59, 59)]
)
def test_val_size_is_a_count_or_a_fraction(val_size, count):
    data = federated(val_size=val_size, num_clients=1)
    assert data.num_samples.tolist() == [60 - count]
    assert len(held(data)) == count if count else data.val_dataloader() == []


@pytest.mark.parametrize(("val_size", "count"), [(60, 60), (1.5, 90), (0.999, 60), (0.001, 0)])
def test_holding_out_all_or_none_is_refused(val_size, count):
    with pytest.raises(FederationError, match=f"val_size={val_size} holds out {count} of 60"):
        federated(val_size=val_size)


def test_given_validation_samples_are_taken_and_nothing_is_held_out():
    data = fitted(FederatedDataModule(numbered(), numbered(7), num_clients=4, val_size=0.5))
    assert held(data) == list(range(7))
    assert data.num_samples.sum() == 60


def test_a_second_try_after_an_error_holds_out_the_same_samples():
    data = FederatedDataModule(numbered(), num_clients=999, val_size=0.25)
    with pytest.raises(FederationError, match="got 999"):
        data.setup("fit")
    data.num_clients = 4
    data.setup("fit")
    assert lists(data.parts) == lists(federated(val_size=0.25).parts)
    assert not set(torch.cat(data.parts).tolist()) & set(held(data))


# --- labels and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attributes",
    [
        {"targets": [0, 1, 0, 1, 0, 1]},
        {"labels": torch.tensor([0, 1, 0, 1, 0, 1])},
        {"labels": np.array([0, 1, 0, 1, 0, 1])},
        {"targets": None, "labels": [0, 1, 0, 1, 0, 1]},
        {"targets": ["cat", "dog"] * 3, "labels": [0, 1, 0, 1, 0, 1]},
    ],
)
def test_labels_are_read_off_the_data_set(attributes):
    data = federated(having(**attributes), partition=ByLabel(), num_clients=2)
    assert lists(data.parts) == [[0, 2, 4], [1, 3, 5]]
    assert data.class_labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_the_last_tensor_holds_the_labels():
    tensors = torch.zeros(4), torch.zeros(4), torch.tensor([1, 0, 1, 0])
    for data in (TensorDataset(*tensors), InMemory(*tensors)):
        assert labels_of(data).tolist() == [1, 0, 1, 0]
        assert labels_of(Subset(data, [3, 0])).tolist() == [0, 1]
    assert labels_of(Subset([1, 2], [0])) is None
    data.targets = [1, 1, 0, 0]
    assert labels_of(data).tolist() == data.targets


def test_labels_that_are_given_come_first():
    train = having(targets=[0] * 6)
    data = federated(train, partition=ByLabel(), num_clients=2, labels=[1, 1, 1, 0, 0, 0])
    assert lists(data.parts) == [[3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"targets": torch.zeros(6, 2)},
        {"targets": ["cat", "dog"] * 3},
        {"targets": [{"box": 1}] * 6},
        {"targets": [0, 1]},
        {"labels": lambda: [0] * 6},
    ],
)
def test_only_a_rule_that_splits_by_labels_needs_one_for_each_sample(attributes):
    data = federated(having(**attributes), val_size=2)
    assert data.num_samples.tolist() == [1] * 4
    assert data.class_labels is None
    with pytest.raises(FederationError, match=r"ByLabel needs a label .*pass labels="):
        federated(having(**attributes), partition=ByLabel())


def test_a_stratified_split_gives_all_clients_the_same_classes_and_needs_labels():
    data = federated(partition=IID(stratified=True), labels=torch.arange(60) % 3, val_size=0)
    assert data.class_counts.tolist() == [[5, 5, 5]] * 4
    assert data.manifest().parameters == {"stratified": True}
    with pytest.raises(FederationError, match=r"IID needs a label .*pass labels="):
        federated(having(), partition=IID(stratified=True))


@pytest.mark.parametrize(
    ("labels", "got"),
    [
        ([0, 1], r"shape \(2,\)"),
        ([0] * 99, r"shape \(99,\)"),
        ([[0, 1]] * 60, r"shape \(60, 2\)"),
        (["a"] * 60, "none: number the classes"),
    ],
)
@pytest.mark.parametrize("partition", [IID(), ByLabel()])
def test_labels_that_do_not_fit_are_refused(labels, got, partition):
    with pytest.raises(FederationError, match=f"for each of the 60 training samples, got {got}"):
        federated(labels=labels, val_size=0.5, partition=partition)


def test_keys_that_the_rule_does_not_read_are_refused():
    with pytest.raises(FederationError, match=r"IID does not read keys: .* set partition=Natural"):
        federated(keys=[0, 1] * 30)


def test_keys_are_an_argument_or_an_attribute():
    keys = [31, 8, 8, 31, 5, 8]
    by_argument = federated(having(), partition=Natural(), num_clients=3, keys=keys)
    by_attribute = federated(having(keys=torch.tensor(keys)), partition=Natural(), num_clients=3)
    both = federated(having(keys=[0] * 6), partition=Natural(), num_clients=3, keys=keys)
    for data in (by_argument, by_attribute, both):
        assert lists(data.parts) == [[4], [1, 2, 5], [0, 3]]


def test_natural_clients_do_not_vanish():
    keys = torch.arange(60).clamp(max=20)  # 20 clients with one sample, one with 40
    parts = []
    for _ in range(2):
        data = federated(partition=Natural(), num_clients=None, keys=keys, val_size=20, seed=1)
        assert (data.num_clients, len(data.val)) == (21, 20)
        assert sorted([*torch.cat(data.parts).tolist(), *held(data)]) == list(range(60))
        parts.append(lists(data.parts))
    assert parts[0] == parts[1]
    with pytest.raises(FederationError, match="but 60 clients need at least one each: lower val_s"):
        federated(partition=Natural(), num_clients=None, keys=range(60), val_size=0.1)


def test_a_hold_out_that_leaves_all_clients_is_the_same_with_keys():
    plain = federated(val_size=15)
    keys = torch.arange(60) // 15
    for options in ({"num_clients": None}, {"num_clients": 2, "keys": torch.arange(60)}):
        data = federated(partition=Natural(), val_size=15, **{"keys": keys, **options})
        assert held(data) == held(plain)


@pytest.mark.parametrize(
    "keys",
    [
        None,
        [1, 2, 3],
        lambda: [],
        [1.0, float("nan"), 2.0] * 20,
        ["a", None, "b"] * 20,
        ["a", float("nan"), "b"] * 20,
        np.array(["2020-01-01", "NaT", "2021-01-01"] * 20, dtype="datetime64[D]"),
        ["1", 1] * 30,
    ],
)
def test_keys_that_do_not_fit_are_refused(keys):
    words = r"Natural needs a key for each of the .* all of one type and none None or NaN, got"
    train, options = (having(keys=keys), {}) if callable(keys) else (None, {"keys": keys})
    both = [(train, options), *[(Subset(having(keys=keys), range(60)), {})] * (np.size(keys) == 60)]
    for train, options in both:
        with pytest.raises(FederationError, match=words):
            federated(train, partition=Natural(), num_clients=None, **options)


class Column:
    """A column of a table without its first rows, as of pandas: its items are found by an index."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        raise KeyError(index)

    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize("labels", [Column([1, 1, 1, 0, 0, 0]), np.array([0, 0, 0, 1, 1, 1])[::-1]])
def test_labels_may_be_any_column_of_numbers(labels):
    for train, options in ((having(targets=labels), {}), (having(), {"labels": labels})):
        data = federated(train, partition=ByLabel(), num_clients=2, val_size=0, **options)
        assert lists(data.parts) == [[3, 4, 5], [0, 1, 2]]


def test_large_numbers_are_no_classes_to_count():
    data = federated(labels=1_700_000_000 + torch.arange(60) % 3, partition=ByLabel())
    assert data.class_counts is None
    assert [len(row) for row in data.manifest().class_counts] == [1] * 4


def test_keys_of_a_subset_are_those_of_its_samples():
    index = torch.randperm(60, generator=rng()).tolist()[:30]
    keys = torch.arange(60) // 15
    tensors = TensorDataset(torch.arange(60.0), torch.zeros(60))
    tensors.keys, tensors.key_names = keys, list("abcd")
    for train in (Subset(tensors, index), Subset(Subset(tensors, range(60)), index)):
        data = federated(train, partition=Natural(), num_clients=None)
        for client, part in enumerate(data.parts):
            assert {int(keys[index[i]]) for i in part.tolist()} == {client}
        assert data.client_names == list("abcd")


def test_only_rules_that_know_their_clients_can_do_without_a_number(tmp_path):
    by_key = federated(partition=Natural(), num_clients=None, keys=torch.arange(60) // 10)
    assert by_key.num_clients == len(by_key.parts) == 6
    by_key.manifest().write(tmp_path / "split.json")
    again = federated(partition=FromManifest(tmp_path / "split.json"), num_clients=None)
    assert again.num_clients == len(again.parts) == 6
    for rule in (IID(), ByLabel(), Dirichlet()):
        with pytest.raises(FederationError, match=r"does not determine .*: set num_clients"):
            federated(partition=rule, num_clients=None)


def test_local_tests_leave_a_sample_to_train_on():
    data = federated(numbered(8), num_clients=4, local_test_size=0.99)
    assert [len(part) for part in data.parts] == [len(test) for test in data.local_tests] == [1] * 4


# --- manifests ------------------------------------------------------------------------------------


X = torch.arange(60.0)
REAL, NONE = TensorDataset(X, torch.rand(60, generator=rng())), having(x=X, y=X)


@pytest.mark.parametrize("train", [numbered(), REAL, NONE], ids=["classes", "real", "none"])
@pytest.mark.parametrize("val_size", [0, 0.25])
def test_a_manifest_brings_back_the_split_and_the_validation_samples(tmp_path, train, val_size):
    first = federated(train, partition=QuantitySkew(), val_size=val_size, seed=3)
    first.manifest().write(tmp_path / "split.json")
    # The manifest says what is held out, whatever val_size is.
    other = {"num_clients": None, "val_size": 0.9, "seed": 99}
    again = federated(train, partition=FromManifest(tmp_path / "split.json"), **other)
    assert lists(again.parts) == lists(first.parts)
    assert again.checksum == first.checksum
    assert (again.val is None) == (first.val is None) == (val_size == 0)
    if val_size:
        assert held(again) == held(first)


# --- streams --------------------------------------------------------------------------------------


def test_samples_arrive_in_steps(blobs):
    def made(**options):
        return federated(blobs(), **{"seed": 3, "batch_size": 4} | options)

    whole, data = made(), made(stream_steps=4)
    assert data.num_samples.tolist() == whole.num_samples.tolist() == [30] * 4
    assert torch.equal(data.class_counts, whole.class_counts)
    steps = []
    for round in range(4):
        data.advance(round)
        assert data.num_samples.tolist() == [len(part) for part in data.present]
        assert data.batches_per_epoch.tolist() == [2] * 4
        assert int(data.class_counts.sum()) == int(data.num_samples.sum())
        steps.append(data.present)
    for client in range(4):
        each = [parts[client] for parts in steps]
        assert {len(part) for part in each} == {7, 8}
        assert torch.equal(torch.cat(each).sort().values, whole.parts[client])
    first = zip(whole.parts, steps[0], strict=True)
    places = {tuple(torch.searchsorted(part, step).tolist()) for part, step in first}
    assert len(places) == 4  # every client has an order of its own
    data.advance(4)  # the first step again
    assert all(torch.equal(a, b) for a, b in zip(data.present, steps[0], strict=True))
    again = made(stream_steps=4)
    again.advance(2)
    assert all(torch.equal(a, b) for a, b in zip(again.present, steps[2], strict=True))
    checks = {made(stream_steps=a, seed=s).checksum for a, s in ((1, 3), (4, 3), (4, 4), (3, 3))}
    assert len(checks) == 4
    assert str(made(stream_steps=4).manifest()) == str(whole.manifest())


def test_a_stream_needs_a_sample_a_step(blobs):
    with pytest.raises(FederationError, match=r"stream_steps=13 needs .*, but client 0 has 12"):
        federated(blobs(), num_clients=10, stream_steps=13)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_targets_that_are_not_finite_are_refused(value):
    y = torch.rand(60)
    y[7] = value
    with pytest.raises(FederationError, match="targets must be finite numbers: remove NaN"):
        federated(TensorDataset(torch.arange(60.0), y), partition=Dirichlet())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint16, torch.uint32])
def test_labels_may_be_integers_of_any_type(dtype):
    if dtype in (torch.uint16, torch.uint32) and torch.__version__ < "2.11":
        pytest.skip("PyTorch before 2.11 does not select rows of such tensors")
    labels = (torch.arange(60) % 2).to(dtype)
    for partition in (IID(), Dirichlet(), ByLabel()):
        data = federated(TensorDataset(torch.arange(60.0), labels), partition=partition, val_size=8)
        assert data.class_counts.sum(0).tolist() == [26, 26]


def test_a_sample_in_two_rows_is_not_held_out():
    twice = [*range(40), *range(20)]
    for train in (Subset(Lists(), twice), Subset(numbered(), twice)):
        for options in ({"val_size": 0.5}, {"local_test_size": 0.5}):
            with pytest.raises(FederationError, match=r"row \d+ is held out, but another row"):
                federated(train, num_clients=1, **options)
        assert federated(train, num_clients=1).num_samples.tolist() == [60]


def test_few_real_values_are_classes():
    y = torch.tensor([0.0] * 57 + [1.0] * 3)  # such as labels of binary cross-entropy
    data = federated(TensorDataset(torch.arange(60.0), y), partition=ByLabel(), num_clients=2)
    assert [y[part].unique().tolist() for part in data.parts] == [[0.0], [1.0]]


def test_a_manifest_of_other_data_is_refused(tmp_path):
    federated(val_size=0.25).manifest().write(tmp_path / "split.json")
    rule = FromManifest(tmp_path / "split.json")
    with pytest.raises(FederationError, match="is for 60 samples, but the run has 61"):
        federated(numbered(61), partition=rule)
    with pytest.raises(FederationError, match="is for 4 clients, but the run has 5"):
        federated(partition=rule, num_clients=5)
    x, y = numbered().tensors
    with pytest.raises(FederationError, match=r"gives client \d the classes"):
        federated(TensorDataset(x, y.sort().values), partition=rule)
