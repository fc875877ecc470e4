"""Clustered federated learning: when clusters split and how, and who starts where."""

import pytest
import torch

from lightning_fl import ClientModule, Lanes
from lightning_fl.aggregators import ClusteredFL, FedAvg
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint, RunReport
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.functional.similarity import cosine_similarity
from lightning_fl.partition import ByKey
from lightning_fl.types import ClientUpdate, FederationError

#: Four groups in a plane: two that point apart, each of two that are apart a little.
DIRECTIONS = torch.tensor(
    [[3.0, 1.0], [3.0, -1.0], [-3.0, 1.0], [-3.0, -1.0]], dtype=torch.float64
).repeat_interleave(2, 0)


def moved(rule, ids=range(8), targets=DIRECTIONS, rate=0.5, weights=None):
    """A round in which each client goes half of the way to its target; where they started."""
    ids = torch.tensor(list(ids))
    starts = rule.server_for(ids)
    weights = torch.ones(len(ids)) if weights is None else weights
    rule.update(ClientUpdate(ids, rate * (targets[ids] - starts), weights))
    return starts


def run(rule, rounds, **options):
    server = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        rule.start(server)
        moved(rule, **options)
        server = rule.compute()
    return server


def test_cosines_by_hand():
    rows = torch.tensor([[3.0, 4.0], [4.0, 3.0], [0.0, 0.0], [-3.0, -4.0]], dtype=torch.float64)
    expected = [[1, 0.96, 0, -1], [0.96, 1, 0, -0.96], [0, 0, 0, 0], [-1, -0.96, 0, 1]]
    found = cosine_similarity(rows)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_clusters_split_and_split_again_with_the_clients_own_numbers():
    """The second split is of clients 4 to 7, not of the first ones of the list."""
    rule = ClusteredFL(eps1=0.3, eps2=0.2, warmup=1)
    server = run(rule, 16)
    assert sorted(map(sorted, rule.clusters())) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    starts = rule.server_for(torch.arange(8))
    torch.testing.assert_close(starts, DIRECTIONS, atol=0.01, rtol=0)
    torch.testing.assert_close(server, torch.zeros(2, dtype=torch.float64), atol=0.01, rtol=0)
    assert rule.tree[0].tolist() == [-1, -1]
    assert rule.tree[1].tolist() == [0, 2]
    assert rule.figures()["clusters"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {"eps1": 1e-9, "eps2": 0.2, "warmup": 0, "rate": 0.4},
        {"eps1": 0.3, "eps2": 99.0, "warmup": 0},
        {"eps1": 0.3, "eps2": 0.2, "warmup": 6},
        {"eps1": 0.3, "eps2": 0.2, "warmup": 0, "min_size": 9},
    ],
)
def test_each_condition_keeps_them_together(options):
    rate = options.pop("rate", 0.5)
    rule = ClusteredFL(**options)
    targets = DIRECTIONS + torch.tensor([0.5, 0.0], dtype=torch.float64)
    run(rule, 6, targets=targets, rate=rate)
    assert len(rule.clusters()) == 1


def test_without_splits_it_is_fedavg():
    weights = torch.arange(1, 9)
    found = run(ClusteredFL(warmup=99), 5, weights=weights)
    torch.testing.assert_close(found, run(FedAvg(), 5, weights=weights), atol=1e-14, rtol=0)
    uniform = run(ClusteredFL(warmup=99, weighting="uniform"), 5, weights=weights)
    torch.testing.assert_close(uniform, run(FedAvg("uniform"), 5), atol=1e-14, rtol=0)


def test_linkages_differ_on_a_chain():
    """Single linkage follows a chain and cuts its widest gap, complete linkage halves it."""
    angles = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.1], dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], 1)
    assert ClusteredFL(linkage="single").parts(rows).tolist() == [False] * 4 + [True]
    complete = ClusteredFL(linkage="complete").parts(rows)
    assert complete.tolist() == [False, False, True, True, True]


