"""Map-style data sets give the same batches, sequential or vectorized, with or without workers."""

import multiprocessing
import os
import random
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule, InMemory
from lightning_fl.datamodules import loader as loader_module
from lightning_fl.datamodules.batches import Batch
from lightning_fl.datamodules.loader import Batches, round_loader
from lightning_fl.functional import RandomStream, derive_seed
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.runners import VectorizedClients
from lightning_fl.types import FederationError, RoundPlan
from numbered import Dicts, Lists, batches, federated, fitted, held, lists, numbered, numbers, plan
from tutorial import Net, trainer


class Fetches(Lists):
    """Fetches a batch at once, and notes how often."""

    calls = 0

    def __getitems__(self, index):
        self.calls += 1
        assert all(type(i) is int for i in index)
        return [self[i] for i in index]


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


class DrawsAlways(Lists):
    """Transforms that draw from all of the global generators."""

    def __getitem__(self, i):
        noise = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([float(i), *noise]), self.y[i]


class Scaled(ClientModule):
    """The number of a sample is about as large as its noise."""

    def forward(self, x):
        return self.net(x.double() / torch.tensor([70.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("options", [{}, {"replacement": True}, {"batch_size": 1}], ids=str)
def test_vectorized_a_client_has_the_random_samples_that_it_has_alone(fit, flat, options):
    options, found = {"partition": QuantitySkew(), "num_clients": 5, "batch_size": 4} | options, []
    for group_size in (None, 2, 5):
        torch.manual_seed(0)
        module = Scaled(torch.nn.Linear(4, 3), optimizer=partial(torch.optim.SGD, lr=0.1)).double()
        user = module if group_size is None else VectorizedClients(module, group_size, False)
        loop = FederatedLoop(policy=Schedule(num_steps=5), seed=0)
        fit(user, loop, FederatedDataModule(DrawsAlways(70), **options), rounds=1)
        found.append(flat(module))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-12)


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
    data = federated(Noisy(), test=Noisy(9), batch_size=4, val_size=9, num_workers=workers)
    data.setup("test")
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
    batch = Batches(Noisy(), default_collate, seed=4).__getitems__([8, 9])
    with seeded_rng(derive_seed(4, RandomStream.EVALUATION_SAMPLES, 8)):
        assert batch[0].tolist() == [8 + torch.rand(()).item(), 9 + torch.rand(()).item()]


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_draw_nothing_from_the_global_generators(workers):
    data = noisy(workers)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    drawn(data)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@pytest.mark.parametrize(
    ("device", "fits", "pinned"),
    [("cpu", False, False), ("cuda", False, True), ("meta", True, False)],
)
def test_batches_are_pinned_for_a_gpu_alone_unless_the_samples_are_there(
    monkeypatch, device, fits, pinned
):
    monkeypatch.setattr(loader_module, "fits", lambda *_: fits)
    batches = Batches(InMemory(*numbered().tensors), default_collate)
    assert round_loader(batches, None, torch.device(device)).pin_memory is pinned
    assert (batches.data.device.type == device) is (fits or device == "cpu")


@pytest.mark.parametrize(("num_workers", "device"), [(0, "meta"), (1, "cpu")])
def test_workers_read_from_the_memory_of_the_host(monkeypatch, num_workers, device):
    monkeypatch.setattr(loader_module, "fits", lambda *_: True)
    batches = Batches(InMemory(*numbered().tensors), default_collate)
    round_loader(batches, None, torch.device("meta"), num_workers)
    assert batches.data.device.type == device


def test_local_steps_are_those_of_the_batch_whoever_fetches_others():
    reader = Batches(InMemory(*numbered(12).tensors), default_collate)
    index = torch.arange(12).view(2, 6)  # two batches of three steps, read ahead of the training
    batches = [Batch(row, [], stepwise=3, place=(7, at)) for at, row in enumerate(index)]
    handed = [reader[batch] for batch in [*batches, batches[0], batches[1]]][:2]
    assert numbers(handed) == [[0, 1], [6, 7]]
    for at, row in enumerate(index.tolist()):
        fetch = reader.local_steps(7, at)
        found = [numbers([fetch(step)])[0] for step in range(3)]  # each overwrites the last
        assert found == [row[:2], row[2:4], row[4:]]


class Corrupt(Dataset):
    """Samples of blobs, some of which cannot be read."""

    def __init__(self, samples, corrupt):
        self.samples, self.corrupt = samples, corrupt
        self.labels = samples.tensors[1].tolist()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return None if i in self.corrupt else self.samples[i]


def drop_corrupt(samples):
    samples = [sample for sample in samples if sample is not None]
    return default_collate(samples) if samples else None


@pytest.mark.filterwarnings("ignore:.*one client after another")
@pytest.mark.parametrize(
    ("wrap", "options", "loader"),
    [
        (lambda m: m, {}, {"num_workers": 1}),
        (lambda m: m, {"profiler": "simple"}, {}),
        (lambda m: VectorizedClients(m, 2, compile=False), {}, {}),
    ],
    ids=["workers", "hooks", "vectorized"],
)
def test_a_batch_that_is_none_is_refused(fit, foreign, data, blobs, wrap, options, loader):
    samples = Corrupt(blobs(12), ())
    federation = fitted(
        data(samples, num_clients=3, batch_size=1, collate_fn=drop_corrupt, **loader)
    )
    corrupt = samples.corrupt = set(federation.parts[1].tolist())
    with pytest.raises(FederationError) as raised:
        fit(wrap(foreign(batchnorm=False)), datamodule=federation, rounds=1, **options)
    text = str(raised.value)
    assert "collate_fn returned None for the samples [" in text
    assert int(text.split("samples [")[1].split("]")[0]) in corrupt
    assert "of client 1 in local step 1" in text or "client 1" in raised.value.__notes__[0]
    assert raised.value.__notes__[-1].startswith("In round 1")


class Unreadable(Corrupt):
    """Some samples raise an error when they are read."""

    def __getitem__(self, i):
        if i in self.corrupt:
            raise OSError("no such file")
        return self.samples[i]


@pytest.mark.filterwarnings("ignore:.*one client after another")
@pytest.mark.parametrize(("group_size", "workers"), [(None, 0), (3, 1)])
def test_a_sample_that_cannot_be_read_is_named_with_its_client(
    fit, foreign, data, blobs, group_size, workers
):
    samples = Unreadable(blobs(12), ())
    federation = fitted(data(samples, num_clients=3, batch_size=1, num_workers=workers))
    first = {0}  # is read before the first round
    corrupt = samples.corrupt = set(federation.parts[1].tolist()) - first
    module = foreign(batchnorm=False)
    if group_size:
        module = VectorizedClients(module, group_size, compile=False)
    with pytest.raises(OSError, match="no such file") as raised:
        fit(module, datamodule=federation, rounds=1)
    text = "\n".join([str(raised.value), *raised.value.__notes__])
    assert re.search(r"While reading the samples \[\d+\] of client 1 in local step \d", text)
    assert int(text.split("samples [")[1].split("]")[0]) in corrupt


def test_batches_of_validation_are_refused_too(data, blobs):
    corrupt = Corrupt(blobs(4), {0, 1, 2, 3})
    federation = fitted(data(blobs(12), val=corrupt, collate_fn=drop_corrupt))
    with pytest.raises(FederationError, match=r"for the samples \[0, 1, 2, 3\] of val, but"):
        list(federation.val_dataloader())


def test_each_step_of_fine_tuning_draws_its_own_random_numbers():
    data = federated(Noisy(8), num_clients=1, batch_size=4)
    steps = data.steps_of(0, torch.Generator().manual_seed(0))
    drawn = torch.cat([next(steps)[1] for _ in range(5)])
    assert len(drawn.unique()) == 20


class DrawsInWorkers(Dataset):
    """Samples from a generator that each loader process makes itself, as NumPy recommends."""

    random = None

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.random is None:
            self.random = np.random.default_rng(get_worker_info().seed)
        return torch.tensor(self.random.random()), index % 2


def test_loader_processes_have_other_seeds_in_each_round_and_run_and_process():
    def first(seed=0, round=0, rank=0):
        data = federated(DrawsInWorkers(), num_clients=3, val_size=6, num_workers=1, seed=seed)
        steps = data.batches_per_epoch
        made = RoundPlan(seed, round, torch.arange(3), steps, rank=rank, world_size=3)
        data.plan = lambda: made
        train, val = next(iter(data.train_dataloader())), next(iter(data.val_dataloader()))
        return float(train[0][0]), float(val[0][0])

    drawn = [first(), first(seed=1), first(round=1), first(rank=1), first(rank=2)]
    assert len({train for train, _ in drawn}) == 5
    assert len({val for _, val in drawn}) == 2  # the same in each round
    assert first() == drawn[0]


def test_loader_processes_have_other_seeds_in_each_epoch_of_centralized_training():
    def drawn(epoch):
        data = federated(DrawsInWorkers(), num_clients=3, num_workers=1)
        loader = data.train_dataloader()
        loader.sampler.trainer = SimpleNamespace(
            current_epoch=epoch, fit_loop=SimpleNamespace(is_resuming=False)
        )
        return [float(next(iter(loader))[0][0]) for _ in range(2)]

    first, second = drawn(0), drawn(1)
    assert first[0] == first[1] != second[0] == second[1]


class TwoSizes(Lists):
    """Images, the last of which are larger."""

    def __getitem__(self, i):
        return torch.zeros(2 if i < 50 else 3), int(self.y[i])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_two_shapes_are_named_with_a_remedy(workers):
    data = federated(TwoSizes(), val=TwoSizes(), test=TwoSizes(), num_workers=workers)
    data.setup("test")
    hint = r"collating the samples \[\d.*\] of {}: give them the same shape, or pass collate_fn"
    reads = {
        "val": lambda: list(data.val_dataloader()),
        "test": lambda: list(data.test_dataloader()),
        "client 2": lambda: list(data.samples_of(2)),
    }
    for name, read in reads.items():
        with pytest.raises(RuntimeError, match="equal size") as raised:
            read()
        notes = getattr(raised.value, "__notes__", [])  # those of a process are in its text
        text = "\n".join([str(raised.value), *notes])
        assert re.search(hint.format(name), text)


class InProcess(Lists):
    """Samples that tell which process has read them."""

    def __getitem__(self, i):
        return [self.x[i], self.y[i], torch.tensor(os.getpid())]


def processes(data, rounds=3):
    """Processes and samples of several rounds, with their validation."""
    pids, found = set(), []
    for round in range(rounds):
        loaders = batches(data, round=round), data.val_dataloader()
        for x, y, pid in (batch for loader in loaders for batch in loader):
            pids |= set(pid.tolist())
            found.append((x.tolist(), y.tolist()))
    return pids, found


def test_loader_processes_may_stay_for_all_rounds():
    others = set(multiprocessing.active_children())
    options = {"val_size": 10, "batch_size": 4, "eval_batch_size": 5, "num_workers": 2}
    started, stays = (
        federated(InProcess(), persistent_workers=kept, **options) for kept in (False, True)
    )
    (new, expected), (kept, found) = processes(started), processes(stays)
    assert found == expected
    assert (len(new), len(kept)) == (12, 4)
    stays.replace_samples(InProcess())  # others, which these processes do not have
    assert not processes(stays)[0] <= kept
    stays.restore_samples()
    assert len(processes(stays)[0] - kept) == 0
    assert len(set(multiprocessing.active_children()) - others) == 6
    stays.teardown("fit")
    assert not set(multiprocessing.active_children()) - others


def test_loader_processes_that_stay_serve_one_loader_at_a_time():
    """A callback may read other batches within a round."""
    data = federated(InProcess(), batch_size=4, num_workers=1, persistent_workers=True)
    data.plan = lambda: plan(data)
    expected, loader = [x.tolist() for x, *_ in batches(data)], data.train_dataloader()
    found = []
    for x, *_ in loader:
        found.append(x.tolist())
        assert [x.tolist() for x, *_ in data.train_dataloader()] == expected
        assert next(iter(loader))[0].tolist() == expected[0]
    assert found == expected
    for _ in loader:  # abandoned, as at the end of an interrupted fit
        break
    assert [x.tolist() for x, *_ in loader] == expected
    data.teardown("fit")


def test_a_fit_with_loader_processes_that_stay_has_the_same_result(tmp_path):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    samples = list(zip(x, (x[:, 0] > 0).long(), strict=True))
    weights, others = [], set(multiprocessing.active_children())
    for options in ({}, {"num_workers": 1, "persistent_workers": True}):
        torch.manual_seed(0)
        data, module = FederatedDataModule(samples, num_clients=4, seed=0, **options), Net()
        trainer(tmp_path, FederatedLoop(seed=0)).fit(module, datamodule=data)
        weights.append(module.net.weight)
        assert not set(multiprocessing.active_children()) - others
    assert torch.equal(*weights)
