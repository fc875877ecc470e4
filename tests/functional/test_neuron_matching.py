"""Matching of neurons: against brute force, closed forms and limit cases."""

from functools import cache
from itertools import pairwise, permutations, product
from math import lgamma, log

import numpy as np
import pytest
import torch

from lightning_fl.functional.networks import (
    MatchingOptions,
    NetworkPosterior,
    match_networks,
    match_upwards,
)
from lightning_fl.functional.neuron_matching import (
    Posterior,
    Process,
    best_assignment,
    gains,
    match,
)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def process(d, clients, **options):
    return Process(0.3 * rand(d, seed=9), 0.2 + rand(d, seed=8).square(), clients, **options)


def groups(assignments):
    """The neurons, (client, neuron), of each atom."""
    found = {}
    for client, atoms in enumerate(assignments):
        for neuron, atom in enumerate(atoms):
            found.setdefault(int(atom), []).append((client, neuron))
    return found


def evidence(begin, trust, values, own, holders):
    """What neurons that are one atom add to the objective."""
    top = begin + sum(own[c] * values[c][n] for c, n in holders)
    low = trust + sum(own[c] for c, _ in holders)
    return float((top * top / low - begin * begin / trust).sum())


def order_of_new(assignments, old=0):
    """The term for the order of the new atoms that a client has alone."""
    return sum(
        2 * lgamma(1 + sum(a >= old and len(groups(assignments)[int(a)]) == 1 for a in each))
        for each in assignments
    )


def plainly(prior, values, own, assignments):
    """The objective by loops over atoms and clients."""
    total, j = -order_of_new(assignments), prior.clients
    for holders in groups(assignments).values():
        total += evidence(prior.mean * prior.precision, prior.precision, values, own, holders)
        total += 2 * log(prior.gamma / j)
        total += prior.popularity * sum(log(a / (j - a)) for a in range(1, len(holders)))
    return total


@pytest.mark.parametrize("popularity", [1.0, 2.0])
def test_gains_are_what_an_assignment_adds_to_the_objective(popularity):
    prior = process(3, 4, gamma=1.7, popularity=popularity)
    values = [rand(2, 3, seed=1), rand(3, 3, seed=2), rand(2, 3, seed=3)]
    own = [rand(3, seed=s).square() for s in (4, 5, 6)]
    others = [[0, 1], [1, 2, 0]]
    before = plainly(prior, values, own, [*others, []])
    found = match(prior, values[:2], own[:2], sweeps=0, start=[torch.tensor(a) for a in others])
    gain = gains(prior, found.sums, found.precisions, found.counts, values[2], own[2])
    assert gain.shape == (2, 3 + 2)
    for atoms in [*permutations(range(4), 2), (3, 4)]:  # atoms of its own are numbers 3 and 4
        expected = float(gain[0, atoms[0]] + gain[1, atoms[1]])
        # Client 1 has one atom alone, or none where that gets a second holder: 1! is 0!.
        after = plainly(prior, values, own, [*others, list(atoms)])
        assert expected == pytest.approx(after - before, abs=1e-10)


def swept(prior, values, own, start, orders):
    """The procedure of the paper in loops: each client in turn gets its best of all assignments.

    Returns the groups of neurons, (client, neuron), that are one atom, and the objectives.
    """
    atoms = [list(each) for each in start]
    objectives = [plainly(prior, values, own, atoms)]
    begin = prior.mean * prior.precision, prior.precision, values, own
    for order in orders:
        for client in order:
            others = [a for c, each in enumerate(atoms) if c != client for a in each]
            names = {atom: place for place, atom in enumerate(dict.fromkeys(others))}
            atoms = [[names.get(a, -1) for a in each] for each in atoms]
            held = groups(each if c != client else [] for c, each in enumerate(atoms))

            @cache
            def fit(neuron, atom, client=client, held=held):
                holders = held.get(atom, [])
                alone = evidence(*begin, holders)
                return evidence(*begin, [*holders, (client, neuron)]) - alone

            def gain(chosen, names=names, held=held, fit=fit):
                total, new = 0.0, 0
                for neuron, atom in enumerate(chosen):
                    total += fit(neuron, atom)
                    if atom < len(names):
                        m = min(len(held[atom]), prior.cap or len(held[atom]))
                        total += prior.popularity * log(m / (prior.clients - m))
                    else:
                        new += 1
                        total += 2 * log(prior.gamma / prior.clients) - 2 * log(new)
                return total

            tried = every_assignment(len(values[client]), len(names))
            atoms[client] = max(tried, key=gain)
        objectives.append(plainly(prior, values, own, atoms))
    return sorted(groups(atoms).values()), objectives


