"""Any map-style data set as a federation: who holds what, in which batches, and what is refused."""

import random
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.datamodules.federated import (
    Batches,
    EvaluationBatches,
    RoundBatches,
    client_batches,
    hold_out,
    labels_of,
)
from lightning_fl.functional import Purpose, derive_seed
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.partition import (
    IID,
    ByKey,
    ByLabel,
    Dirichlet,
    FromManifest,
    Manifest,
    QuantitySkew,
)
from lightning_fl.types import ClientBatches, FederationError, RoundPlan


def numbered(n=60, classes=3):
    """Samples whose x is their own number: a batch tells which samples it holds."""
    return TensorDataset(torch.arange(n, dtype=torch.float64), torch.arange(n) % classes)


def federated(train=None, *, val_size=0, num_clients=4, **options):
    data = FederatedDataModule(
        numbered() if train is None else train,
        num_clients=num_clients,
        val_size=val_size,
        **options,
    )
    data.setup("fit")
    return data


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def plan(data, seed=0, round=0, steps=None):
    """Everyone takes part, for one pass over their samples."""
    steps = data.batches_per_epoch if steps is None else torch.full_like(data.num_samples, steps)
    return RoundPlan(seed, round, torch.arange(len(steps)), steps)


def batches(data, **options):
    """A round's batches as a loop would get them."""
    data.plan = lambda: plan(data, **options)
    return list(data.train_dataloader())


def numbers(batches):
    return [batch[0].long().tolist() for batch in batches]


def joined(batches):
    return list(chain.from_iterable(batches))


def held(data):
    """Numbers of the validation samples."""
    return sorted(joined(numbers(data.val_dataloader())))


def lists(parts):
    return [part.tolist() for part in parts]


# --- held out for validation ----------------------------------------------------------------------


def test_held_out_samples_have_the_labels_proportions():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)[torch.randperm(100, generator=rng())]
    data = federated(TensorDataset(torch.arange(100.0), labels), val_size=0.2)
    assert labels[held(data)].bincount().tolist() == [10, 6, 4]


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
    assert federated().checksum == federated(seed=5).checksum != federated(seed=0).checksum


@pytest.mark.parametrize(
    ("val_size", "count"), [(0, 0), (0.0, 0), (1, 1), (20, 20), (0.25, 15), (0.001, 0), (59, 59)]
)
def test_val_size_is_a_count_or_a_fraction(val_size, count):
    data = federated(val_size=val_size, num_clients=1)
    assert data.num_samples.tolist() == [60 - count]
    assert len(held(data)) == count if count else data.val_dataloader() == []


@pytest.mark.parametrize("val_size", [60, 70, 0.999])
def test_holding_out_everything_is_refused(val_size):
    with pytest.raises(FederationError, match=f"val_size={val_size} holds out all of the 60"):
        federated(val_size=val_size)


@pytest.mark.parametrize("val_size", [-1, 1.0, 1.5, -0.1, float("nan")])
def test_a_val_size_out_of_range_is_refused(val_size):
    with pytest.raises(FederationError, match=f"a count of samples, got {val_size}"):
        FederatedDataModule(numbered(), val_size=val_size)


def test_given_validation_samples_are_taken_and_nothing_is_held_out():
    data = FederatedDataModule(numbered(), numbered(7), num_clients=4, val_size=0.5)
    data.setup("fit")
    assert held(data) == list(range(7))
    assert data.num_samples.sum() == 60


def test_a_second_try_after_an_error_holds_out_the_same_samples():
    data = FederatedDataModule(numbered(), num_clients=999, val_size=0.25)
    with pytest.raises(FederationError, match="999 clients"):
        data.setup("fit")
    data.num_clients = 4
    data.setup("fit")
    assert lists(data.parts) == lists(federated(val_size=0.25).parts)
    assert not set(torch.cat(data.parts).tolist()) & set(held(data))


def test_setup_splits_once_and_a_test_needs_no_training_samples():
    data = federated()
    parts = data.parts
    data.setup("fit")
    data.setup("validate")
    assert data.parts is parts
    only_test = FederatedDataModule(test=numbered(5))
    for stage in ("test", "predict"):
        only_test.setup(stage)
        assert only_test.parts == []
    assert numbers(only_test.test_dataloader()) == numbers(only_test.predict_dataloader())


# --- batches of a client --------------------------------------------------------------------------


def take(count, *args, **options):
    stream = client_batches(*args, **options)
    return [next(stream) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), size=st.integers(1, 40) | st.none(), drop_last=st.booleans())