def test_who_is_not_there_stays_and_comes_back_to_its_cluster():
    rule = ClusteredFL(eps1=0.3, eps2=0.2, warmup=0)
    server = run(rule, 1, ids=[0, 2, 4, 6])
    assert rule.clusters() == [[0, 2], [4, 6]]
    rule.start(server)
    starts = moved(rule, ids=[4, 7, 200], targets=DIRECTIONS.repeat(30, 1))
    assert torch.equal(starts[0], rule.models[1])
    assert torch.equal(starts[1], rule.models[0])  # it has never been seen
    rule.compute()
    assert 200 in rule.clusters()[0]


def test_saved_after_a_split_it_goes_on_as_if_nothing_had_been(tmp_path):
    rule, again = (ClusteredFL(eps1=0.3, eps2=0.2, warmup=1) for _ in range(2))
    server = run(rule, 4)
    torch.save(rule.state_dict(), tmp_path / "rule.pt")
    again.start(server)
    again.load_state_dict(torch.load(tmp_path / "rule.pt", weights_only=True))
    for each in (rule, again):
        each.start(server)
        moved(each)
    assert torch.equal(rule.compute(), again.compute())
    assert rule.clusters() == again.clusters()
    assert torch.equal(rule.models, again.models)


@pytest.fixture
def federation(fit, tmp_path):
    """Clients whose labels are turned: 0, 1, 2 learn y = x, and 3, 4, 5 learn y = -x."""

    def train(rounds, lanes=None, folder="run", **options):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(120, 2, generator=random, dtype=torch.float64)
        y = (x[:, 0] > 0).long()
        y[60:] = 1 - y[60:]
        samples = torch.utils.data.TensorDataset(x, y)
        keys = torch.arange(120).div(20, rounding_mode="floor").tolist()
        data = FederatedDataModule(
            samples, samples, num_clients=None, partition=ByKey(), keys=keys, seed=1
        )
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 2)
        module = ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.2)).double()
        rule = ClusteredFL(eps1=0.15, eps2=0.1, warmup=3, min_size=4)
        loop = FederatedLoop(aggregator=rule, seed=0)
        user = module if lanes is None else Lanes(module, lanes, compile=False)
        options.setdefault("callbacks", [RunReport()])
        fit(user, loop, data, rounds=rounds, **options)
        return rule, loop

    return train


@pytest.mark.parametrize("lanes", [None, 4])
def test_a_federation_finds_its_groups(federation, tmp_path, lanes):
    rule, loop = federation(10, lanes)
    assert rule.clusters() == [[0, 1, 2], [3, 4, 5]]
    assert [row["clusters"] for row in loop.rows][-1] == 2
    assert loop.rows[0]["max_norm"] > 0
    assert (tmp_path / "aggregator.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_federation_is_bit_equal(federation, tmp_path):
    def options(folder):
        return {"callbacks": [RoundCheckpoint(tmp_path / folder)], "enable_checkpointing": True}

    whole, _ = federation(8, **options("whole"))
    federation(6, **options("half"))
    again, _ = federation(8, ckpt_path=tmp_path / "half" / "last.ckpt", **options("half"))
    assert torch.equal(again.models, whole.models)
    assert again.clusters() == whole.clusters()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps1": -1.0}, "eps1 and eps2 must be at least 0, got -1.0"),
        ({"min_size": 1}, "min_size at least 2, got 20 and 1"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"linkage": "ward"}, "linkage must be complete or single, got 'ward'"),
        ({"weighting": "n"}, "weighting must be samples or uniform, got 'n'"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(FederationError, match=words):
        ClusteredFL(**options)


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_a_split_has_two_parts_also_where_distances_tie(linkage):
    rule = ClusteredFL(eps1=0.9, eps2=0.5, warmup=0, linkage=linkage)
    for _ in range(3):
        rule.start(torch.zeros(3))
        rule.update(ClientUpdate(torch.arange(3), torch.eye(3), torch.ones(3)))
        rule.compute()
        assert all(rule.clusters())
    assert sorted(client for each in rule.clusters() for client in each) == [0, 1, 2]
    assert rule.figure() is not None