@pytest.mark.parametrize("popularity", [1.0, 2.0])
def test_sweeps_take_every_assignment_that_is_a_clients_best(popularity):
    """Against loops over all assignments, from a start of a previous round, also where it falls."""
    fell = 0
    for seed in range(12):
        prior = process(2, 3, gamma=2.0, popularity=popularity)
        values = [0.8 * rand(n, 2, seed=10 * seed + s) for s, n in enumerate((3, 2, 3))]
        own = [torch.full((2,), 2.0, dtype=torch.float64)] * 3
        start, orders = [[0, 1, 2], [3, 0], [1, 4, 3]], [[2, 0, 1], [1, 2, 0], [0, 1, 2]]
        expected, objectives = swept(prior, values, own, start, orders)
        options = {"start": [torch.tensor(a) for a in start], "orders": [[0, 1, 2], *orders]}
        found = match(prior, values, own, 3, **options)
        assert sorted(groups(found.assignments).values()) == expected
        fell += objectives != sorted(objectives)
    assert fell


def test_a_start_is_what_sweeps_begin_with_and_clients_without_one_are_placed():
    prior, own = process(2, 3), [torch.ones(2).double()] * 3
    values = [rand(2, 2, seed=s) for s in range(3)]
    start = [torch.tensor([5, 2]), None, torch.tensor([2, 9])]
    found = match(prior, values, own, sweeps=0, start=start)
    two = match(prior, values[::2], own[:2], sweeps=0, start=[start[0], start[2]])
    assert sorted(groups(two.assignments).values()) == [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]
    assert len(two.atoms) == 3  # numbers that nobody has are left out
    gain = gains(prior, two.sums, two.precisions, two.counts, values[1], own[1])
    best = best_assignment(gain)
    assert torch.equal(found.assignments[1], best)
    assert torch.equal(found.assignments[0], two.assignments[0])
    assert torch.equal(found.assignments[2], two.assignments[1])


@pytest.mark.parametrize("how", [match_networks, match_upwards])
@pytest.mark.parametrize(
    "option",
    [
        {"client_variance": 0.1},
        {"prior_variance": 5.0},
        {"gamma": 0.1},
        {"bias_mean": 0.9},
        {"popularity": 1.0},
        {"cap": 1},
        {"max_width": 4},
        {"sweeps": 0},
    ],
    ids=str,
)
def test_every_option_reaches_the_matching(how, option):
    def merged(seed, **options):
        nets = [network(4, 5, 5, 3, seed=seed + 50 * s) for s in range(4)]
        settings = MatchingOptions(**{"client_variance": 0.5, "gamma": 3.0, "sweeps": 3, **options})
        found = how(nets, None, settings, orders=[[0, 1, 2, 3]] * 4)
        return [t.tolist() for layer in found.layers for t in layer]

    assert any(merged(seed) != merged(seed, **option) for seed in (0, 1000, 2000))


def test_a_cap_and_a_limit():
    prior = Process(torch.zeros(1), torch.ones(1), 4, cap=2, most=3)
    zero, counts = torch.zeros(2, 1), torch.tensor([1.0, 3.0])
    gain = gains(prior, zero, zero + 1, counts, zero, torch.zeros(1))
    assert gain.shape == (2, 3)
    expected = [2 * log(1 / 3), 2 * log(2 / 2), 2 * log(1 / 4)]
    np.testing.assert_allclose(gain[0], expected, atol=1e-12)


@pytest.mark.parametrize(("atoms", "places"), [(0, 3), (4, 3), (5, 2), (6, 1), (7, 1), (99, 1)])
def test_at_the_limit_of_atoms_a_client_may_still_add_one(atoms, places):
    """Supplement 4.2, with a limit of 7: three neurons, as many new columns as there are places."""
    prior = Process(torch.zeros(1), torch.ones(1), 4, most=7)
    old = torch.zeros(atoms, 1).double()
    values = torch.zeros(3, 1).double()
    gain = gains(prior, old, old + 1, torch.ones(atoms).double(), values, torch.ones(1).double())
    assert gain.shape == (3, atoms + places)


