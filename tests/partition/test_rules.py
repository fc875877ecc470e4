"""Every rule's promises, and what each rule does by numbers worked out by hand."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fl.partition import (
    IID,
    ByLabel,
    ByRandomLabel,
    Dirichlet,
    FromManifest,
    Manifest,
    Natural,
    Partition,
    QuantitySkew,
    Shards,
    checksum,
)
from lightning_fl.partition.rules import _top_up
from lightning_fl.types import FederationError
from numbered import counts, lists, rng

RANDOM = [
    IID(),
    IID(stratified=True),
    ByLabel(2),
    ByRandomLabel(),
    Shards(),
    Dirichlet(),
    Dirichlet(alpha=1e-3, min_size=2),
    QuantitySkew(),
    QuantitySkew(alpha=1e-3, min_size=2),
]
RULES = [*RANDOM, ByLabel(1), Shards(1), Natural(), FromManifest("split.json")]
ALWAYS = (IID, Dirichlet, QuantitySkew, FromManifest)  # need nothing but enough samples

every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def write_manifest(labels, num_clients):
    parts = IID()(labels, num_clients, rng(99))
    Manifest.of(IID(), parts, labels, seed=99).write("split.json")


# --- Every rule ----------------------------------------------------------------------------------

data = st.lists(st.integers(-3, 3), min_size=8, max_size=40).map(torch.tensor)


@every_rule
@settings(max_examples=15, deadline=None)
@given(labels=data, num_clients=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_a_split_is_disjoint_complete_and_nowhere_empty(rule, labels, num_clients, seed):
    write_manifest(labels, num_clients)
    try:
        parts = rule(labels, num_clients, rng(seed))
    except FederationError:
        assert not isinstance(rule, ALWAYS)
        return
    assert len(parts) == num_clients
    assert all(len(part) >= getattr(rule, "min_size", 1) for part in parts)
    assert all(part.dtype == torch.int64 and part.tolist() == sorted(part) for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))


@every_rule
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_a_split_depends_on_the_generator_alone(rule, seed):
    labels = torch.arange(60) % 4
    write_manifest(labels, 4)
    before = labels.clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = rule(labels, 4, rng(seed))
        torch.manual_seed(2)
        state = torch.get_rng_state(), random.getstate()
        numpy_state = np.random.get_state()  # the old global state is what we watch
        second = rule(labels, 4, rng(seed))
        assert torch.get_rng_state().equal(state[0])
        assert random.getstate() == state[1]
        now = np.random.get_state()
        assert (now[1] == numpy_state[1]).all()
        assert now[2:] == numpy_state[2:]
    assert lists(first) == lists(second)
    assert labels.equal(before)


@pytest.mark.parametrize("rule", RANDOM, ids=repr)
def test_different_seeds_give_different_clients(rule):
    labels = torch.arange(60) % 4
    assert len({checksum(rule(labels, 4, rng(seed))) for seed in range(8)}) >= 7


@every_rule
def test_one_client_holds_everything(rule):
    labels = torch.tensor([1, 1, 0])
    write_manifest(labels, 1)
    if isinstance(rule, ByLabel):
        rule = ByLabel(classes_per_client=2)
    assert lists(rule(labels, 1, rng())) == [[0, 1, 2]]


@every_rule
def test_more_clients_than_samples_is_an_error(rule):
    with pytest.raises(FederationError, match=r"num_clients must be .*\[1, 3\], got 4: each"):
        rule(torch.tensor([0, 1, 2]), 4, rng())


@pytest.mark.parametrize("bad", [0, 2.0, None])
def test_the_number_of_clients_is_a_positive_integer(bad):
    with pytest.raises(FederationError, match=r"num_clients must be an integer in \[1, 5\], got"):
        IID()(torch.zeros(5), bad, rng())


@pytest.mark.parametrize(
    ("labels", "words"),
    [(torch.zeros(4, 2), r"shape \(4, 2\).*argmax"), (torch.tensor(3), r"shape \(\)")],
)
def test_labels_are_one_tensor_with_a_number_a_sample(labels, words):
    with pytest.raises(FederationError, match=words):
        IID()(labels, 1, rng())


@pytest.mark.parametrize("rule", [ByLabel(5), Shards(), Dirichlet(), IID(True)], ids=repr)
def test_rules_of_classes_split_real_numbers_by_their_values_or_deciles(rule):
    few, many = torch.rand(7, generator=rng()).repeat(9), torch.rand(200, generator=rng())
    for targets, size in ((few, 9), (many, 20)):
        classes = targets.argsort().argsort() // size
        found, expected = (lists(rule(labels, 4, rng())) for labels in (targets, classes))
        assert found == expected


def test_keys_are_no_real_numbers():
    with pytest.raises(FederationError, match=r"torch.float32.*use IID or QuantitySkew"):
        Natural()(torch.rand(5), 1, rng())


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([[0, 1], [1, 2]], r"sample 1 is assigned to client 0 and to client 1"),
        ([[0], [2]], r"sample 1 is assigned to no client"),
        ([[0], [1]], r"sample 2 is assigned to no client"),
        ([[0, 1, 2], []], r"client 1 gets no sample; use fewer clients.*min_size"),
        ([[0, 1], [2, 7]], r"client 1 gets sample 7, which is not in \[0, 2\]"),
        ([[0, -1], [1, 2]], r"client 0 gets sample -1"),
        ([[0, 1, 2]], r"it returns 1 clients"),
    ],
)
def test_a_faulty_rule_is_found_out(made, words):
    class Faulty(Partition):
        def __init__(self, level=3):
            self.level = level

        def split(self, labels, num_clients, generator):
            return [torch.tensor(indices, dtype=torch.long) for indices in made]

    with pytest.raises(FederationError, match=r"Faulty\(level=3\) cannot split 3.*" + words):
        Faulty()(torch.zeros(3), 2, rng())


def test_a_rule_reads_like_its_constructor():
    assert repr(Dirichlet()) == "Dirichlet(alpha=0.5, min_size=1, balanced=False)"
    assert repr(IID()) == "IID(stratified=False)"
    assert QuantitySkew(2.0, min_size=3).parameters() == {"alpha": 2.0, "min_size": 3}


# --- IID, ByLabel, Shards ------------------------------------------------------------------------


@given(labels=data, num_clients=st.integers(1, 8), seed=st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_a_stratified_split_divides_each_class_and_the_whole_equally(labels, num_clients, seed):
    labels = labels + 3
    table = counts(IID(stratified=True)(labels, num_clients, rng(seed)), labels)
    for size, shares in zip(labels.bincount().tolist(), table.T, strict=True):
        assert shares.sum() == size
        assert set(shares.tolist()) <= {size // num_clients, -(-size // num_clients)}
    sizes = table.sum(1)
    assert sizes.max() - sizes.min() <= 1


def test_an_unstratified_split_stays_what_it_was():
    """Splits of earlier runs repeat: the option draws nothing where it is off."""
    expected = torch.randperm(11, generator=rng(5)).tensor_split(3)
    found = IID()(torch.arange(11) % 2, 3, rng(5))
    assert lists(found) == [sorted(part.tolist()) for part in expected]


def test_ten_clients_of_one_class_hold_their_own_number():
    labels = torch.arange(50) % 10
    parts = ByLabel()(labels, 10, rng())
    assert lists(parts) == [[i, i + 10, i + 20, i + 30, i + 40] for i in range(10)]


def test_classes_go_round_and_are_shared_equally():
    labels = torch.tensor([0, 1, 2]).repeat(4)
    parts = ByLabel(classes_per_client=2)(labels, 3, rng())
    # Client 0 holds classes 0 and 1, client 1 classes 2 and 0, client 2 classes 1 and 2.
    assert counts(parts, labels).tolist() == [[2, 2, 0], [2, 0, 2], [0, 2, 2]]


def test_a_class_without_an_even_share_gives_its_first_owner_more():
    labels = torch.tensor([0] * 5 + [1] * 4)
    parts = ByLabel()(labels, 5, rng())
    # Class 0 belongs to clients 0, 2, 4 and class 1 to clients 1, 3.
    assert counts(parts, labels).tolist() == [[2, 0], [0, 2], [2, 0], [0, 2], [1, 0]]


def test_labels_may_be_any_integers():
    assert lists(ByLabel()(torch.tensor([99, -5, 7, 99]), 3, rng())) == [[1], [2], [0, 3]]


@pytest.mark.parametrize("rule", [ByLabel, ByRandomLabel])
@given(num_classes=st.integers(1, 7), n=st.integers(1, 7), num_clients=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_each_client_holds_n_classes_and_each_class_has_an_owner(rule, num_classes, n, num_clients):
    labels = torch.arange(num_classes).repeat(20)
    if n > num_classes or num_clients * (n if rule is ByLabel else 1) < num_classes:
        with pytest.raises(FederationError, match=r"classes"):
            rule(n)(labels, num_clients, rng())
        return
    table = counts(rule(n)(labels, num_clients, rng()), labels)
    assert ((table > 0).sum(1) == n).all()
    assert (table.sum(0) == 20).all()
    for shares in table.T:
        assert shares.max() - shares[shares > 0].min() <= 1


def test_random_classes_of_clients_are_uniform_but_for_the_first():
    labels, seeds = torch.arange(5).repeat(10), range(300)
    held = sum(counts(ByRandomLabel(3)(labels, 5, rng(s)), labels) > 0 for s in seeds)
    assert (held.diagonal() == 300).all()
    assert (held[~torch.eye(5, dtype=bool)] - 150).abs().max() < 45  # five standard deviations


def test_a_class_without_a_client_is_an_error():
    words = r"must be an integer in \[4, 10\], got 2: each of 10 classes has a client"
    with pytest.raises(FederationError, match=words):
        ByLabel(2)(torch.arange(10), 3, rng())


def test_shards_are_runs_of_the_sorted_labels():
    labels = torch.arange(20) % 10
    parts = Shards(shards_per_client=2)(labels, 5, rng())
    assert sorted(c for part in parts for c in labels[part].unique().tolist()) == list(range(10))
    assert all(len(part) == 4 for part in parts)


def test_shards_are_dealt_at_random():
    labels = torch.arange(20) % 10
    hands = [tuple(labels[Shards()(labels, 5, rng(seed))[0]].tolist()) for seed in range(20)]
    assert len(set(hands)) > 10
    assert any(abs(hand[0] - hand[-1]) > 1 for hand in map(sorted, hands))


def test_more_shards_than_samples_is_an_error():
    with pytest.raises(FederationError, match=r"in \[1, 2\], got 3: 4 clients share 10 samples"):
        Shards(3)(torch.arange(10), 4, rng())


# --- Dirichlet, QuantitySkew ---------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_the_shares_of_a_class_have_the_moments_of_a_dirichlet(alpha):
    labels = torch.arange(400).repeat(250)
    shares = counts(Dirichlet(alpha)(labels, 5, rng()), labels) / 250
    # Mean 1/K and variance (1/K)(1 - 1/K) / (K alpha + 1).
    assert shares.mean(1) == pytest.approx(torch.full((5,), 0.2), abs=0.04)
    assert shares.var(1).mean().item() == pytest.approx(0.16 / (5 * alpha + 1), rel=0.1)


@pytest.mark.parametrize("alpha", [1e-3, 1e-200, 5e-324])
def test_a_tiny_alpha_gives_a_class_to_one_client_and_not_always_the_same(alpha):
    labels = torch.arange(200).repeat(50)
    table = counts(Dirichlet(alpha)(labels, 4, rng()), labels)
    assert ((table > 0).sum(0) == 1).sum() >= 190
    assert (table.sum(1) > 1000).all()


def test_balanced_clients_get_no_class_after_their_share():
    labels = torch.arange(10).repeat(100)
    table = counts(Dirichlet(0.1, balanced=True)(labels, 5, rng()), labels)
    before = [row[: row.nonzero().max()].sum() for row in table]  # without the last class
    assert max(before) < 200 < table.sum(1).max()


@pytest.mark.parametrize("alpha", [1e6, 1e300])
def test_a_huge_alpha_is_an_equal_split(alpha):
    labels = torch.arange(10).repeat(1000)
    table = counts(Dirichlet(alpha)(labels, 10, rng()), labels)
    assert (table - 100).abs().max() <= 2
    sizes = [len(part) for part in QuantitySkew(alpha)(labels, 10, rng())]
    assert max(sizes) - min(sizes) <= 20


def test_rounding_favours_no_client():
    # Whatever is cut off a class of one sample must not always fall to the last client.
    labels = torch.arange(1000)
    sizes = torch.tensor([len(part) for part in Dirichlet(1e6)(labels, 10, rng())])
    assert (sizes - 100).abs().max() < 45


def test_whoever_is_the_largest_gives():
    parts = list(torch.arange(13).split([6, 5, 1, 1]))
    # 6 gives, of 5 and 5 the first, then the second; of 4 and 4 the first.
    topped = _top_up(parts, 3, rng())
    assert [len(part) for part in topped] == [3, 4, 3, 3]
    assert set(topped[2].tolist()) & set(range(6))
    assert 11 in topped[2]


@pytest.mark.parametrize("rule", [Dirichlet, QuantitySkew])
def test_min_size_can_use_up_all_samples_but_not_more(rule):
    labels = torch.arange(20) % 3
    assert [len(part) for part in rule(0.1, min_size=5)(labels, 4, rng())] == [5, 5, 5, 5]
    words = r"min_size must be an integer in \[1, 5\], got 6: 4 clients share 20 samples"
    with pytest.raises(FederationError, match=words):
        rule(0.1, min_size=6)(labels, 4, rng())


def test_quantity_skew_changes_sizes_and_not_classes():
    labels = torch.arange(20_000) % 2
    parts = QuantitySkew(alpha=0.5)(labels, 8, rng())
    sizes = torch.tensor([len(part) for part in parts])
    assert sizes.max() > 4 * sizes.min()
    for part in parts:
        spread = 5 * (0.25 / len(part)) ** 0.5
        assert labels[part].float().mean().item() == pytest.approx(0.5, abs=spread)


def test_sizes_have_the_moments_of_a_dirichlet():
    sizes = [[len(p) for p in QuantitySkew(1.0)(torch.zeros(500), 4, rng(s))] for s in range(200)]
    shares = torch.tensor(sizes) / 500
    assert shares.mean(0) == pytest.approx(torch.full((4,), 0.25), abs=0.04)
    assert shares.var(0).mean().item() == pytest.approx(0.1875 / 5, rel=0.15)


# --- Natural --------------------------------------------------------------------------------------


def test_each_key_is_a_client_in_ascending_order():
    keys = torch.tensor([30, 10, 20, 30])
    assert lists(Natural()(keys, 3, rng())) == [[1], [2], [0, 3]]


def test_whole_keys_go_to_the_client_with_fewest_samples():
    keys = torch.tensor([1] * 5 + [2] * 4 + [3] * 3 + [4] * 3)
    # 5 to client 0, 4 to client 1, 3 to client 1 (4 < 5), 3 to client 0 (5 < 7).
    first, second = Natural()(keys, 2, rng())
    assert keys[first].unique().tolist() == [1, 4]
    assert keys[second].unique().tolist() == [2, 3]


def test_more_clients_than_keys_is_an_error():
    words = r"num_clients must be .*\[1, 2\], got 5: each client needs a key"
    with pytest.raises(FederationError, match=words):
        Natural()(torch.tensor([1, 1, 1, 2, 2]), 5, rng())


def test_what_the_largest_gives_is_random():
    parts = list(torch.arange(101).split([100, 1]))
    given_away = {_top_up(parts, 2, rng(seed))[1][-1].item() for seed in range(20)}
    assert len(given_away) > 10
