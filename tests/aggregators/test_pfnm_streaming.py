"""Streaming neural matching in a federation: what is remembered, where clients start, resume."""

import pytest
import torch

from lightning_fl.aggregators import PFNM, StreamingPFNM
from lightning_fl.aggregators.matching.pfnm_streaming import LayerPosterior
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.functional.networks import MatchingOptions, NetworkPosterior, match_networks
from lightning_fl.functional.randomness import RandomStream, generator
from mlp import MATCHED, federation, module


class Watch(StreamingPFNM):
    """Notes what was merged in each round."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def _matched(self, ids, nets, options):
        self.seen.append((list(ids), nets, self.class_counts.clone()))
        return super()._matched(ids, nets, options)


@pytest.mark.parametrize("sizes", [(6, 8, 3), (6, 8, 5, 3)])
def test_each_round_goes_on_from_the_posterior_of_the_last(fit, data, sizes):
    rule = Watch(**MATCHED, seed=3)
    made, samples = module(sizes), data(stream_steps=3)
    fit(made, federation(rule), samples)
    past = NetworkPosterior()
    for round, (ids, nets, counts) in enumerate(rule.seen):
        samples.advance(round)
        assert torch.equal(counts, samples.class_counts)
        assert counts.sum() == len(samples.train) // 3
        options = MatchingOptions(**MATCHED, sweeps=5 if round == 0 else 3)
        random = generator(3, RandomStream.NEURONS, 0, round)
        found = match_networks(nets, counts[ids], options, generator=random, past=past)
        past = found.posterior
    for i, (kept, layer) in enumerate(zip(rule.layers, past.layers, strict=True)):
        torch.testing.assert_close(kept.sums, layer.sums)
        torch.testing.assert_close(kept.precisions, layer.precisions)
        assert torch.equal(kept.uses[:4], layer.uses)
        assert kept.uses.sum() == 3 * 4 * sizes[i + 1]
    torch.testing.assert_close(rule.network(), found.layers)


def test_clients_start_from_neurons_they_have_used(fit, data):
    rule = StreamingPFNM(**MATCHED, fresh=2, noise=0.0, seed=1)
    fit(module(), federation(rule, client_fraction=0.5), data(stream_steps=3), rounds=2)
    (w, b), (v, _) = rule.network()
    rule.load_client_network()
    starts = rule.models_for(torch.arange(4))
    assert not torch.equal(starts[0], starts[1])
    for client in range(4):
        weight, bias = starts[client, :48].view(8, 6), starts[client, 48:56]
        out = starts[client, 56:80].view(3, 8)
        assert not weight[6:].any()
        assert bias[6:].tolist() == [0.1, 0.1]
        assert not out[:, 6:].any()
        chosen = [int((w == row).all(1).nonzero()) for row in weight[:6]]
        assert len(set(chosen)) == 6
        assert torch.equal(bias[:6], b[chosen])
        assert torch.equal(out[:, :6], v[:, chosen])
        uses = (
            rule.layers[0].uses[client]
            if client < len(rule.layers[0].uses)
            else torch.zeros(len(w))
        )
        if (uses > 0).sum() >= 6:
            assert (uses[chosen] > 0).all()


def test_popular_neurons_are_drawn_more_often():
    """Two of three without replacement: 1 - P(not drawn)."""
    layer, random = LayerPosterior(torch.device("cpu")), torch.Generator().manual_seed(0)
    layer.uses = torch.tensor([[1.0, 6.0, 0.0, 3.0]], dtype=torch.float64)
    drawn = torch.zeros(4)
    for _ in range(2000):
        drawn[layer.drawn(0, 2, random)] += 1
    p = torch.tensor([1.0, 6.0, 0.0, 3.0]) / 10
    expected = [p[i] * (1 + sum(p[j] / (1 - p[j]) for j in range(4) if j != i)) for i in range(4)]
    torch.testing.assert_close(drawn / 2000, torch.stack(expected), rtol=0, atol=0.05)


def test_noise_and_narrow_clients(fit, data):
    rule = StreamingPFNM(**MATCHED, noise=0.05, widths=[8, 3], seed=1)
    fit(module(), federation(rule), data(), rounds=2)
    rule.load_client_network()
    starts = rule.models_for(torch.arange(2))
    narrow = starts[1, :48].view(8, 6)
    assert not narrow[3:].any()
    rule.noise, rule.known[:] = 0.0, False
    still = rule.models_for(torch.arange(2))
    moved = (starts - still)[0]
    assert 0.02 < float(moved.std()) < 0.1
    assert not (starts - still)[1, :48].view(8, 6)[3:].any()


def test_the_search_is_made_once(fit, data):
    rule = StreamingPFNM(prior_variance=5.0)
    loop = fit(module(), FederatedLoop(aggregator=rule), data(stream_steps=3))
    first = loop.rows[0]
    assert "train_accuracy" in first
    for row in loop.rows[1:]:
        assert "train_accuracy" not in row
        for name in ("gamma", "client_variance", "prior_variance"):
            assert row[name] == first[name]


def test_networks_that_go_on_alone(fit, data):
    class Own(PFNM):
        def _next(self, ids, nets, merged):
            super()._next(ids, nets, merged)
            self.ends = nets

    rule = Own(**MATCHED, restart="own")
    fit(module(), FederatedLoop(aggregator=rule), data(stream_steps=3))
    for client, net in enumerate(rule.ends):
        assert torch.equal(rule.module_chain.pack(net), rule.starts[client])