def every_assignment(neurons, atoms):
    """All ways to give a client's neurons different atoms, of its own in order."""
    for chosen in product([*range(atoms), None], repeat=neurons):
        old = [a for a in chosen if a is not None]
        if len(set(old)) == len(old):
            fresh = iter(range(atoms, atoms + neurons))
            yield [next(fresh) if a is None else a for a in chosen]


# --- streams --------------------------------------------------------------------------------------


def streamed(prior, past, values, own, assignments):
    """What a step adds to the objective (supplement, equation 11), by loops."""
    s, old = past.steps + 1, len(past.sums)
    total = -order_of_new(assignments, old)
    for atom, holders in groups(assignments).items():
        begin = past.sums[atom] if atom < old else prior.mean * prior.precision
        trust = past.precisions[atom] if atom < old else prior.precision
        total += evidence(begin, trust, values, own, holders)
        for i, (client, _) in enumerate(holders):
            m = float(past.uses[client, atom]) if atom < old else 0.0
            if atom >= old and i == 0:
                total += 2 * log(prior.gamma / (s * prior.clients))
            else:
                total += prior.popularity * log((1 + m) / (s - m))
    return total


@pytest.mark.parametrize("popularity", [1.0, 2.0])
def test_gains_in_a_stream(popularity):
    prior = process(3, 2, gamma=1.7, popularity=popularity)
    uses = torch.tensor([[2.0, 0.0, 1.0], [1.0, 2.0, 0.0]]).double()
    past = Posterior(rand(3, 3, seed=1), 1 + rand(3, 3, seed=2).square(), uses, 2)
    values, own = [rand(2, 3, seed=3), rand(2, 3, seed=4)], [rand(3, seed=s).exp() for s in (5, 6)]
    first, alone = [0, 3], Posterior(past.sums, past.precisions, past.uses[:1], 2)
    before = streamed(prior, past, values, own, [first, []])
    options = {"sweeps": 0, "start": [torch.tensor(first)], "past": alone}
    start = match(prior, values[:1], own[:1], **options)
    counts = torch.cat([uses[1], torch.zeros(1).double()])
    gain = gains(prior, start.sums, start.precisions, counts, values[1], own[1], step=3)
    assert gain.shape == (2, 4 + 2)
    for atoms in [*permutations(range(5), 2), (4, 5)]:
        if 5 in atoms and 4 not in atoms:
            continue
        expected = float(gain[0, atoms[0]] + gain[1, atoms[1]])
        after = streamed(prior, past, values, own, [first, list(atoms)])
        assert expected == pytest.approx(after - before, abs=1e-10)


def test_the_posterior_of_a_step_is_the_prior_of_the_next():
    prior = process(3, 2)
    own = [rand(3, seed=s).exp() for s in (5, 6)]
    past, sums, precisions = Posterior.before(2, 3), {}, {}
    uses = torch.zeros(2, 0).double()
    for step in range(3):
        values = [3 * rand(2, 3, seed=10 * step + s) for s in range(2)]
        found = match(prior, values, own, past=past, generator=torch.Generator().manual_seed(step))
        now = [a.tolist() for a in found.assignments]
        for client, atoms in enumerate(now):
            for neuron, atom in enumerate(atoms):
                sums.setdefault(atom, prior.mean * prior.precision)
                precisions.setdefault(atom, prior.precision)
                sums[atom] = sums[atom] + own[client] * values[client][neuron]
                precisions[atom] = precisions[atom] + own[client]
        past = found.posterior
        assert len(past.sums) == len(sums)  # atoms that nobody has any more are still there
        for atom in sums:
            torch.testing.assert_close(past.sums[atom], sums[atom])
            torch.testing.assert_close(past.precisions[atom], precisions[atom])
            torch.testing.assert_close(found.atoms[atom], sums[atom] / precisions[atom])
        uses = torch.cat([uses, uses.new_zeros(2, len(sums) - uses.shape[1])], 1)
        for client, atoms in enumerate(now):
            uses[client, atoms] += 1
        assert torch.equal(past.uses, uses)
        assert past.steps == step + 1
    assert (past.uses.sum(0) < 3).any()


