"""Compiled steps of single clients, several at the same time."""

import threading
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from time import sleep

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from grids import diagonal
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import Partition
from lightning_fl.policies import Schedule
from lightning_fl.runners import VectorizedClients, rewrites, side_by_side, tuning
from lightning_fl.runners.local_step import Outcome
from lightning_fl.runners.side_by_side import (
    MOST_SEEDS,
    Checked,
    Draws,
    SideBySide,
    Threads,
    checked,
    use_seeds,
)
from lightning_fl.runners.stacks import Stacks
from lightning_fl.types import FederationError

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="torch 2.11 does not trace the step of a client as a whole",
)
SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
}


class Averaging(nn.Module):
    """It subtracts a moving average of its inputs, a buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.net(x - self.mean)


@pytest.fixture
def faster(monkeypatch):
    """Timings by which clients train one after another, compiled."""
    times = cycle([2, 1, 2, 1])  # at once, one after another; the same again, compiled
    monkeypatch.setattr(tuning, "seconds", lambda *step: next(times))


@pytest.fixture
def light(monkeypatch, faster):
    """No compiler below torch's graphs, for speed; returns the steps that were started."""

    def compiled(module, inputs, cores, rewrites):
        return module.forward, Draws.NOTHING

    monkeypatch.setattr(side_by_side, "compiled", compiled)
    started, start = [], SideBySide.start

    def noted(self, row, batch):
        started.append(row)
        return start(self, row, batch)

    monkeypatch.setattr(SideBySide, "start", noted)
    return started


@pytest.fixture
def federation(train):
    """The same amount of work for each client, with one learning rate."""
    return {"policy": train.policy(lr=False), "buffers": "average"}


@pytest.mark.parametrize(("options", "net"), diagonal(SGD.values(), [None, Averaging]))
def test_results_are_those_of_the_module(
    train, flat, ragged, tiny, light, federation, options, net
):
    """Clients have batches of different sizes, and different numbers of steps."""

    def module():
        return tiny(optimizer=lambda params: torch.optim.SGD(params, lr=0.1, **options), net=net)

    plain, found = module(), module()
    train(plain, federation=federation)
    train(found, "auto", 3, ragged(), federation=federation, compile=True)
    torch.testing.assert_close(flat(found), flat(plain), rtol=0, atol=1e-12)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), buffer, rtol=0, atol=1e-12)
    assert len(light) > 15
    assert set(light) == set(range(7))


def test_a_new_graph_must_use_what_it_would_change(train, ragged, tiny, light, federation):
    class FirstRound(tiny.kind):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if self.current_epoch else loss + self.extra.square().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)

    module = tiny(FirstRound)
    module.extra = nn.Parameter(torch.ones(3).double())
    with pytest.raises(FederationError, match=r"does not use extra in this round.*compile=False"):
        train(module, "auto", 3, ragged(), federation=federation, compile=True)
    assert light


def test_a_new_shape_leaves_the_steps_that_run(
    train, flat, data, blobs, tiny, light, federation, monkeypatch
):
    """The second step of client 1 has a new shape, while that of client 0 runs."""

    class Sizes(Partition):
        def split(self, labels, num_clients, generator):
            return list(torch.arange(35).split([20, 15]))

    def ragged():
        return data(blobs(35), num_clients=2, batch_size=10, partition=Sizes(), val_size=0)

    untouched = Stacks.untouched

    @contextmanager
    def slow(self):
        with untouched(self):
            sleep(0.2)
            yield

    def compiled(module, inputs, cores, rewrites):
        def run(*tensors):
            sleep(0.05)
            return module(*tensors)

        return run, Draws.NOTHING

    options = {"federation": {**federation, "policy": Schedule(local_epochs=1)}, "rounds": 3}
    plain, found = tiny(), tiny()
    train(plain, datamodule=ragged(), **options)
    monkeypatch.setattr(Stacks, "untouched", slow)
    monkeypatch.setattr(side_by_side, "compiled", compiled)
    train(found, "auto", 3, ragged(), compile=True, **options)
    torch.testing.assert_close(flat(found), flat(plain), rtol=0, atol=1e-12)
    assert light


