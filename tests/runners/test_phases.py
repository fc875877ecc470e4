"""Phases of local training."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from by_hand import Batches
from lightning_fl.aggregators import FedDyn, FedNova, Scaffold
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.phases import phase_ends
from lightning_fl.optimizers import PFedMe
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.runners import Phase, VectorizedClients
from lightning_fl.runners.phases import PhasedTraining
from lightning_fl.types import FederationError
from linear import Linear

pytestmark = pytest.mark.filterwarnings("ignore:validation and test use the global model")
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
PERSONAL = functools.partial(PFedMe, lr=0.5, personal_lr=0.1, lam=1.0, inner_steps=2)
FEDREP = [Phase("local", local_epochs=2), Phase("shared")]


class Net(Linear):
    """A body and a head, trained with momentum and weight decay."""

    def __init__(self, optimizer=SGD):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        super().__init__(net, optimizer)
        self.double()


@pytest.fixture
def run(fit, data, blobs):
    """Train Net, plain or vectorized in groups; returns the module, the loop and the data."""

    def train(phases, size=None, optimizer=SGD, rounds=2, local=("net.2.*",), **options):
        ragged = data(blobs(75), num_clients=5, partition=Dirichlet(0.4, min_size=4), batch_size=6)
        trainer = {n: options.pop(n) for n in ("gradient_clip_val", "callbacks") if n in options}
        path, compiled = options.pop("ckpt_path", None), options.pop("compile", False)
        options = {"policy": Schedule(local_epochs=4), "seed": 1} | copy.deepcopy(options)
        options["policy"].phases = Schedule(phases=phases).phases
        loop, module = FederatedLoop(**options, local_parameters=local), Net(optimizer)
        user = module if size is None else VectorizedClients(module, size, compile=compiled)
        fit(user, loop, ragged, path, rounds=rounds, **trainer)
        return module, loop, ragged

    return train


def close(one, other):
    """Compare the server's parameters and what the clients keep."""
    for name, value in one[0].state_dict().items():
        torch.testing.assert_close(other[0].state_dict()[name], value, atol=1e-12, rtol=0)
    assert one[1].store.rows.keys() == other[1].store.rows.keys()
    for client, rows in one[1].store.rows.items():
        for name, row in rows.items():
            found = other[1].store.get(client)[name]
            torch.testing.assert_close(found, row, atol=1e-12, rtol=0, msg=f"{client} {name}")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_fedrep_by_hand(run, clip):
    """The head first with the body frozen, then the body with the head frozen."""
    seen = Batches()
    module, loop, data = run(FEDREP, callbacks=[seen], gradient_clip_val=clip)
    server, heads = Net(), {}
    for round in range(2):
        ends = []
        for client in range(5):
            own = copy.deepcopy(server.net)
            own[2].load_state_dict(heads.get(client, Net().net[2].state_dict()))
            batches, first = seen.rounds[round][client], 2 * int(data.batches_per_epoch[client])
            assert len(batches) == 2 * first
            for part, work in ((own[2], batches[:first]), (own[0], batches[first:])):
                optimizer = SGD(part.parameters())
                for x, y in work:
                    optimizer.zero_grad()
                    F.cross_entropy(own(x), y).backward()
                    if clip:
                        nn.utils.clip_grad_norm_(part.parameters(), clip)
                    optimizer.step()
            heads[client] = copy.deepcopy(own[2].state_dict())
            ends.append((own[0].state_dict(), len(data.parts[client])))
        total = sum(n for _, n in ends)
        server.net[0].load_state_dict(
            {k: sum(e[k] * n for e, n in ends) / total for k in ends[0][0]}
        )
    for name, value in server.net[0].state_dict().items():
        torch.testing.assert_close(module.net[0].state_dict()[name], value, atol=1e-12, rtol=0)
    for client, head in heads.items():
        for name, value in head.items():
            row = loop.store.get(client)[f"parameter.net.2.{name}"]
            torch.testing.assert_close(row, value, atol=1e-12, rtol=0)
    assert loop.rows[0]["bytes_up"] == 5 * (6 * 4 + 4) * 8


class Drawn(HyperparameterPolicy):
    """Its numbers are a function of the round and the clients."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers

    def sample(self, round, clients):
        return self.numbers(round, clients)


def uneven(round, clients):
    """Another amount of work and rate for each client."""
    return {"num_steps": 5 + clients % 3, "lr": 0.05 * (1 + clients % 2)}


def brief(round, clients):
    """One client is done after the first phase, another one in each round."""
    return {"num_steps": 2 + ((clients + round) % 5 > 0).long()}


VECTORIZED = {
    "momentum": {},
    "keep": {"optimizer_state": "keep"},
    "keep, done": {
        "optimizer_state": "keep",
        "policy": Drawn(brief),
        "phases": [Phase("local", num_steps=2), Phase("shared")],
        "clients_per_round": 5,
    },
    "clip": {"gradient_clip_val": 0.5},
    "rates": {"policy": Drawn(uneven), "phases": [Phase("shared"), Phase("local", num_steps=2)]},
    "adam": {
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
        "policy": Schedule(num_steps=5),
        "phases": [Phase("local", num_steps=2), Phase("all")],
    },
    "patterns": {"phases": [Phase(["net.*", "!*.bias"], num_steps=3), Phase(["!net.0.*"])]},
    "scaled": {"phases": [Phase("shared", num_steps=1), Phase("local")], "rounds": 3},
}


@pytest.mark.filterwarnings("ignore:.*have too few local steps for all phases")
@pytest.mark.parametrize("options", VECTORIZED.values(), ids=VECTORIZED)
def test_vectorized_phases_are_those_of_each_client(run, options):
    options = {"phases": FEDREP, "clients_per_round": 4} | options
    expected = run(**options)
    assert not torch.equal(expected[0].net[0].weight, Net().net[0].weight)
    close(expected, run(size=3, **options))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_compiled_phases_are_those_of_each_client(run):
    """A graph with the optimizer's update in it would move all parameters."""
    options = {
        "policy": Schedule(num_steps=4),
        "phases": [Phase("local", num_steps=2), Phase("shared")],
    }
    close(run(**options), run(size=5, compile=True, **options))