def test_each_pass_covers_all_samples_once(n, size, drop_last):
    part = torch.arange(n) * 10
    data = federated(numbered(n), num_clients=1, batch_size=size, drop_last=drop_last)
    count = int(data.batches_per_epoch)
    found = take(3 * count, part, size, rng(), drop_last=drop_last)
    for i in range(3):
        one_pass = torch.cat(found[i * count : (i + 1) * count]).tolist()
        assert len(set(one_pass)) == len(one_pass)
        assert set(one_pass) <= set(part.tolist())
        if drop_last:
            assert {len(b) for b in found} == {min(size or n, n)}
            assert n - len(one_pass) < min(size or n, n)
        else:
            assert len(one_pass) == n


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(3, 40),
    size=st.integers(1, 16) | st.none(),
    drop_last=st.booleans(),
    replacement=st.booleans(),
)
def test_the_smallest_batch_is_that_of_a_pass(n, size, drop_last, replacement):
    options = {"batch_size": size, "drop_last": drop_last, "replacement": replacement}
    rule = QuantitySkew(alpha=0.5)
    data = federated(numbered(n), partition=rule, num_clients=3, **options)
    found = [
        min(len(batch) for batch in take(count, part, generator=rng(), **options))
        for part, count in zip(data.parts, data.batches_per_epoch.tolist(), strict=True)
    ]
    assert data.smallest_batch.tolist() == found


def test_passes_differ_in_order():
    passes = [b.tolist() for b in take(5, torch.arange(20), None, rng())]
    assert len({tuple(p) for p in passes}) == 5


def test_with_replacement_every_batch_is_drawn_from_all_samples():
    found = take(500, torch.arange(10), 4, rng(), replacement=True)
    assert {len(batch) for batch in found} == {4}
    assert any(len(batch.unique()) < 4 for batch in found)
    shares = torch.cat(found).bincount() / 2000
    assert shares.tolist() == pytest.approx([0.1] * 10, abs=0.03)
    # Passes would have every sample as often as any other.
    assert shares.unique().numel() > 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 4}, [4, 4, 2]),
        ({"batch_size": 4, "drop_last": True}, [4, 4]),
        ({"batch_size": 4, "replacement": True}, [4, 4, 4]),
        ({"batch_size": 10}, [10]),
        ({"batch_size": 99}, [10]),
        ({"batch_size": 99, "drop_last": True}, [10]),
        ({"batch_size": None}, [10]),
        ({"batch_size": None, "drop_last": True}, [10]),
        ({"batch_size": 1}, [1] * 10),
    ],
)
def test_an_epoch_of_a_client_has_these_batches(options, sizes):
    data = federated(numbered(20), num_clients=2, **options)
    assert data.batches_per_epoch.tolist() == [len(sizes)] * 2
    found = numbers(batches(data))
    assert [len(b) for b in found] == sizes * 2
    for client, part in enumerate(data.parts):
        own = found[client * len(sizes) : (client + 1) * len(sizes)]
        assert set(joined(own)) <= set(part.tolist())


@pytest.mark.parametrize("batch_size", [1, 32, None])
def test_one_sample_is_enough(batch_size):
    data = federated(numbered(1), num_clients=1, batch_size=batch_size)
    assert numbers(batches(data)) == [[0]]
    assert numbers(batches(data, steps=3)) == [[0], [0], [0]]


def test_as_many_clients_as_samples_and_no_more():
    assert sorted(joined(numbers(batches(federated(numbered(7), num_clients=7))))) == [*range(7)]
    with pytest.raises(FederationError, match=r"8 clients cannot share 7 samples"):
        federated(numbered(7), num_clients=8)
    with pytest.raises(FederationError, match=r"7 clients cannot share 6 samples"):
        federated(numbered(7), num_clients=7, val_size=1)


def test_a_round_asked_for_twice_has_the_same_batches_and_another_round_has_not():
    data = federated(batch_size=4)
    first = numbers(batches(data))
    data.plan = lambda: plan(data)
    loader = data.train_dataloader()
    assert numbers(loader) == numbers(loader) == first
    assert len(loader) == len(first)
    assert numbers(batches(data, round=1)) != first
    assert numbers(batches(data, seed=1)) != first


def test_batches_come_client_after_client():
    data = federated(batch_size=4)
    owner = {i: client for client, part in enumerate(data.parts) for i in part.tolist()}
    owners = [{owner[i] for i in batch} for batch in numbers(batches(data))]
    assert owners == [{client} for client in range(4) for _ in range(4)]


def test_adding_a_client_changes_no_batch_of_the_others():
    parts = list(torch.arange(30).split(10))
    options = {"batch_size": 3, "replacement": False, "drop_last": False}

    def of(clients):
        steps = torch.full((len(clients),), 5)
        found = RoundBatches(
            RoundPlan(1, 2, torch.tensor(clients), steps), parts[: max(clients) + 1], **options
        )
        found = [(batch.index.tolist(), batch.keys) for batch in found]
        return {client: found[5 * i : 5 * i + 5] for i, client in enumerate(clients)}

    two, three = of([0, 1]), of([2, 1, 0])
    assert two == {client: three[client] for client in (0, 1)}
    assert two[0] != two[1]


# --- several clients and local steps in a batch ---------------------------------------------------


def work(data, num_steps, **layout):
    clients = torch.arange(len(num_steps))
    return RoundPlan(3, 1, clients, torch.tensor(num_steps), **layout)


def read(data, plan):
    """A round's batches, with the plan's steps beside them."""
    data.plan = lambda: plan
    loader = data.train_dataloader()
    assert len(loader) == len(plan.schedule)
    return list(zip(plan.schedule, loader, strict=True))