def test_a_stream_of_networks_grows_upwards():
    """An atom of the lower layer knows nothing yet of one that came to be above."""
    past, top = NetworkPosterior(), torch.tensor([[4, 0, 2], [1, 0, 5]])
    width = 0
    for step in range(3):
        nets = [network(4, 3, 5, 3, seed=30 * step + 9 * j) for j in range(2)]
        found = match_networks(nets, top, MatchingOptions(0.5, 2.0, gamma=3.0), past=past)
        lower, upper = found.posterior.layers
        assert lower.sums.shape == (found.widths[0], 1 + found.widths[1] + 4)
        assert upper.sums.shape == (found.widths[1], 1 + 3)
        assert found.widths[1] > width
        if step:  # what was known, and what a neuron that nobody had this time is
            still = torch.ones(len(past.layers[0].sums), dtype=torch.bool)
            for atoms in found.matchings[0].assignments:
                still[atoms[atoms < len(still)]] = False
            before, after = past.layers[0].sums[still], lower.sums[: len(still)][still]
            assert still.any()
            torch.testing.assert_close(after[:, : 1 + width], before[:, : 1 + width])
            torch.testing.assert_close(after[:, -4:], before[:, -4:])
            more = lower.precisions[: len(still)][still][:, 1 + width : -4]
            assert torch.equal(more, torch.full_like(more, 0.5))
            assert not after[:, 1 + width : -4].any()
        past, width = found.posterior, found.widths[1]
    # Nobody has ever had a sample of class 1: its weights are the prior's.
    assert torch.equal(found.layers[-1][0][1], torch.zeros(width).double())
    assert found.layers[-1][1][1] == pytest.approx(0.1)


# --- networks -------------------------------------------------------------------------------------


def network(*sizes, seed=0):
    return [
        (rand(out, into, seed=seed + 2 * i), rand(out, seed=seed + 2 * i + 1))
        for i, (into, out) in enumerate(pairwise(sizes))
    ]


def output(layers, x, activation=torch.tanh):
    for weight, bias in layers[:-1]:
        x = activation(x @ weight.mT + bias)
    return x @ layers[-1][0].mT + layers[-1][1]


def shuffled(layers, seed):
    """The same function, with its hidden neurons in another order."""
    found = [[w.clone(), b.clone()] for w, b in layers]
    for i in range(len(found) - 1):
        order = torch.randperm(len(found[i][1]), generator=torch.Generator().manual_seed(seed + i))
        found[i] = [found[i][0][order], found[i][1][order]]
        found[i + 1][0] = found[i + 1][0][:, order]
    return [(w, b) for w, b in found]


def test_one_client_of_several_widths_and_softmax_weights_by_hand():
    """One neuron each, of the same kind: every weight is a mean with the prior's."""
    one = [
        (torch.tensor([[2.0]]), torch.tensor([1.0])),
        (torch.tensor([[4.0], [8.0]]), torch.tensor([1.0, 2.0])),
    ]
    two = [
        (torch.tensor([[3.0]]), torch.tensor([2.0])),
        (torch.tensor([[6.0], [9.0]]), torch.tensor([3.0, 6.0])),
    ]
    counts = torch.tensor([[3, 0], [1, 5]])
    found = match_networks([one, two], counts, MatchingOptions(0.5, 2.0, bias_mean=0.1))
    assert found.widths == [1]
    (weight, bias), (out, last) = found.layers
    assert float(weight) == pytest.approx((2 * 2 + 2 * 3) / (0.5 + 4))
    assert float(bias) == pytest.approx((0.5 * 0.1 + 2 * 1 + 2 * 2) / (0.5 + 4))
    expected = [(2 * (0.75 * 4 + 0.25 * 6)) / 2.5, (2 * 9) / 2.5]
    assert out[:, 0].tolist() == pytest.approx(expected)
    biases = [(0.05 + 2 * (0.75 * 1 + 0.25 * 3)) / 2.5, (0.05 + 2 * 6) / 2.5]
    assert last.tolist() == pytest.approx(biases)


def filters(seed=0, kernel=3):
    """A convolution of two channels, another, a linear layer on 2 x 2 pixels, and classes."""
    return [
        (rand(4, 2, kernel, kernel, seed=seed), rand(4, seed=seed + 1)),
        (rand(5, 4, 2, 2, seed=seed + 2), rand(5, seed=seed + 3)),
        (rand(6, 5, 4, seed=seed + 4), rand(6, seed=seed + 5)),
        (rand(3, 6, seed=seed + 6), rand(3, seed=seed + 7)),
    ]


