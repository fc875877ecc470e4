"""Federated matched averaging: one layer per round; filters; resume; vectorized."""

import pytest
import torch
from torch import nn

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedMA
from lightning_fl.aggregators.matching.layer_stack import LayerStack
from lightning_fl.callbacks import RoundCheckpoint
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.functional.networks import MatchingOptions, match_upwards
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.models import LeNet
from lightning_fl.options import describe
from lightning_fl.samplers import ClientSampler
from mlp import federation


def module(seed=0, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4 * 9, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    options = {"lr": 0.05} | options
    return ClientModule(net, optimizer=lambda p: optimizer(p, **options)).double()


@pytest.fixture
def images():
    """A federation of small images of three classes."""

    def make(num_clients=3, **options):
        random = torch.Generator().manual_seed(0)
        y = torch.arange(96) % 3
        means = torch.randn(3, 1, 8, 8, generator=random, dtype=torch.float64)
        x = means[y] + 0.3 * torch.randn(96, 1, 8, 8, generator=random, dtype=torch.float64)
        train = torch.utils.data.TensorDataset(x[:72], y[:72])
        val = torch.utils.data.TensorDataset(x[72:], y[72:])
        return FederatedDataModule(
            train, val, num_clients=num_clients, batch_size=8, seed=1, **options
        )

    return make


class Watch(FedMA):
    """Notes what clients started from and returned."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def compute(self):
        found = self.gather_by_client("ids", "deltas")
        starts = self.models_for(found[0]).clone()
        super().compute()
        self.seen.append((starts, found[1].clone(), self._returned[1]))
        return self.server


def run(fit, images, rule, made, rounds=3):
    """Train a module; return the loop."""
    return fit(made, federation(rule, 4, seed=2), images(), rounds=rounds)


@pytest.mark.parametrize("group_size", [None, 2, 3])
def test_layers_are_matched_from_below_and_stay(fit, images, group_size):
    rule, made = Watch(seed=4), module(momentum=0.9, weight_decay=0.1)
    user = made if group_size is None else VectorizedClients(made, group_size)
    loop = run(fit, images, rule, user)
    chain, own = LayerStack(made), [(4, 1), (6, 4), (3, 6)]
    assert [row["layer"] for row in loop.rows] == [1, 2, 3]
    for round, (_, deltas, _) in enumerate(rule.seen):
        for delta in deltas:
            moves = [bool(w.any()) for w, _ in rule.module_chain.unpack(delta, own)]
            assert moves == [layer >= round for layer in range(3)]
    # By hand: the layers below are given, the next is matched, and taken over.
    known = []
    for round, (_, _, nets) in enumerate(rule.seen):
        options = MatchingOptions(1.0, 1.0, 7.0, sweeps=5 if round == 0 else 3)
        random = generator(4, RandomStream.NEURONS, 0, round)
        found = match_upwards(nets, rule.class_counts, options, known=known, generator=random)
        known = [matching.assignments for matching in found.matchings[: round + 1]]
        if round < 2:
            following = rule.seen[round + 1][0]
            for client in range(3):
                start = rule.module_chain.unpack(following[client], own)
                mine = found.of_client(client)
                wanted = [*mine[: round + 1], *nets[client][round + 1 :]]
                torch.testing.assert_close(start, wanted)
    torch.testing.assert_close(chain.read(), found.layers)
    assert all(p.requires_grad for p in made.parameters())


class Turns(ClientSampler):
    """Other clients in later rounds."""

    def __init__(self, cohorts):
        self.cohorts = cohorts

    def sample(self, round, count, num_samples, generator):
        return torch.tensor(self.cohorts[round])


def test_who_was_not_there_from_below_waits_for_the_next_pass(fit, images):
    rule = FedMA(seed=4)
    cohorts = [[0, 1], [1, 2], [0, 2], [0, 2]]
    loop = federation(rule, 2, sampler=Turns(cohorts), clients_per_round=2)
    seen = []

    class Look(RoundCheckpoint):
        def on_train_epoch_end(self, trainer, pl_module):
            seen.append((sorted(rule.assignments()), rule.layer))

    fit(module(), loop, images(), rounds=4, callbacks=[Look()], enable_checkpointing=True)
    # Of the third round nobody was in the second: a new pass begins.
    assert seen == [([0, 1], 1), ([1], 2), ([1], 0), ([0, 2], 1)]


def test_layers_draw_their_own_starts(fit, images):
    rule, again = Watch(seed=4), Watch(seed=4)
    for each in (rule, again):
        run(fit, images, each, module(), rounds=1)
    starts = rule.seen[0][0]
    assert len({float(start[0]) for start in starts}) == 3
    assert starts[:, :36].abs().max() <= 1 / 3  # as nn.Conv2d draws: 1 / sqrt(9)
    assert torch.equal(again.seen[0][0], starts)


def test_what_the_user_froze_stays_frozen(fit, images):
    made = module()
    made.net[4].weight.requires_grad_(False)
    run(fit, images, FedMA(seed=4), made)
    assert [p.requires_grad for p in made.parameters()] == [True, True, False, True, True, True]


def test_it_is_described_by_all_of_its_options():
    """Tables, reports and the warning of a resumed run with other options rely on it."""
    assert describe(FedMA(client_variance=0.1, widths=[3])) == (
        "FedMA(gamma=7.0, client_variance=0.1, prior_variance=1.0, std=None, widths=[3],"
        " bias_mean=0.1, sweeps=5, popularity=2.0, cap=None, max_width=None, tolerance=0.005,"
        " seed=None)"
    )


def test_a_chain_reads_and_writes_other_widths():
    made = LeNet(width=4, hidden=7)
    chain, x = LayerStack(made), torch.rand(2, 1, 28, 28)
    before, layers = made(x), chain.read()
    shapes = [(4, 1, 5, 5), (10, 4, 5, 5), (7, 10, 16), (10, 7)]
    assert [tuple(w.shape) for w, _ in layers] == shapes
    (w, b), (v, c) = layers[:2]
    doubled = [(torch.cat([w, w]), torch.cat([b, b])), (torch.cat([v, v], 1) / 2, c)]
    with chain.holding([*doubled, *layers[2:]]):
        assert made[0].out_channels == made[3].in_channels == 8
        torch.testing.assert_close(made(x), before)
        vector = chain.pack(chain.read())
        again = chain.unpack(vector, chain.shapes)
        assert all(torch.equal(a, b) for a, b in zip(again[0], doubled[0], strict=True))
        state = {name: value.clone() for name, value in made.state_dict().items()}
    assert torch.equal(made(x), before)
    other = LeNet(width=4, hidden=7)
    LayerStack(other).fit_to(state)
    other.load_state_dict(state)
    torch.testing.assert_close(other(x), before)
