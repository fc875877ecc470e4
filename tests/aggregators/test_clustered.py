"""Clustered federated learning: when clusters split and how, and who starts where."""

from itertools import combinations

import pytest
import torch

from lightning_fl.aggregators import ClusteredFL
from lightning_fl.functional.similarity import cosine_similarity
from rounds import aggregate, of, sent, with_buffers

#: Four groups in a plane: two that point apart, each of two that are apart a little.
DIRECTIONS = torch.tensor(
    [[3.0, 1.0], [3.0, -1.0], [-3.0, 1.0], [-3.0, -1.0]], dtype=torch.float64
).repeat_interleave(2, 0)


def moved(rule, ids=range(8), targets=DIRECTIONS, rate=0.5):
    """A round in which each client goes half of the way to its target; where they started."""
    ids = list(ids)
    starts = rule.models_for(torch.tensor(ids))
    rule.update(sent(rate * (targets[ids] - starts), ids=ids))
    return starts


def run(rule, rounds, **options):
    server = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        rule.start(server)
        moved(rule, **options)
        server = rule.compute()
    return server


@pytest.mark.parametrize(
    ("options", "models"),
    [({}, [[12, 23], [8, 17]]), ({"weighting": "uniform"}, [[12, 22], [8, 17]])],
)
def test_a_split_by_hand(options, models):
    """By samples the means of the parts are (2, 3) and (-2, -3), of all (0, 0).

    Counted once each they are (2, 2), (-2, -3) and (0, -1/2).
    """
    rule = ClusteredFL(eps1=1.0, eps2=4.0, warmup=0, **options)
    deltas = [[2.0, 0.0], [-3.0, -2.0], [2.0, 4.0], [-1.0, -4.0]]
    server = aggregate(rule, torch.tensor([10.0, 20.0]), sent(deltas, [1, 2, 3, 2]))
    assert rule.clusters() == [[0, 2], [1, 3]]
    assert rule.models.tolist() == models
    assert server.tolist() == [sum(column) / 2 for column in zip(*models, strict=True)]
    assert rule.models_for(torch.tensor([3, 0])).tolist() == models[::-1]


def transcribed(rounds, targets, rates, eps1, eps2, warmup):
    """The authors' program in plain loops: everybody trains, clusters split, then they average.

    A client's round goes the part ``rate`` of the way to its target. Returns each client's model
    and the clusters after every round.
    """
    models, clusters = [[0.0] * len(targets[0]) for _ in targets], [list(range(len(targets)))]

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    def average(rows):
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def halves(members, updates):
        """Complete linkage: join the two groups whose least similar members are most similar."""
        groups = [[k] for k in members]
        while len(groups) > 2:

            def likeness(pair):
                return min(
                    dot(updates[i], updates[j])
                    / (dot(updates[i], updates[i]) * dot(updates[j], updates[j])) ** 0.5
                    for i in groups[pair[0]]
                    for j in groups[pair[1]]
                )

            one, other = max(combinations(range(len(groups)), 2), key=likeness)
            groups[one] += groups.pop(other)
        return sorted(map(sorted, groups))

    for t in range(1, rounds + 1):
        updates = [
            [rate * (x - w) for x, w in zip(target, model, strict=True)]
            for target, model, rate in zip(targets, models, rates, strict=True)
        ]
        after = []
        for members in clusters:
            mean = average([updates[k] for k in members])
            largest = max(dot(updates[k], updates[k]) ** 0.5 for k in members)
            small = dot(mean, mean) ** 0.5 < eps1 and largest > eps2
            does = small and len(members) > 2 and t > warmup
            after += halves(members, updates) if does else [members]
        clusters = after
        for members in clusters:
            mean = average([updates[k] for k in members])
            for k in members:
                models[k] = [w + x for w, x in zip(models[k], mean, strict=True)]
        yield [list(model) for model in models], sorted(clusters)