def seen(layers, x):
    for weight, bias in layers[:2]:
        x = torch.tanh(torch.nn.functional.conv2d(x, weight, bias))
    x = torch.tanh(x.flatten(1) @ layers[2][0].flatten(1).mT + layers[2][1])
    return x @ layers[3][0].mT + layers[3][1]


X, IMAGES = rand(7, 4, seed=99), rand(7, 2, 5, 5, seed=99)
every_kind = pytest.mark.parametrize(
    ("how", "make", "run"),
    [
        (match_networks, lambda seed=0: network(4, 5, 3, seed=seed), lambda n: output(n, X)),
        (match_networks, lambda seed=0: network(4, 6, 5, 4, 3, seed=seed), lambda n: output(n, X)),
        (match_networks, filters, lambda n: seen(n, IMAGES)),
        (match_upwards, filters, lambda n: seen(n, IMAGES)),
    ],
)


@every_kind
def test_a_network_and_its_permutations_merge_to_itself(how, make, run):
    net = make()
    nets = [net, shuffled(net, 1), shuffled(net, 7)]
    found = how(nets, None, MatchingOptions(1e-6, 1e4))
    assert found.widths == [len(bias) for _, bias in net[:-1]]
    for merged in (found.layers, *map(found.of_client, range(3))):
        torch.testing.assert_close(run(merged), run(net), rtol=1e-5, atol=1e-5)


@every_kind
def test_the_order_of_neurons_changes_nothing(how, make, run):
    nets = [make(seed=seed) for seed in (0, 50, 90)]
    moved = [nets[0], shuffled(nets[1], 3), shuffled(nets[2], 4)]
    options = MatchingOptions(0.5, gamma=3.0, sweeps=3)
    a, b = (how(n, None, options, orders=[[0, 1, 2]] * 4) for n in (nets, moved))
    assert a.widths == b.widths > [len(bias) for _, bias in nets[0][:-1]]
    torch.testing.assert_close(run(a.layers), run(b.layers), rtol=1e-10, atol=1e-10)


def test_upwards_by_hand():
    """Two clients of two neurons, the second's in the other order; one neuron is its own."""
    one = [
        (torch.tensor([[5.0], [-4.0]]), torch.tensor([1.0, 2.0])),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 3.0])),
    ]
    two = [
        (torch.tensor([[9.0], [5.2]]), torch.tensor([0.0, 1.2])),
        (torch.tensor([[5.0, 6.0], [7.0, 8.0]]), torch.tensor([2.0, 5.0])),
    ]
    counts = torch.tensor([[3, 1], [1, 1]])
    found = match_upwards([one, two], counts, MatchingOptions(0.1, 10.0, sweeps=0))
    assert [a.tolist() for a in found.matchings[0].assignments] == [[0, 1], [2, 0]]
    (weight, bias), (last, top) = found.layers
    assert weight[:, 0].tolist() == pytest.approx(
        [10 * (5 + 5.2) / 20.1, 10 * -4 / 10.1, 10 * 9 / 10.1]
    )
    assert bias[0] == pytest.approx((0.01 + 10 * (1 + 1.2)) / 20.1)
    first = [0.75 * 1 + 0.25 * 6, 0.75 * 2, 0.25 * 5]
    second = [0.5 * 3 + 0.5 * 8, 0.5 * 4, 0.5 * 7]
    torch.testing.assert_close(last, torch.tensor([first, second]).double())
    assert top.tolist() == [1.25, 4.0]


def test_layers_that_clients_were_given_are_not_matched_again():
    nets = [filters(seed) for seed in (0, 50)]
    first = match_upwards(nets, None, MatchingOptions(0.5, gamma=3.0))
    given = [
        [first.of_client(j)[0], *[(w + 0.1 * rand(*w.shape, seed=7 + j), b) for w, b in net[1:]]]
        for j, net in enumerate(nets)
    ]
    known = [first.matchings[0].assignments]
    again = match_upwards(given, None, MatchingOptions(gamma=1e9), known=known)
    torch.testing.assert_close(again.layers[0], first.layers[0], rtol=0, atol=0)
    assert again.widths[1] == 10  # the next layer is