@pytest.mark.parametrize("size", [None, 3])
def test_one_phase_of_all_is_no_phase(run, size):
    close(run([], size), run([Phase()], size))


class Shrinks(torch.optim.SGD):
    """Moves all parameters, also those without a gradient."""

    federated_elementwise = True

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_(0.9)
        return loss


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize(
    "options", [{}, {"optimizer": functools.partial(Shrinks, lr=0.1)}, {"aggregator": FedDyn(0.1)}]
)
def test_fedbabu_never_moves_the_head(run, size, options):
    module, loop, _ = run([Phase("shared")], size, **options)
    assert not torch.equal(module.net[0].weight, Net().net[0].weight)
    for client in loop.store.rows:
        for name, value in Net().net[2].state_dict().items():
            assert torch.equal(loop.store.get(client)[f"parameter.net.2.{name}"], value)
    # Without local parameters: the head is exchanged, but never trained and so not sent.
    other, exchanged, _ = run([Phase(["!net.2.*"])], size, local=(), **options)
    assert torch.equal(other.net[2].weight, Net().net[2].weight)
    torch.testing.assert_close(other.net[0].weight, module.net[0].weight, atol=1e-12, rtol=0)
    assert exchanged.rows[0]["bytes_up"] == loop.rows[0]["bytes_up"] == 5 * 28 * 8


REFUSED = {
    "an amount in all": ([Phase("local", num_steps=1)], {}, "got 0 phases without num_steps"),
    "two without": ([Phase("local"), Phase("shared")], {}, "got 2 phases without num_steps"),
    "nothing local": ([Phase("local")], {"local": ()}, "train='local' trains no parameter: name"),
    "unknown": ([Phase(["head.*"])], {}, r"'head\.\*' in phases matches no parameter"),
    "nothing": ([Phase(["net.*", "!net.*"])], {}, "trains no parameter"),
    "too few": (
        [Phase("local", num_steps=2), Phase("shared")],
        {"policy": Schedule(num_steps=2)},
        "5 of 5 clients .* have too few local steps",
    ),
    "Scaffold": (FEDREP, {"aggregator": Scaffold()}, "Scaffold.*: remove phases"),
    "FedNova": (FEDREP, {"aggregator": FedNova()}, "FedNova.*: remove phases"),
    "LBFGS": (FEDREP, {"optimizer": torch.optim.LBFGS}, "phases do not support LBFGS, which moves"),
    "PFedMe": (FEDREP, {"optimizer": PERSONAL}, "phases do not support PFedMe, which moves"),
}


@pytest.mark.parametrize(("phases", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(run, phases, options, message):
    with pytest.raises(FederationError, match=message):
        run(phases, **options)


def test_clients_that_get_out_of_step_in_a_later_round_end_the_run(run):
    policy = Drawn(lambda round, clients: {"num_steps": 5 + round * (clients % 2)})
    phases = [Phase("shared"), Phase("local", num_steps=2)]
    with pytest.raises(FederationError, match="change from phase to phase in different local st"):
        run(phases, size=3, policy=policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 1, "local_epochs": 1}, "num_steps=1 excludes local_epochs=1"),
        ({"num_steps": 0}, "num_steps of a phase must be"),
        ({"local_epochs": 0}, "local_epochs of a phase must be"),
        ({"train": "head"}, "train of a phase must be local, shared, all or a list .* got 'head'"),
        ({"train": []}, "train of a phase must be"),
    ],
)
def test_a_phase_has_valid_options(options, message):
    with pytest.raises(FederationError, match=message):
        Phase(**options)


def test_a_client_with_too_few_steps_for_all_phases_is_named(run):
    policy = Drawn(lambda round, clients: {"num_steps": 2 + 3 * (clients != 4)})
    with pytest.warns(UserWarning, match=r"in round 1, 1 of 5 clients \(client 4\) have too few"):
        run([Phase("local", num_steps=2), Phase("shared")], policy=policy)


def test_ends_and_alignment():
    phases = [Phase("shared"), Phase("local", num_steps=2), Phase("all", local_epochs=0.5)]
    ends = phase_ends(phases, torch.tensor([9, 5, 2]), torch.tensor([4, 4, 4]))
    assert ends.tolist() == [[5, 7, 9], [1, 3, 5], [0, 2, 2]]
    state = PhasedTraining([frozenset("a"), frozenset("b")], "abc")
    state.start(torch.tensor([[2, 4], [2, 9]]))
    assert state.is_aligned
    state.start(torch.tensor([[1, 4], [2, 9]]))
    assert not state.is_aligned
    assert [state.held(step) for step in (1, 2, 5, 9)] == [["b", "c"], *[["a", "c"]] * 3]
