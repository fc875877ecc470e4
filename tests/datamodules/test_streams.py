"""Clients whose samples are streams: read in order from round to round, and resumed."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedALA, QFedAvg
from lightning_fl.callbacks import (
    FederatedLoop,
    LabelFlip,
    PersonalizedEvaluation,
    RoundCheckpoint,
    RunReport,
)
from lightning_fl.datamodules import FederatedDataModule, FromClients
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.testing import Run, check_federation
from lightning_fl.types import FederationError
from numbered import fitted


def sample(owner, i):
    random = torch.Generator().manual_seed(1000 * owner + i)
    x = torch.randn(4, dtype=torch.float64, generator=random) + owner
    return torch.cat([torch.tensor([1000.0 * owner + i], dtype=torch.float64), x]), i % 3


class Once(IterableDataset):
    """Samples 0, 1, 2, ... of an owner."""

    def __init__(self, owner, end=10_000):
        self.owner, self.end = owner, end

    def __iter__(self):
        return (sample(self.owner, i) for i in range(self.end))


class Stream(IterableDataset):
    """The same, with a state."""

    def __init__(self, owner, end=10_000):
        self.owner, self.end, self.at, self.start = owner, end, 0, 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        while self.at < self.end:
            self.at += 1
            yield sample(self.owner, self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


def held_out(owner, n=4):
    pairs = [sample(owner, 9_000 + i) for i in range(n)]
    return TensorDataset(torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))


SIZES = {"north": 5, "south": 3, "west": 4}


def streams(kind=Stream, num_samples=SIZES, with_tests=False, **options):
    made = {name: kind(owner) for owner, name in enumerate(SIZES)}
    if with_tests:
        made = {name: (each, held_out(owner)) for owner, (name, each) in enumerate(made.items())}
    options = {"batch_size": 2, "val_size": 0, "seed": 0} | options
    return FromClients(made, num_samples, **options)


class Reading(ClientModule):
    """Notes the numbers of the samples in each step; the network does not see them."""

    def __init__(self, fail_after=None, notes=True):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 3))
        self.read, self.fail_after, self.notes = [], fail_after, notes
        self.double()

    def forward(self, x):
        return super().forward(x[:, 1:])

    def training_step(self, batch, batch_idx):
        if self.notes:  # not under vmap
            self.read.append(batch[0][:, 0].long().tolist())
        if len(self.read) == self.fail_after:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def by_owner(read):
    numbers = [i for batch in read for i in batch]
    return [[i % 1000 for i in numbers if i // 1000 == owner] for owner in range(3)]


@pytest.fixture
def train(fit):
    def run(data, module=None, rounds=3, loop=(), **options):
        module = module or Reading()
        given = {"policy": Schedule(lr=0.1), "seed": 0, "check": False} | dict(loop)
        loop = FederatedLoop(**given)
        fit(module, loop, data, rounds=rounds, **options)
        return module, loop

    return run


@pytest.mark.parametrize("kind", [Once, Stream])
def test_each_client_reads_on_from_round_to_round(train, kind):
    module, loop = train(streams(kind))
    assert by_owner(module.read) == [list(range(3 * n)) for n in SIZES.values()]
    assert [len(batch) for batch in module.read[:3]] == [2, 2, 1]  # an epoch of five samples
    assert loop.rows[0]["num_steps"] == 3 + 2 + 2


def test_clients_that_are_not_sampled_wait(train):
    loop = {"policy": Schedule(num_steps=1), "clients_per_round": 1}
    module, _ = train(streams(), rounds=8, loop=loop)
    read = by_owner(module.read)
    assert sum(map(len, read)) == 16
    assert read == [list(range(len(part))) for part in read]


def test_num_samples_are_the_weights_of_clients():
    data = fitted(streams(num_samples=7))
    assert data.num_samples.tolist() == [7, 7, 7]
    assert (data.client_names, data.class_counts) == ([*SIZES], None)
    data = fitted(FederatedDataModule.from_clients([Once(0), Once(1)], num_samples=4, val_size=0))
    assert data.num_samples.tolist() == [4, 4]


def test_a_stream_that_ends_starts_again(train):
    kind = functools.partial(Once, end=7)
    module, _ = train(streams(kind, num_samples=5))
    assert by_owner(module.read)[1] == [*range(7), *range(7), 0]


def test_a_loader_with_workers_is_a_stream(train):
    def loader(owner):
        return DataLoader(Once(owner), batch_size=None, num_workers=1)

    module, _ = train(streams(loader), rounds=2)
    assert by_owner(module.read) == [list(range(2 * n)) for n in SIZES.values()]


def test_an_interrupted_run_resumes_bit_for_bit(train, tmp_path):
    def go(module, **options):
        callbacks = [RoundCheckpoint(tmp_path), PersonalizedEvaluation(steps=2, every_n_rounds=2)]
        options |= {"callbacks": callbacks, "enable_checkpointing": True}
        train(streams(with_tests=True), module, 4, **options)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), callbacks[1].rows

    whole, rows = go(Reading())
    with pytest.raises(SystemExit):
        go(Reading(fail_after=21))  # in the last step of the third round
    module = Reading()
    resumed, again = go(module, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(whole, resumed)
    assert rows == again
    assert by_owner(module.read) == [list(range(2 * n, 4 * n)) for n in SIZES.values()]


@pytest.mark.parametrize("kind", [Once, Stream])
def test_a_second_fit_with_the_same_data_starts_from_the_beginning(train, kind):
    data = streams(kind)
    first, second = (train(data, rounds=1)[0].read for _ in range(2))
    assert first == second


def test_the_whole_run_is_checked():
    def make():
        loop = FederatedLoop(policy=Schedule(lr=0.1), seed=0)
        return Run(Reading(notes=False), streams(), loop)

    columns = ("order", "resume", "vectorized")
    results = check_federation(make, columns=columns)
    assert [(result.column, result.is_equal) for result in results] == [(c, True) for c in columns]


def test_what_reads_ahead_goes_back():
    data = fitted(streams(with_tests=True, eval_batch_size=3))
    data.train.__getitems__([0, 1])  # two steps of training
    ahead = [x[:, 0].tolist() for x, _ in data.samples_of(0)]
    assert ahead == [[2, 3, 4], [5, 6]]
    steps = data.steps_of(0, torch.Generator())
    assert [next(steps)[0][:, 0].tolist() for _ in range(4)] == [[2, 3], [4, 5], [6], [7, 8]]
    steps.close()
    of_test = [x[:, 0].tolist() for x, _ in data.samples_of(1, test=True)]
    assert of_test == [[10_000, 10_001], [10_002, 10_003]]
    assert data.train.__getitems__([0])[0][0][0] == 2
    assert data.train[0][0][0] == 0


def test_losses_over_all_samples_and_fine_tuning_do_not_change_what_is_read(train):
    callbacks = [PersonalizedEvaluation(steps=2, every_n_rounds=1), RunReport()]
    data = streams(with_tests=True, unseen_clients=["south"])
    module, _ = train(data, loop={"aggregator": QFedAvg(1.0)}, callbacks=callbacks)
    read = by_owner(module.read)
    assert read[0] == list(range(15))
    assert read[2] == list(range(12))


def test_batches_before_the_first_step_do_not_change_what_is_read(train):
    read = []
    for rule in (FedALA(first_passes=2), None):
        loop = {"aggregator": rule, "policy": Schedule(num_steps=2, lr=0.1)}
        read.append(by_owner(train(streams(), loop=loop)[0].read))
    assert read[0] == read[1]


def test_streams_without_a_state_are_read_once(train, tmp_path):
    def go(rounds=2, with_tests=False, callbacks=(), **options):
        options |= {"callbacks": [RoundCheckpoint(tmp_path), *callbacks]}
        data = streams(Once, with_tests=with_tests)
        train(data, rounds=rounds, enable_checkpointing=True, **options)

    go()
    once = "the stream of client 'north' is read once, for training"
    with pytest.raises(FederationError, match="'north' has no state with which a run could be res"):
        go(rounds=3, ckpt_path=tmp_path / "last.ckpt")
    with pytest.raises(FederationError, match=once):
        go(with_tests=True, callbacks=[PersonalizedEvaluation(steps=1)])
    with pytest.raises(FederationError, match=once):
        go(loop={"aggregator": QFedAvg(1.0)})
    with pytest.raises(FederationError, match=once):
        go(module=VectorizedClients(Reading(notes=False), 3))


def test_a_diverged_client_is_dropped_without_a_look_at_its_samples(train):
    class Diverging(Reading):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.read[-1][0] // 1000 == 1 else loss

    with pytest.warns(UserWarning, match="Non-finite values"):
        _, loop = train(streams(Once), Diverging(), rounds=1)
    assert loop.rows[0]["dropped"] == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("val_size", 0.1),
        ("local_test_size", 0.2),
        ("stream_steps", 2),
        ("replacement", True),
        ("labels", [0] * 12),
        ("classes", ["a", "b", "c"]),
        ("num_workers", 1),
    ],
)
def test_options_by_index_are_refused(option, value):
    with pytest.raises(FederationError, match=f"^{option} needs samples with an index.*: set it"):
        streams(**{option: value})


def test_what_else_cannot_be_is_refused(train, monkeypatch):
    for number in ({"north": 1}, {**SIZES, "east": 2}):
        with pytest.raises(FederationError, match=r"or one for each of .*'south'.*, got {'north'"):
            streams(num_samples=number)
    with pytest.raises(FederationError, match="got None: the stream of 'north' has no length"):
        streams(num_samples=None)
    with pytest.raises(FederationError, match="num_samples must be None, or for streams"):
        FromClients([held_out(0)], num_samples=3)
    with pytest.raises(FederationError, match="num_samples must be an integer of at least 1"):
        streams(num_samples=0)
    with pytest.raises(FederationError, match="clients must all have streams or all data sets"):
        FromClients([held_out(0), Once(1)], num_samples=3, val_size=0)
    with pytest.raises(FederationError, match="must be a map-style data set"):
        FromClients([DataLoader(Once(0), batch_size=2)], num_samples=3, val_size=0)
    with pytest.raises(FederationError, match="the stream of client '0' has no samples"):
        FromClients([Once(0, end=0)], num_samples=3, val_size=0).setup("fit")
    with pytest.raises(FederationError, match="changes class labels"):
        train(streams(), callbacks=[LabelFlip([0])])
    with pytest.raises(TypeError, match="partition"):
        streams(partition=Dirichlet())
    with pytest.raises(FederationError, match="val_size needs samples with an index"):
        streams(val=(held_out(0), None), val_size=2)
    data = fitted(streams(val=held_out(0), val_size=2))
    monkeypatch.setattr(data, "_processes", lambda: (0, 2))
    with pytest.raises(FederationError, match="train in one process"):
        data.train_dataloader()