def test_a_given_layer_keeps_weights_from_neurons_that_only_some_clients_have():
    nets = [network(4, 5, 5, 3, seed=50 * j) for j in range(3)]
    for net in nets:  # the upper neurons are alike, the lower ones are not
        net[1] = 0.1 * net[1][0], 9 * rand(5, seed=7)
    options = MatchingOptions(0.1, 3.0)
    first = match_upwards(nets, None, options)
    assert first.widths[0] > first.widths[1] == 5
    given = [[*first.of_client(j)[:2], net[2]] for j, net in enumerate(nets)]
    known = [matching.assignments for matching in first.matchings]
    again = match_upwards(given, None, options, known=known)
    assert torch.equal(again.layers[1][0], first.layers[1][0])
    assert again.layers[1][0].all()


def test_class_counts_of_a_softmax_layer_on_pixels():
    """One filter each, of the same kind, on two pixels and two classes."""
    out = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    nets = [
        [(torch.full((1, 1, 1, 1), 9.0), torch.ones(1)), (out * factor, torch.zeros(2))]
        for factor in (1.0, 1.5)
    ]
    found = match_networks(nets, torch.tensor([[3, 1], [1, 1]]), MatchingOptions(0.5, 2.0))
    assert found.widths == [1]
    last = found.layers[1][0][:, 0]
    for k, share in enumerate(((0.75, 0.25), (0.5, 0.5))):
        for pixel in range(2):
            top = 2 * float(out[k, 0, pixel]) * (share[0] + 1.5 * share[1])
            assert float(last[k, pixel]) == pytest.approx(top / 2.5)


@pytest.mark.parametrize("how", [match_networks, match_upwards])
def test_a_class_without_samples_weighs_clients_equally(how):
    nets = [network(4, 3, 3), network(4, 5, 3, seed=20)]
    zero, same = torch.tensor([[1, 0, 2], [3, 0, 1]]), torch.tensor([[1, 5, 2], [3, 5, 1]])
    zero, same = (how(nets, counts, orders=[[0, 1]] * 6).layers for counts in (zero, same))
    torch.testing.assert_close(zero, same, rtol=0, atol=0)


def test_identical_clients_collapse_and_far_ones_stay_apart():
    prior, own = Process(torch.zeros(4), torch.full((4,), 0.1), 3), [torch.full((4,), 10.0)] * 3
    values = 3 * rand(6, 4)
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    found = match(prior, [values, *(values[order] for order in orders)], own)
    assert len(found.atoms) == 6
    torch.testing.assert_close(found.atoms, values * 30 / 30.1, rtol=1e-10, atol=1e-10)
    far = [values, values + 40, values - 40]
    assert len(match(prior, far, own).atoms) == 18


def test_the_limit_of_atoms_grows_by_one_with_each_client():
    """Neurons are at right angles to each other: without a limit there would be twelve atoms."""
    values, own = list((10 * torch.eye(12).double()).split(3)), [torch.ones(12).double()] * 4
    nothing, one = torch.zeros(12), torch.ones(12)
    prior, free = (Process(nothing, one, 4, most=most) for most in (3, None))
    assert len(match(free, values, own, sweeps=0).atoms) == 12
    found = match(prior, values, own, sweeps=0)
    assert [int(a.max()) for a in found.assignments] == [2, 3, 4, 5]
    alone = match(Process(nothing, one, 2, most=1), values[:2], own[:2], sweeps=0)
    assert len(alone.atoms) == 4  # as many as the first client needs, and one


def test_popularity_weighs_who_else_has_an_atom_alone():
    """Proposition 2 as printed has a factor of 1 there, and of 2 for new atoms."""
    gain = {}
    for popularity in (1.0, 2.0):
        prior = Process(torch.zeros(1), torch.ones(1), 5, gamma=3.0, popularity=popularity)
        counts, none = torch.tensor([1.0, 4.0]).double(), torch.zeros(2, 1).double()
        gain[popularity] = gains(prior, none, none + 1, counts, none, torch.zeros(1).double())
    new = [2 * log(3 / 5), 2 * log(3 / 5) - 2 * log(2)]
    np.testing.assert_allclose(gain[1.0][0], [log(1 / 4), log(4), *new], atol=1e-12)
    np.testing.assert_allclose(gain[2.0][0], [2 * log(1 / 4), 2 * log(4), *new], atol=1e-12)