def each_client(data, plan):
    """What each client is trained on in each local step: ``{(client, step): samples}``.

    Lanes are filled up with samples of their own client, which are left out here, unless each
    client's batch comes by itself.
    """
    found = {}
    for step, batch in read(data, plan):
        layout = step.steps, len(step.rows)
        if isinstance(batch, ClientBatches):
            for at, own in enumerate(batch):
                i, row = step.start + at // len(step.rows), step.rows[at % len(step.rows)]
                assert (own is None) == (i >= plan.num_steps[row])
                if own is not None:
                    assert set(own[0][:, 0].long().tolist()) <= set(data.parts[row].tolist())
                    found[row, i] = own[0].tolist()
            continue
        x, _ = batch
        x = x.view(*layout, len(x) // (step.steps * len(step.rows)), -1)
        sizes = data.batch_sizes(plan.clients[list(step.rows)], step.start, step.steps)
        assert sizes.shape == layout
        for i in range(step.steps):
            for lane, row in enumerate(step.rows):
                numbers = x[i, lane, :, 0].long()
                assert set(numbers.tolist()) <= set(data.parts[row].tolist())
                size = int(sizes[i, lane]) if step.start + i < plan.num_steps[row] else 0
                assert (numbers[size:] == numbers[0]).all()
                if size:
                    found[row, step.start + i] = x[i, lane, :size].tolist()
    return found


LAYOUTS = [(1, 1), (1, 3), (2, 1), (3, 2), (5, 1), (5, 4), (9, 50)]
OPTIONS = [
    {},
    {"batch_size": 5},
    {"batch_size": 5, "drop_last": True},
    {"batch_size": 5, "replacement": True},
    {"batch_size": None},
    {"batch_size": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("lanes", "steps_per_batch"), LAYOUTS)
def test_in_lanes_a_client_has_the_samples_that_it_has_alone(lanes, steps_per_batch, options):
    data = federated(numbered(70), partition=QuantitySkew(), num_clients=5, **options)
    num_steps = [3, 8, 1, 4, 6]
    alone = {
        (step.rows[0], step.start): batch[0][:, None].tolist()
        for step, batch in read(data, work(data, num_steps))
    }
    layout = {"lanes": lanes, "steps_per_batch": steps_per_batch}
    assert each_client(data, work(data, num_steps, **layout)) == alone
    assert len(alone) == sum(num_steps)


class DrawsAlways(Dataset):
    """Transforms that draw from all of the global generators."""

    def __init__(self):
        self.labels = (torch.arange(70) % 3).tolist()

    def __len__(self):
        return 70

    def __getitem__(self, i):
        noise = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([float(i), *noise]), self.labels[i]


@pytest.mark.parametrize(("lanes", "steps_per_batch"), LAYOUTS)
def test_in_lanes_random_transforms_draw_what_they_draw_alone(lanes, steps_per_batch):
    data = federated(DrawsAlways(), partition=QuantitySkew(), num_clients=5, batch_size=4)
    num_steps = [3, 8, 1, 4, 6]
    alone = each_client(data, work(data, num_steps))
    layout = {"lanes": lanes, "steps_per_batch": steps_per_batch}
    assert each_client(data, work(data, num_steps, **layout)) == alone
    draws = [tuple(sample) for batch in alone.values() for sample in batch]
    assert len(set(draws)) == len(draws)


def test_each_step_of_each_lane_has_a_key_of_its_own():
    data = federated(numbered(40), num_clients=4, batch_size=4)
    batches = data._batches(work(data, [2, 3, 1, 3], lanes=2, steps_per_batch=2), data.parts)
    found = [(batch, step) for batch, step in zip(batches, batches.plan.schedule, strict=True)]
    for batch, step in found:
        assert len(batch.keys) == step.steps * len(step.rows)
        assert len(batch.index) % len(batch.keys) == 0
    keys = [key for batch, _ in found for key in batch.keys]
    assert len(set(keys)) == len(keys)


@settings(max_examples=60, deadline=None)
@given(
    n=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    batch_size=st.none() | st.integers(1, 12),
    drop_last=st.booleans(),
    replacement=st.booleans(),
    start=st.integers(0, 9),
    count=st.integers(1, 9),
)
def test_the_sizes_of_batches_are_those_that_come(
    n, batch_size, drop_last, replacement, start, count
):
    keys = [client for client, size in enumerate(n) for _ in range(size)]
    data = federated(
        numbered(sum(n)),
        partition=ByKey(),
        keys=keys,
        num_clients=None,
        batch_size=batch_size,
        drop_last=drop_last,
        replacement=replacement,
    )
    assert data.num_samples.tolist() == n
    clients = list(reversed(range(len(n))))
    found = data.batch_sizes(torch.tensor(clients), start, count)
    assert found.shape == (count, len(n))
    for lane, client in enumerate(clients):
        batches = client_batches(data.parts[client], batch_size, rng(), replacement, drop_last)
        sizes = [len(next(batches)) for _ in range(start + count)][start:]
        assert found[:, lane].tolist() == sizes


@pytest.mark.parametrize(
    ("train", "size"),
    [
        (TensorDataset(torch.zeros(9, 2, 3), torch.zeros(9)), 4 * 7),
        (TensorDataset(torch.zeros(9, 5, dtype=torch.uint8), torch.zeros(9)), 4 * 6),
    ],
)
def test_a_sample_takes_the_memory_of_its_numbers(train, size):
    assert federated(train, num_clients=2).sample_bytes == size


def test_samples_of_any_shape_take_memory(blobs):
    assert federated(Dicts(), num_clients=2).sample_bytes == 4 * 2


# --- any map-style data set -----------------------------------------------------------------------


class Lists(Dataset):
    """Samples are lists; labels are an attribute."""

    def __init__(self, n=60):
        self.x, self.y = numbered(n).tensors
        self.targets = self.y.tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return [self.x[i], self.y[i]]


class Dicts(Lists):
    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}


class Fetches(Lists):
    """Fetches a batch at once, and notes how often."""

    calls = 0

    def __getitems__(self, index):
        self.calls += 1
        assert all(type(i) is int for i in index)
        return [self[i] for i in index]


class Own(TensorDataset):
    """A child of TensorDataset may do something else with its samples."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + 100, y


def shifted(n=60):
    """The same samples as a Subset of more, in another order."""
    more = numbered(n + 5)
    order = torch.arange(n + 5).flip(0)
    return Subset(TensorDataset(*(t[order] for t in more.tensors)), list(range(n + 4, 4, -1)))


SAME = {
    "InMemory": lambda: InMemory(*numbered().tensors),
    "lists": Lists,
    "__getitems__": Fetches,
    "Subset": shifted,
    "Subset of lists": lambda: Subset(Lists(70), range(60)),
    "a list of tuples": lambda: [tuple(sample) for sample in numbered()],
}


@pytest.mark.parametrize("kind", SAME)
def test_any_map_style_data_set_gives_the_same_federation(kind):
    expected = federated(val_size=0.25, batch_size=4)
    labels = numbered().tensors[1].tolist() if kind == "a list of tuples" else None
    data = federated(SAME[kind](), val_size=0.25, batch_size=4, labels=labels)
    assert (lists(data.parts), held(data)) == (lists(expected.parts), held(expected))
    for batch, other in zip(batches(data), batches(expected), strict=True):
        assert len(batch) == 2
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def test_samples_may_be_dictionaries():
    batch = batches(federated(Dicts(), batch_size=4))[0]
    assert batch.keys() == {"x", "y"}
    assert torch.equal(batch["x"].long() % 3, batch["y"])


def test_getitems_is_called_once_a_batch():
    data = federated(Fetches(), batch_size=4)
    assert len(batches(data)) == data.train.calls == 16


def test_a_child_of_tensor_dataset_is_asked_for_its_own_samples():
    assert min(min(b) for b in numbers(batches(federated(Own(*numbered().tensors))))) == 100


def test_a_collate_function_of_ones_own_makes_the_batches():
    data = federated(Lists(), batch_size=4, collate_fn=lambda rows: {"n": len(rows)})
    assert batches(data)[0] == {"n": 4}


def test_tensors_in_memory_have_one_length():
    with pytest.raises(FederationError, match=r"one length, got \[3, 4\]"):
        InMemory(torch.zeros(3), torch.zeros(4))
    with pytest.raises(FederationError, match=r"one length, got \[\]"):
        InMemory()
    assert InMemory(torch.arange(3))[1] == (torch.tensor(1),)


# --- labels and keys ------------------------------------------------------------------------------


def having(**attributes):
    data = Lists(6)
    del data.targets
    vars(data).update(attributes)
    return data


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
        (["a"] * 60, "none"),
    ],
)
@pytest.mark.parametrize("partition", [IID(), ByLabel()])
def test_labels_that_do_not_fit_are_refused(labels, got, partition):
    with pytest.raises(FederationError, match=f"for each of the 60 training samples, got {got}"):
        federated(labels=labels, val_size=0.5, partition=partition)


def test_keys_are_an_argument_or_an_attribute():
    keys = [31, 8, 8, 31, 5, 8]
    by_argument = federated(having(), partition=ByKey(), num_clients=3, keys=keys)
    by_attribute = federated(having(keys=torch.tensor(keys)), partition=ByKey(), num_clients=3)
    both = federated(having(keys=[0] * 6), partition=ByKey(), num_clients=3, keys=keys)
    for data in (by_argument, by_attribute, both):
        assert lists(data.parts) == [[4], [1, 2, 5], [0, 3]]


def test_natural_clients_hold_what_validation_leaves_of_their_samples():
    keys = torch.arange(60) // 15
    data = federated(partition=ByKey(), keys=keys, val_size=0.25)
    for client, part in enumerate(data.parts):
        assert set(keys[part].tolist()) == {client}
    assert sorted([*torch.cat(data.parts).tolist(), *held(data)]) == list(range(60))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (None, r"ByKey needs a key for each training sample: pass keys="),
        ([1, 2, 3], r"ByKey needs one key for each of the 60 training samples, got \(3,\)"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, words):
    with pytest.raises(FederationError, match=words):
        federated(partition=ByKey(), num_clients=1, keys=keys)


def test_keys_may_be_names():
    data = federated(partition=ByKey(), num_clients=None, keys=["bob", "ann"] * 30, val_size=0)
    assert [part.tolist() for part in data.parts] == [[*range(1, 60, 2)], [*range(0, 60, 2)]]


def test_a_method_called_keys_is_no_key():
    with pytest.raises(FederationError, match="ByKey needs a key"):
        federated(having(keys=lambda: []), partition=ByKey(), num_clients=1)


def test_only_rules_that_know_their_clients_can_do_without_a_number(tmp_path):
    by_key = federated(partition=ByKey(), num_clients=None, keys=torch.arange(60) // 10)
    assert by_key.num_clients == len(by_key.parts) == 6
    by_key.manifest().write(tmp_path / "split.json")
    again = federated(partition=FromManifest(tmp_path / "split.json"), num_clients=None)
    assert again.num_clients == len(again.parts) == 6
    for rule in (IID(), ByLabel(), Dirichlet()):
        with pytest.raises(FederationError, match="any number of clients: set num_clients"):
            federated(partition=rule, num_clients=None)


# --- manifests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["classes", "real", "none"])
@pytest.mark.parametrize("val_size", [0, 0.25])
def test_a_manifest_brings_back_the_split_and_the_validation_samples(tmp_path, labels, val_size):
    x = torch.arange(60.0)
    train = {
        "classes": numbered(),
        "real": TensorDataset(x, torch.rand(60, generator=rng())),
        "none": having(x=x, y=x),
    }[labels]
    first = federated(train, partition=QuantitySkew(), val_size=val_size, seed=3)
    first.manifest().write(tmp_path / "split.json")
    again = federated(
        train,
        partition=FromManifest(tmp_path / "split.json"),
        num_clients=None,
        val_size=0.9,  # does not matter: the manifest says what is held out
        seed=99,
    )
    assert lists(again.parts) == lists(first.parts)
    assert again.checksum == first.checksum
    assert (again.val is None) == (first.val is None) == (val_size == 0)
    if val_size:
        assert held(again) == held(first)


@pytest.mark.parametrize("seed", range(3))
def test_a_manifest_without_labels_counts_all_samples_and_no_classes(seed):
    x = torch.arange(60.0)
    manifest = federated(having(x=x, y=x), val_size=0.9, seed=seed).manifest()
    assert manifest.num_samples == 60
    assert manifest.class_counts == [{}] * 4


def test_a_manifest_says_how_the_data_were_split():
    data = federated(partition=ByLabel(2), val_size=0.25, num_clients=3, seed=7)
    manifest = data.manifest()
    assert isinstance(manifest, Manifest)
    assert (manifest.rule, manifest.parameters) == ("ByLabel", {"classes_per_client": 2})
    assert (manifest.seed, manifest.num_samples) == (7, 60)
    assert manifest.clients == lists(data.parts)
    labels = data.class_labels
    for part, row in zip(data.parts, manifest.class_counts, strict=True):
        assert row == {c: int((labels[part] == c).sum()) for c in labels[part].unique().tolist()}


def test_a_manifest_of_other_data_is_refused(tmp_path):
    federated(val_size=0.25).manifest().write(tmp_path / "split.json")
    rule = FromManifest(tmp_path / "split.json")
    with pytest.raises(FederationError, match="is for 60 samples, the run has 61"):
        federated(numbered(61), partition=rule)
    with pytest.raises(FederationError, match="is for 4 clients, the run has 5"):
        federated(partition=rule, num_clients=5)
    x, y = numbered().tensors
    with pytest.raises(FederationError, match=r"gives client \d the classes"):
        federated(TensorDataset(x, y.sort().values), partition=rule)


# --- what is refused ------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Counted(Stream):
    """A stream may know how long it is: torch's own loader asks it."""

    def __len__(self):
        return 5


class NoLength(Dataset):
    def __getitem__(self, i):
        return i


@pytest.mark.parametrize("name", ["train", "val", "test"])
@pytest.mark.parametrize(
    "make",
    [Stream, Counted, NoLength, lambda: iter([1]), lambda: {1, 2}, lambda: DataLoader(numbered())],
)
def test_what_is_not_map_style_is_refused_by_name(name, make):
    data = FederatedDataModule(**{"train": numbered(), name: make()})
    with pytest.raises(FederationError, match=f"{name} must be a map-style data set .* got "):
        data.setup()


@pytest.mark.parametrize("name", ["train", "val", "test"])
def test_an_empty_data_set_is_refused_by_name(name):
    data = FederatedDataModule(**{"train": numbered(), name: numbered(0)})
    with pytest.raises(FederationError, match=f"{name} has no samples"):
        data.setup()


def test_training_samples_are_needed():
    with pytest.raises(FederationError, match="needs training samples: pass train="):
        FederatedDataModule().setup("fit")


def test_a_test_needs_test_samples():
    data = federated()
    data.setup("test")
    for loader in (data.test_dataloader, data.predict_dataloader):
        with pytest.raises(FederationError, match="has no test samples: pass test="):
            loader()


@pytest.mark.parametrize("name", ["batch_size", "eval_batch_size"])
@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_has_a_sample_at_least(name, size):
    with pytest.raises(
        FederationError, match=f"^{name} must be an integer of at least 1, got {size}"
    ):
        FederatedDataModule(numbered(), **{name: size})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"batch_size": True}, "batch_size must be an integer of at least 1, got True"),
        ({"eval_batch_size": "x"}, "eval_batch_size must be an integer of at least 1, got 'x'"),
        ({"eval_batch_size": None}, "eval_batch_size must be an integer of at least 1, got None"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
        ({"num_clients": 2.5}, "num_clients must be an integer of at least 1, got 2.5"),
        ({"num_clients": 0}, "num_clients must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"val_size": "a"}, r"a fraction in \[0, 1\) or a count of samples, got 'a'"),
        ({"val_size": None}, r"a fraction in \[0, 1\) or a count of samples, got None"),
        ({"partition": IID}, r"partition must be a rule, as in partition=IID\(\), .* got <class"),
        ({"partition": "IID"}, "partition must be a rule, .* got 'IID'"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(options, words):
    with pytest.raises(FederationError, match=words):
        FederatedDataModule(numbered(), **options)


def test_numbers_of_numpy_are_numbers():
    names = ("num_clients", "batch_size", "eval_batch_size", "num_workers", "seed")
    data = federated(val_size=np.int64(6), **{name: np.int64(2) for name in names})
    assert [type(getattr(data, name)) for name in names] == [int] * 5
    assert data.num_samples.tolist() == [27, 27]
    assert len(held(federated(val_size=np.float32(0.25)))) == 15


# --- without a loop, and around the training ------------------------------------------------------


class Watch(LightningModule):
    """Notes the samples of every batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.train_batches, self.val_batches, self.test_batches = [], [], []

    def training_step(self, batch, batch_idx):
        self.train_batches.append((self.current_epoch, batch[0].long().tolist()))
        return self.weight * batch[0].sum()

    def validation_step(self, batch, batch_idx):
        self.val_batches.append(batch[0].long().tolist())

    def test_step(self, batch, batch_idx):
        self.test_batches.append(batch[0].long().tolist())

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def epochs(self):
        """Numbers of the samples, epoch by epoch, batch by batch."""
        last = self.train_batches[-1][0]
        return [[b for e, b in self.train_batches if e == epoch] for epoch in range(last + 1)]


def test_without_a_loop_it_is_centralised_training_shuffled_anew_each_epoch(trainer):
    module, again = Watch(), Watch()
    for each in (module, again):
        data = FederatedDataModule(
            numbered(), num_clients=4, batch_size=16, val_size=6, eval_batch_size=4
        )
        trainer(False, 3, log_every_n_steps=1).fit(each, datamodule=data)
    assert module.train_batches == again.train_batches
    epochs = module.epochs()
    assert [[len(b) for b in epoch] for epoch in epochs] == [[16, 16, 16, 6]] * 3
    everyone = sorted(torch.cat(data.parts).tolist())
    assert all(sorted(joined(epoch)) == everyone for epoch in epochs)
    assert len({tuple(joined(epoch)) for epoch in epochs}) == 3
    assert [len(b) for b in module.val_batches[:2]] == [4, 2]
    assert sorted(joined(module.val_batches[:2])) == held(data)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 16, "drop_last": True}, [16, 16, 16]),
        ({"batch_size": 16, "replacement": True}, [16, 16, 16, 16]),
        ({"batch_size": None}, [60]),
        ({"batch_size": 99, "drop_last": True}, [60]),
    ],
)
def test_options_of_batches_hold_for_centralised_training(trainer, options, sizes):
    module = Watch()
    data = FederatedDataModule(numbered(), numbered(3), num_clients=4, **options)
    trainer(False, 2, log_every_n_steps=1).fit(module, datamodule=data)
    for epoch in module.epochs():
        assert [len(b) for b in epoch] == sizes
        assert options.get("replacement") or len(set(joined(epoch))) == sum(sizes)


def test_without_a_trainer_it_can_be_iterated_too():
    assert sorted(joined(numbers(federated().train_dataloader()))) == list(range(60))


def test_after_a_federation_it_is_centralised_again(trainer):
    data = FederatedDataModule(numbered(), numbered(3), num_clients=4, batch_size=16)
    trainer(FederatedLoop(), 1).fit(Watch(), datamodule=data)
    assert data.plan is None
    module = Watch()
    trainer(False, 1, log_every_n_steps=1).fit(module, datamodule=data)
    assert [len(b) for b in module.epochs()[0]] == [16, 16, 16, 12]


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_a_federation_works_without_validation_samples(fit, foreign, blobs):
    data = FederatedDataModule(blobs(), num_clients=4, val_size=0)
    loop = fit(foreign(), datamodule=data, rounds=2)
    assert len(loop.rows) == 2
    assert "val_loss" not in loop.rows[0]


@pytest.mark.parametrize(
    ("saves", "when", "workers"),
    [
        ({"save_on_train_epoch_end": True}, [3, 6], 0),
        ({"save_on_train_epoch_end": True}, [3, 6], 1),
        ({"save_on_train_epoch_end": False}, [3, 6], 0),
        ({"every_n_train_steps": 1}, [1, 2, 3, 4, 5, 6], 0),
    ],
    ids=["after an epoch", "with a worker", "after validation", "after a batch"],
)
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(
    trainer, tmp_path, saves, when, workers
):
    def batches(epochs, callbacks=(), ckpt_path=None):
        module = Watch()
        data = FederatedDataModule(
            numbered(), numbered(3), num_clients=4, batch_size=20, num_workers=workers
        )
        options = {"enable_checkpointing": bool(callbacks), "log_every_n_steps": 1}
        trainer(False, epochs, callbacks, **options).fit(
            module, datamodule=data, ckpt_path=ckpt_path
        )
        return module.train_batches

    whole = batches(3)
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **saves)
    assert batches(2, [keep]) == whole[:6]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"step={i}.ckpt" for i in when]
    for step in when:
        assert batches(3, ckpt_path=tmp_path / f"step={step}.ckpt") == whole[step:]


def test_test_and_prediction_go_through_all_test_samples_in_order(trainer):
    data = FederatedDataModule(numbered(), test=numbered(7), eval_batch_size=3)
    module = Watch()
    trainer(False).test(module, datamodule=data, verbose=False)
    assert module.test_batches == [[0, 1, 2], [3, 4, 5], [6]]
    found = trainer(False).predict(module, datamodule=data)
    assert torch.cat(found).tolist() == list(range(7))


def test_a_loader_has_no_state_of_its_own():
    data = federated(batch_size=4)
    data.plan = lambda: plan(data)
    loader = data.train_dataloader()
    assert loader.state_dict() == {}
    before = numbers(loader)
    loader.load_state_dict({})
    assert numbers(loader) == before


def test_batches_are_pinned_for_a_gpu_alone_unless_the_samples_are_there(monkeypatch):
    data = federated()
    module = sys.modules[FederatedDataModule.__module__]
    for device, fits, pinned in (
        ("cpu", False, False),
        ("cuda", False, True),
        ("meta", True, False),
    ):
        monkeypatch.setattr(module, "_fits", lambda *_, fits=fits: fits)
        strategy = SimpleNamespace(root_device=torch.device(device))
        data.trainer = SimpleNamespace(strategy=strategy)
        assert data.train_dataloader().pin_memory is pinned


# --- random transforms ----------------------------------------------------------------------------


class Noisy(Lists):
    """Every sample is drawn anew, from all three global generators."""

    def __getitem__(self, i):
        return self.x[i] + torch.rand(()), random.random(), np.random.rand(), self.y[i]


def drawn(data):
    """Everything that a round, validation and test yield."""
    loaders = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    rows = [row for loader in loaders for batch in loader for row in zip(*batch, strict=True)]
    return [tuple(float(value) for value in row) for row in rows]


def noisy(workers=0, round=0):
    data = FederatedDataModule(
        Noisy(), test=Noisy(9), num_clients=4, batch_size=4, val_size=9, num_workers=workers
    )
    data.setup()
    data.plan = lambda: plan(data, round=round)
    return data


def test_random_transforms_do_not_depend_on_workers_or_global_seeds():
    torch.manual_seed(1)
    first = drawn(noisy())
    torch.manual_seed(2)
    assert drawn(noisy()) == first
    assert drawn(noisy(workers=1)) == first


def test_random_transforms_differ_between_samples_rounds_and_batches_but_not_in_validation():
    first, second = drawn(noisy()), drawn(noisy(round=1))
    clients = 51  # of 60 samples; 9 are for validation, 9 more for the test
    noise, again = ([row[1] for row in rows[:60]] for rows in (first, second))
    assert len(set(noise)) == 60
    assert not set(again[:clients]) & set(noise)
    assert second[clients:] == first[clients:]


def test_a_batchs_key_is_its_stream():
    data = Batches(Noisy(), default_collate, seed=4)
    batch = data.__getitems__([8, 9])
    with seeded_rng(derive_seed(4, Purpose.EVALUATION_SAMPLES, 8)):
        assert batch[0].tolist() == [8 + torch.rand(()).item(), 9 + torch.rand(()).item()]
    assert len(data) == 60


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_draw_nothing_from_the_global_generators(workers):
    data = noisy(workers)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    drawn(data)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@given(n=st.integers(1, 40), size=st.integers(1, 12), world_size=st.integers(1, 4))
def test_processes_share_evaluation(n, size, world_size):
    data = Batches(TensorDataset(torch.arange(n)), default_collate)
    if n < world_size:
        with pytest.raises(FederationError, match=f"{n} samples cannot be evaluated by"):
            EvaluationBatches(data, size, 0, world_size)
        return
    shares = [EvaluationBatches(data, size, rank, world_size) for rank in range(world_size)]
    batches = [[batch.index.tolist() for batch in share] for share in shares]
    # Each sample once; as many batches everywhere, since a module may wait in each; none empty.
    assert sorted(i for share in batches for batch in share for i in batch) == list(range(n))
    assert {len(share) for share in batches} == {len(shares[0])}
    assert all(1 <= len(batch) <= max(size, 2) for share in batches for batch in share)


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_samples_of_a_batch(world_size):
    plan = RoundPlan(0, 0, torch.tensor([0, 1]), torch.tensor([2, 1]))
    parts = [torch.arange(7), torch.tensor([9])]
    whole = [batch.index for batch in RoundBatches(plan, parts, batch_size=4)]
    shares = [
        [batch.index for batch in RoundBatches(plan, parts, rank, world_size, batch_size=4)]
        for rank in range(world_size)
    ]
    for i, batch in enumerate(whole):
        given = [share[i].tolist() for share in shares]
        if len(batch) >= world_size:
            assert sorted(i for share in given for i in share) == sorted(batch.tolist())
        else:  # they take one that has no weight
            assert given == [[9]] * world_size


def test_memory_of_a_fetch_is_used_again_where_that_is_allowed():
    data = InMemory(torch.arange(12.0).view(6, 2), torch.arange(6))
    index = torch.tensor([4, 0, 5])
    first = data.fetch(index, reuse=True)
    kept = [t.clone() for t in first]
    assert all(torch.equal(a, b) for a, b in zip(first, data.fetch(index), strict=True))
    second = data.fetch(index.flip(0), reuse=True)
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in second]
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(second, kept, strict=True))
    fresh = data.fetch(index)
    data.fetch(index.flip(0))
    assert all(torch.equal(a, b) for a, b in zip(fresh, kept, strict=True))


def test_samples_may_stay_on_a_device():
    data, device = InMemory(torch.arange(12.0).view(6, 2), torch.arange(6)), torch.device("meta")
    there = data.on(device)
    assert there is data.on(device)
    assert there.on(device) is there
    assert data.on(torch.device("cpu")) is data
    x, y = there.fetch(torch.tensor([4, 0, 5]))
    assert x.device == y.device == device
    assert x.shape == (3, 2)
    assert data.bytes == 12 * 4 + 6 * 8


def test_too_few_validation_samples_for_the_processes_are_refused_at_the_start():
    data = FederatedDataModule(numbered(), num_clients=4, val_size=2)
    data._processes = lambda: (0, 3)
    with pytest.raises(FederationError, match="2 validation samples cannot be shared by 3"):
        data.setup("fit")


# --- streams --------------------------------------------------------------------------------------


def test_samples_arrive_in_steps(blobs):
    def made(**options):
        options = {"num_clients": 4, "val_size": 0, "seed": 3, "batch_size": 4} | options
        data = FederatedDataModule(blobs(), **options)
        data.setup("fit")
        return data

    whole, data = made(), made(arrivals=4)
    assert data.num_samples.tolist() == whole.num_samples.tolist() == [30] * 4
    assert torch.equal(data.class_counts, whole.class_counts)
    steps = []
    for round in range(4):
        data.arrive(round)
        assert data.num_samples.tolist() == [len(part) for part in data.present]
        assert data.batches_per_epoch.tolist() == [2] * 4
        assert int(data.class_counts.sum()) == int(data.num_samples.sum())
        steps.append(data.present)
    for client in range(4):
        each = [parts[client] for parts in steps]
        assert {len(part) for part in each} == {7, 8}
        assert torch.equal(torch.cat(each).sort().values, whole.parts[client])
    data.arrive(4)  # the first step again
    assert all(torch.equal(a, b) for a, b in zip(data.present, steps[0], strict=True))
    assert data.smallest_batch.tolist() == [3] * 4  # of 7 samples in batches of 4
    again = made(arrivals=4)
    again.arrive(2)
    assert all(torch.equal(a, b) for a, b in zip(again.present, steps[2], strict=True))
    checks = {made(arrivals=a, seed=s).checksum for a, s in ((1, 3), (4, 3), (4, 4), (3, 3))}
    assert len(checks) == 4
    assert str(made(arrivals=4).manifest()) == str(whole.manifest())


def test_a_round_trains_on_what_has_arrived(fit, blobs, linear):
    class Seen(FederatedDataModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            if self.trainer.training:
                seen.setdefault(self.trainer.current_epoch, []).append(batch[0])
            return super().on_before_batch_transfer(batch, dataloader_idx)

    seen = {}
    x = torch.arange(36.0, dtype=torch.float64)[:, None].expand(-1, 3) / 36
    data = Seen(TensorDataset(x, x[:, 0]), num_clients=3, val_size=0, arrivals=3, batch_size=4)
    fit(linear(), FederatedLoop(0.5, seed=1), data, rounds=4, limit_val_batches=0)
    each = [torch.cat(seen[round])[:, 0].mul(36).round().long() for round in range(4)]
    for round in range(4):
        data.arrive(round)
        assert set(each[round].tolist()) <= set(torch.cat(data.present).tolist())
        assert len(each[round]) == 8  # two of three clients, four samples each
    assert not set(each[0].tolist()) & set(each[1].tolist())


def test_a_data_module_begins_anew_after_a_stream(fit, linear):
    x = torch.rand(36, 3).double()
    data = FederatedDataModule(TensorDataset(x, x[:, 0]), num_clients=3, val_size=0, arrivals=3)
    fit(linear(), FederatedLoop(), data, rounds=1, limit_val_batches=0)
    assert data.num_samples.tolist() == [4] * 3
    data.setup("fit")
    assert data.num_samples.tolist() == [12] * 3


def test_a_stream_needs_a_sample_a_step(blobs):
    data = FederatedDataModule(blobs(), num_clients=10, val_size=0, arrivals=13)
    with pytest.raises(FederationError, match="arrivals=13, but client 0 has 12 samples"):
        data.setup("fit")
    with pytest.raises(FederationError, match="arrivals must be an integer of at least 1"):
        FederatedDataModule(blobs(), arrivals=0)