def test_a_resumed_run_goes_on_as_it_was(trainer, flat, data, tiny, light, tmp_path):
    def run(rounds, ckpt_path=None):
        module = tiny()
        loop = FederatedLoop(policy=Schedule(num_steps=2), seed=3)
        made = trainer(loop, rounds=rounds)
        made.fit(VectorizedClients(module, compile=True), datamodule=data(), ckpt_path=ckpt_path)
        made.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return flat(module)

    whole, count = run(3), len(light)
    run(2)
    assert torch.equal(run(3, tmp_path / "2.ckpt"), whole)
    assert len(light) == 2 * count  # the choice was not made again


def test_a_step_that_is_not_one_graph_runs_as_it_is(
    train, flat, ragged, tiny, faster, federation, caplog
):
    class Breaks(tiny.kind):
        def training_step(self, batch, batch_idx):
            torch._dynamo.graph_break()
            return super().training_step(batch, batch_idx)

    plain, found = tiny(), tiny(Breaks)
    train(plain, federation=federation)
    with caplog.at_level("INFO", "lightning.pytorch"):
        train(found, "auto", 3, ragged(), federation=federation, compile=True)
    torch.testing.assert_close(flat(found), flat(plain), rtol=0, atol=1e-12)
    assert "The step of a client is not compiled: Unsupported: " in caplog.text
    assert not [t for t in threading.enumerate() if t.name.startswith("client")]


def test_what_is_not_faster_is_not_used(train, ragged, tiny, light, federation, monkeypatch):
    times = cycle([2, 1, 1, 2])
    monkeypatch.setattr(tuning, "seconds", lambda *step: next(times))
    train(tiny(), "auto", 3, ragged(), federation=federation, compile=True)
    assert len(light) == 7  # of the trial


def test_torch_checks_a_step_for_the_first_client(
    train, ragged, tiny, light, federation, monkeypatch
):
    first, again, start, real = [], [], Checked.start, side_by_side.checked

    def noted(*args):
        first.append(real(*args))
        return first[-1]

    monkeypatch.setattr(side_by_side, "checked", noted)
    monkeypatch.setattr(
        Checked, "start", lambda self, leaves: again.append(self) or start(self, leaves)
    )
    train(tiny(), "auto", 3, ragged(), federation=federation, compile=True)
    assert all(first)
    assert len(again) > 0
    assert len(first) + len(again) == len(light)


def test_a_step_that_does_more_than_its_graph_is_checked_for_each_client():
    x, loss, seeds, more = (torch.zeros(1) for _ in range(4))

    def found(outputs, loss=loss):
        outcome = Outcome(loss, loss, {}, {}, {})
        return checked([x, True], outcome, lambda y: [y + 1, y], [x], outputs)

    graph = found([loss, seeds])
    assert graph.fits([torch.ones(1), True])
    assert graph.start([torch.ones(1), True]).task_loss == 2
    assert not graph.fits([torch.ones(2), True])
    assert not graph.fits([torch.ones(1), False])
    assert found([loss, seeds, more]) is None  # a tensor that the module keeps
    assert found([seeds, more]) is None  # a loss that the graph does not compute


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_other_optimizers_are_not_compiled(train, ragged, tiny, light, federation, optimizer):
    module = tiny(optimizer=lambda params: optimizer(params, lr=0.01))
    train(module, "auto", 3, ragged(), federation=federation, compile=True)
    assert not light


def test_a_failure_in_a_thread_ends_the_run(train, ragged, tiny, light, federation, monkeypatch):
    def compiled(module, inputs, cores, rewrites):
        runs = iter(range(8))  # the trial, and two steps

        def run(*tensors):
            if next(runs, None) is None:
                raise ArithmeticError("in a thread")
            return module(*tensors)

        return run, Draws.NOTHING

    monkeypatch.setattr(side_by_side, "compiled", compiled)
    with pytest.raises(ArithmeticError, match="in a thread"):
        train(tiny(), "auto", 3, ragged(), federation=federation, compile=True)


# --- random numbers -------------------------------------------------------------------------------


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40))

    def forward(self, x):
        return F.dropout(torch.ones(40, dtype=x.dtype), 0.5) @ self.weight