def test_rounds_are_the_authors_program():
    """Twelve clients of four kinds, which split into two clusters and then both in one round."""
    random = torch.Generator().manual_seed(3)
    targets = DIRECTIONS[::2].repeat_interleave(3, 0)
    targets = targets + 0.2 * torch.rand(12, 2, generator=random, dtype=torch.float64)
    rates = 0.4 + 0.2 * torch.rand(12, generator=random, dtype=torch.float64)
    rule = ClusteredFL(eps1=0.25, eps2=0.3, warmup=2, weighting="uniform")
    server, ids = torch.zeros(2, dtype=torch.float64), torch.arange(12)
    expected = list(transcribed(10, targets.tolist(), rates.tolist(), 0.25, 0.3, 2))
    for models, clusters in expected:
        rule.start(server)
        starts = rule.models_for(ids)
        rule.update(sent(rates[:, None] * (targets - starts)))
        server = rule.compute()
        found, wanted = rule.models_for(ids), torch.tensor(models, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
        assert sorted(rule.clusters()) == clusters
        assert rule.metrics()["clusters"] == len(clusters)
        torch.testing.assert_close(server, wanted.mean(0), atol=1e-12, rtol=0)
    parents, rounds = rule.tree.T.tolist()
    assert parents == [-1, 0, 0, 1]
    assert rounds[2] == rounds[3] > rounds[1]


def test_norms_and_cosines_are_over_parameters_and_not_over_statistics():
    """Large statistics would keep the cluster together, or split it elsewhere."""
    moves = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [-1.0, -0.1]], dtype=torch.float64)
    statistics = torch.tensor([[9.0], [-7.0], [9.0], [9.0]], dtype=torch.float64)
    rules = [ClusteredFL(eps1=0.5, eps2=0.9, warmup=0) for _ in range(2)]
    for rule, deltas in zip(rules, (moves, torch.cat([moves, statistics], 1)), strict=True):
        of(9, rule, layout=with_buffers(2, deltas.shape[1] - 2))
        aggregate(rule, 0 * deltas[0], sent(deltas))
        assert rule.clusters() == [[0, 1], [2, 3]]
    assert rules[0].metrics() == rules[1].metrics()
    assert torch.equal(rules[0].models, rules[1].models[:, :2])
    assert rules[1].models[:, 2].tolist() == [1.0, 9.0]  # each part has its own


def test_only_the_clients_of_the_round_count():
    """A cluster without a client keeps its model; clients that are new join the first part."""
    rule = ClusteredFL(eps1=0.3, eps2=0.2, warmup=0)
    server = run(rule, 1, ids=[0, 1, 2, 4, 5, 6])
    assert rule.clusters() == [[0, 1, 2], [4, 5, 6]]
    before = rule.models.clone()
    rule.start(server)
    starts = moved(rule, ids=[0, 1, 3, 200], targets=DIRECTIONS.repeat(30, 1))
    assert torch.equal(starts, before[:1].expand(4, -1))
    rule.compute()
    assert torch.equal(rule.models[1], before[1])
    assert not torch.equal(rule.models[0], before[0])
    assert rule.clusters() == [[0, 1, 2, 3, 200], [4, 5, 6]]


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


def test_linkages_differ_on_a_chain():
    """Single linkage follows a chain and cuts its widest gap, complete linkage halves it."""
    angles = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.1], dtype=torch.float64)
    rows = torch.stack([angles.cos(), angles.sin()], 1)
    assert ClusteredFL(linkage="single").parts(rows).tolist() == [False] * 4 + [True]
    complete = ClusteredFL(linkage="complete").parts(rows)
    assert complete.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_a_split_has_two_parts_also_where_distances_tie(linkage):
    rule = ClusteredFL(eps1=0.9, eps2=0.5, warmup=0, linkage=linkage)
    for _ in range(3):
        aggregate(rule, torch.zeros(3), sent(torch.eye(3)))
        assert all(rule.clusters())
    assert sorted(client for each in rule.clusters() for client in each) == [0, 1, 2]


def test_cosines_by_hand():
    rows = torch.tensor([[3.0, 4.0], [4.0, 3.0], [0.0, 0.0], [-3.0, -4.0]], dtype=torch.float64)
    expected = [[1, 0.96, 0, -1], [0.96, 1, 0, -0.96], [0, 0, 0, 0], [-1, -0.96, 0, 1]]
    found = cosine_similarity(rows)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
