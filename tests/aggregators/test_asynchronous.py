"""FedBuff and FedAsync against plain programs; the synchronous limit, resuming, refusals."""

import warnings
from collections import deque
from functools import partial

import pytest
import torch

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAsync, FedAvg, FedBuff, Scaffold, Staged
from lightning_fl.callbacks import ClientFaults, RoundCheckpoint
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.objectives import Proximal
from lightning_fl.policies import Schedule, Stragglers
from lightning_fl.samplers import AsynchronousSampler, UniformSampler
from lightning_fl.types import FederationError
from rounds import of, sent, with_buffers
from two_classes import samples
from written_plainly import LR, Noted, module, trained, vector

CLIENTS = 9
UNEVEN = {"speed_sigma": 1.0, "straggler": 0.2, "step_seconds": 0.1}


class Kept(Noted):
    """Notes the number of earlier models after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        vars(self).setdefault("kept", []).append(len(getattr(self.aggregator, "models", ())))


@pytest.fixture
def run(trainer):
    """Train a linear model with an asynchronous rule; return it and the loop."""

    def run(
        aggregator, size, faults=None, rounds=8, wrap=lambda m: m, made=None, ckpt=None, **options
    ):
        concurrency = options.pop("concurrency", 5)
        callbacks = options.pop("callbacks", [])
        options = {
            "sampler": AsynchronousSampler(concurrency),
            "policy": Schedule(num_steps=3),
            "seed": 4,
            "buffers": "average",
            "clients_per_round": size,
            **options,
        }
        data = options.pop("data", None) or samples(CLIENTS)
        faults = ClientFaults(**UNEVEN) if faults is None else faults
        loop = Kept(aggregator, **options)
        made = module() if made is None else made
        with warnings.catch_warnings():  # of clients that are dropped
            warnings.simplefilter("ignore")
            trainer(loop, rounds, [faults, *callbacks], enable_checkpointing=bool(callbacks)).fit(
                wrap(made), datamodule=data, ckpt_path=ckpt
            )
        return made, loop

    return run


def plainly(loop, faults, concurrency, size, apply, rounds=8, rho=0.0):
    """Let clients train one event after another, with a copy of the model for each version.

    Args:
        apply: Maps the model and the arrived of a flush, as triples of the model at the start, the
            local model and the staleness, to the next model.
    """

    def begin(now, version):
        order = generator(4, RandomStream.COHORT, version)
        for client in torch.randperm(CLIENTS, generator=order).tolist():
            if len(running) < concurrency and client not in [*running, *waiting]:
                num_bytes = 2 * 10 * 8
                d = faults.durations.seconds_of(4, version, client, 3, num_bytes)
                running[client] = now + d, version

    models, running, waiting, found = [vector(module())], {}, {}, []
    begin(0.0, 0)
    while len(found) < rounds:
        client = min(running, key=lambda c: running[c][0])
        now, version = running.pop(client)
        waiting[client] = version
        if len(waiting) == size:
            at, arrived = len(found), []
            for each, start in waiting.items():
                fault = faults.fault_of(4, at, each)
                y = trained(models[start], loop.batches[at][each], mu=rho)
                if fault is None:
                    arrived.append((models[start], y, at - start))
            models.append(apply(models[-1], arrived))
            found.append((now, [at - start for start in waiting.values()]))
            waiting.clear()
        begin(now, len(found))
    return models[1:], found


def buffered(eta, s, limit=99):
    def apply(x, arrived):
        arrived = [each for each in arrived if each[2] <= limit]
        step = sum(s(tau) * (start - y) for start, y, tau in arrived)
        return x - eta / len(arrived) * step if arrived else x

    return apply


def mixed(alpha, s):
    def apply(x, arrived):
        for _, y, tau in arrived:
            x = (1 - alpha * s(tau)) * x + alpha * s(tau) * y
        return x

    return apply


PLAIN = {
    "FedBuff": (FedBuff, 3, {}, 0.0, buffered(1.0, lambda t: (1 + t) ** -0.5)),
    "FedBuff, clients are lost": (
        lambda: FedBuff(0.7, staleness="hinge", slope=2.0, delay=1.0, max_staleness=2),
        3,
        {"dropout": 0.2, "nan": 0.15},
        0.0,
        buffered(0.7, lambda t: 1 if t <= 1 else 1 / (2 * (t - 1) + 1), limit=2),
    ),
    "FedAsync": (FedAsync, 1, {}, 0.1, mixed(0.6, lambda t: (1 + t) ** -0.5)),
    "FedAsync, clients are lost": (
        lambda: FedAsync(1.0, staleness="constant"),
        1,
        {"crash": 0.3},
        0.0,
        mixed(1.0, lambda t: 1),
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_every_round_is_that_of_the_plain_program(run, case):
    make, size, lost, rho, apply = PLAIN[case]
    faults = ClientFaults(**lost, **UNEVEN)
    made = module([Proximal(rho)] if rho else [])
    _, loop = run(make(), size, faults, rounds=10, made=made)
    models, flushes = plainly(loop, faults, 5, size, apply, 10, rho)
    torch.testing.assert_close(loop.models, models, rtol=1e-12, atol=1e-12)
    for row, (now, staleness) in zip(loop.rows, flushes, strict=True):
        assert row["virtual_time"] == pytest.approx(now, rel=1e-12)
        assert row["staleness_mean"] == pytest.approx(sum(staleness) / size)
        assert row["staleness_max"] == max(staleness)
    assert max(row["staleness_max"] for row in loop.rows) > 2
    assert faults.virtual_time == loop.rows[-1]["virtual_time"]
    assert 0 < max(loop.kept) <= 5
    if case == "FedBuff, clients are lost":
        too_stale = [row.get("too_stale", 0) for row in loop.rows]
        assert sum(too_stale) > 0
        assert all(row["dropped"] >= stale for row, stale in zip(loop.rows, too_stale, strict=True))


@pytest.mark.parametrize(
    ("seed", "size", "is_vectorized"),
    [(0, 1, False), (1, 4, False), (2, 4, True), (3, CLIENTS, False)],
)
def test_with_equal_durations_it_is_synchronous_averaging_bit_for_bit(
    run, seed, size, is_vectorized
):
    """Also with BatchNorm's buffers, in single precision, and with updates that are dropped."""
    # Not "auto", which would time the ways to train and might choose another in each run.
    groups = partial(VectorizedClients, group_size=4, compile=False)
    options = {"wrap": groups} if is_vectorized else {}
    found = []
    for rule in (FedAvg("uniform"), FedBuff(), *[FedAsync(1.0)] * (size == 1)):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        options["made"] = ClientModule(net, optimizer=partial(torch.optim.SGD, lr=LR)).float()
        options["data"] = data = samples(CLIENTS)
        x, y = data.train.tensors
        data.train = data.val = torch.utils.data.TensorDataset(x.float(), y)
        sampler = UniformSampler() if isinstance(rule, FedAvg) else AsynchronousSampler(size)
        faults = ClientFaults(nan=0.2)
        found.append(run(rule, size, faults, rounds=3, sampler=sampler, seed=seed, **options))
    for other, loop in found[1:]:
        for name, tensor in found[0][0].state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
        assert loop.kept == [0] * 3
        for row, expected in zip(loop.rows, found[0][1].rows, strict=True):
            assert row.pop("staleness_max") == row.pop("staleness_mean") == 0
            assert row == {**expected, "virtual_time": row["virtual_time"]}
            assert row["virtual_time"] == pytest.approx(expected["virtual_time"], rel=1e-6)