class Updates(L.Callback):
    """Keeps the update of each client."""

    def __init__(self):
        self.found = []

    def on_client_updates(self, plan, clients, updates, dropped):
        self.found += list(updates.clone())
        return updates


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_random_numbers_do_not_depend_on_threads(fit, data, tiny, faster, monkeypatch):
    """Compiled. The step subtracts the mask of dropout, whose entries are 0 and 2."""

    class Masked(tiny.kind):
        def training_step(self, batch, batch_idx):
            return self.net(batch[0])

        def validation_step(self, batch, batch_idx):
            pass

    def run(threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        torch._dynamo.reset()
        updates = Updates()
        loop = FederatedLoop(policy=Schedule(num_steps=1, lr=1.0), seed=3)
        module = VectorizedClients(tiny(Masked, net=Dropped), compile=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "set_num_threads", lambda count: None)
            fit(module, loop, data(), rounds=3, callbacks=[updates])
        return torch.stack(updates.found)

    one, two = run(1), run(2)
    assert torch.equal(one, two)
    assert set(one.flatten().tolist()) == {0.0, -2.0}
    assert len(one.unique(dim=0)) == len(one) == 12  # another mask for each client and round
    assert abs(float(one.mean()) + 1) < 0.2


class Pooled(nn.Sequential):
    """A convolutional network of 8 x 8 pictures."""

    def __init__(self, pool):
        conv = nn.Conv2d(1, 4, 3, padding=1)
        super().__init__(nn.Unflatten(1, (1, 8, 8)), conv, pool, nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)], ids=["2", "3, 2, 1"])
def test_compiled_pooling_is_that_of_torch(fit, data, blobs, flat, tiny, faster, monkeypatch, pool):
    kept, keep = [], rewrites.keep_pooling

    def noted(graph):
        keep(graph)
        kept.extend(node.target for node in graph.nodes if "should_fallback" in node.meta)

    monkeypatch.setattr(rewrites, "keep_pooling", noted)
    plain, found = (tiny(net=partial(Pooled, pool)) for _ in range(2))
    for module in (plain, VectorizedClients(found, compile=True)):
        samples = data(blobs(features=64), val=blobs(60, seed=1, features=64))
        fit(module, FederatedLoop(policy=Schedule(num_steps=3), seed=3), samples, rounds=2)
    assert set(kept) == set(rewrites.POOLING)
    torch.testing.assert_close(flat(found), flat(plain), rtol=0, atol=1e-12)


def traced(function):
    """The graph of a function, with the operations that torch's compiler makes of it."""
    graph = torch.fx.Graph()
    seeds = graph.placeholder("seeds")
    mark = graph.call_function(torch.ops.lightning_fl.seeds.default, (seeds,))
    graph.output((*function(graph), mark))
    return graph


def seeds_of(count):
    return lambda graph: [
        graph.call_function(torch.ops.prims.inductor_seeds.default, (count, torch.device("cpu")))
    ]


def test_seeds_are_taken_from_those_that_are_given():
    graph = traced(lambda graph: [*seeds_of(2)(graph), *seeds_of(3)(graph)])
    assert use_seeds(graph) is Draws.SEEDS
    module = torch.fx.GraphModule({}, graph)
    given = torch.arange(MOST_SEEDS)
    first, second, _ = module(given)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3, 4])


def test_graphs_that_draw_in_other_ways_are_known():
    assert use_seeds(traced(lambda graph: [])) is Draws.NOTHING
    assert use_seeds(traced(seeds_of(MOST_SEEDS))) is Draws.SEEDS
    assert use_seeds(traced(seeds_of(MOST_SEEDS + 1))) is Draws.UNKNOWN
    permuted = traced(lambda g: [g.call_function(torch.ops.aten.randperm.default, (5,))])
    assert use_seeds(permuted) is Draws.UNKNOWN


# --- threads --------------------------------------------------------------------------------------


def test_threads_share_the_cores(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for most, count, cores in ((1, 1, 4), (2, 2, 2), (3, 3, 1), (9, 4, 1)):
            threads = Threads(most)
            found = threads.start(lambda: (torch.get_num_threads(), torch.is_grad_enabled()))
            assert (threads.count, threads.cores, found.result()) == (count, cores, (cores, False))
            threads.close()
            assert torch.get_num_threads() == 4
            assert torch.is_grad_enabled()
    finally:
        torch.set_num_threads(before)


def test_the_first_failure_is_raised_once_all_have_ended():
    before, ended = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        threads = Threads(2)
        threads.start(lambda: 1 / 0)
        threads.start(lambda: ended.append(sleep(0.2)))
        with pytest.raises(ZeroDivisionError):
            threads.wait()
        assert ended == [None]
    finally:
        torch.set_num_threads(before)
    threads.wait()  # nothing is left
    threads.close()