def test_another_clock_cannot_resume(run, tmp_path):
    """It needs models that were not kept."""
    keep = [RoundCheckpoint(str(tmp_path))]
    run(FedBuff(), 2, ClientFaults(**UNEVEN), rounds=4, callbacks=keep)
    last = str(tmp_path / "last.ckpt")
    state = torch.load(last, weights_only=True)["callbacks"]["FederatedLoop"]["aggregator"]
    assert len(state["models"]) == len(state["versions"]) > 0
    with pytest.raises(
        FederationError, match=r"ended after .* s there, and after .* s here. To resume"
    ):
        run(FedBuff(), 2, ClientFaults(), callbacks=keep, ckpt=last)


def test_momentum_by_hand():
    """Two parameters, of which the second is trained in the first round only, and a buffer."""
    rule = of(4, FedBuff(lr=2.0, momentum=0.5), 2, layout=with_buffers(2))
    server, found = torch.zeros(3), []
    masks = torch.tensor([[True, True], [True, False], [True, False]])
    for mask, move in zip(masks, ([1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0] * 3), strict=True):
        rule.start(server, mask)
        rule.update(sent([move, move]))
        server = rule.compute()
        found.append(server.tolist())
    # Velocities 1, 4.5 and 2.25 of the first, and 2 of the second.
    assert found == [[2, 4, 3], [11, 4, 3], [15.5, 4, 3]]
    rule.start(server)
    assert torch.equal(rule.compute(), server)  # nobody returned


def test_buffers_stay_between_those_of_the_server_and_of_the_clients():
    """A variance that fell since a client started does not become negative."""
    rule = of(4, FedBuff(lr=2.0), 1, layout=with_buffers(1))
    rule.start(torch.tensor([1.0, 0.1]))
    rule.models, rule._round = torch.tensor([[3.0, 9.0]]), 3
    rule._started, rule._rows = {2: 0}, {0: 0}
    rule.update(sent([[1.0, -4.0]], ids=[2]))
    # s = 1/2: the parameter moves by 2 * 1/2 * 1, the buffer halfway from 0.1 to 9 - 4.
    torch.testing.assert_close(rule.compute(), torch.tensor([2.0, 0.1 + 0.5 * (5.0 - 0.1)]))


# --- what is refused ------------------------------------------------------------------------------

EXCLUDING = Stragglers(0.5, Schedule(num_steps=4), drop=True)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (FedAvg, {}, "FedAvg ignores the staleness of updates"),
        (Scaffold, {}, "Scaffold ignores the staleness of updates"),
        (lambda: Staged([1], [FedBuff(), FedBuff()]), {}, "Staged ignores the staleness"),
        (FedBuff, {"sampler": UniformSampler()}, "FedBuff aggregates asynchronous rounds, and"),
        (FedAsync, {}, "a round has 3 clients: set clients_per_round=1, or use FedBuff"),
        (FedBuff, {"concurrency": 10}, "concurrency must be .*got 10: there are 9 clients"),
        (FedBuff, {"faults": ClientFaults(deadline=3)}, "deadline has no meaning in asynchronous"),
        (FedBuff, {"policy": EXCLUDING}, "Stragglers excludes clients from rounds"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(run, rule, options, message):
    with pytest.raises(FederationError, match=message):
        run(rule(), 3, **options)


def test_earlier_models_are_dropped_when_their_last_client_has_arrived(run):
    """One slow client holds a model; all others are as fast as each other."""
    rule, slow = FedBuff(), deque()
    _, loop = run(rule, 2, ClientFaults(speed_sigma=2.0, step_seconds=1.0), rounds=20)
    for round, count in enumerate(loop.kept):
        slow.append(loop.options.sampler.flush(round).in_use)
        assert count == len(slow[-1]) <= 5
    assert len({v for each in slow for v in each}) > 5  # versions come and go
    assert rule.versions.tolist() == list(slow[-1])
