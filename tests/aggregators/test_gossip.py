"""Gossip: whole rounds against matrices, graphs, and what is refused."""

import pytest
import torch

from lightning_fl.aggregators import Gossip
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.functional.mixing import adjacency, metropolis
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.types import FederationError
from rounds import of, sent

PATH = [[0.7, 0.3, 0.0], [0.3, 0.4, 0.3], [0.0, 0.3, 0.7]]


def test_rounds_are_matrix_products_also_with_a_part_of_the_clients():
    rule = of(3, Gossip(mixing_matrix=PATH))
    w = torch.tensor(PATH, dtype=torch.float64)
    x, server = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    for ids in ([0, 1, 2], [1], [2, 0]):
        delta = torch.randn(len(ids), 4, generator=random, dtype=torch.float64)
        rule.start(server)
        torch.testing.assert_close(rule.models_for(torch.tensor(ids)), x[ids], atol=1e-15, rtol=0)
        rule.update(sent(delta, ids=ids))
        server = rule.compute()
        step = torch.zeros_like(x)
        step[ids] = delta
        x = w @ (x + step)
        torch.testing.assert_close(rule.models, x, atol=1e-14, rtol=0)
        torch.testing.assert_close(server, x.mean(0), atol=1e-14, rtol=0)
    expected = ((x - x.mean(0)) ** 2).sum(1).mean().sqrt()
    assert rule.metrics()["consensus_distance"] == pytest.approx(expected.item())


@pytest.mark.parametrize("graph", ["ring", "grid", "erdos_renyi", "complete"])
def test_a_graph_has_metropolis_weights(graph):
    """With which models keep their mean and meet: see the tests of the function."""
    rule, random = of(6, Gossip(graph, seed=0)), generator(0, RandomStream.GRAPH)
    rule.start(torch.zeros(3))
    assert torch.equal(rule.weights, metropolis(adjacency(graph, 6, 0.5, random)))


def test_a_matrix_that_does_not_fit_is_refused(fit, foreign):
    with pytest.raises(FederationError, match="mixing_matrix must be rows of numbers"):
        Gossip(mixing_matrix=[[1.0, 2.0], [3.0]])
    with pytest.raises(FederationError, match="oscillates between two groups"):
        Gossip(mixing_matrix=[[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(FederationError, match="has 3 clients, the federation has 4"):
        fit(foreign(), FederatedLoop(aggregator=Gossip(mixing_matrix=PATH), buffers="average"))


def test_a_graph_is_that_which_is_given_now():
    before, after = of(6, Gossip("ring")), of(6, Gossip("complete"))
    for rule in (before, after):
        rule.start(torch.zeros(2))
    after.load_state_dict(before.state_dict())
    assert (after.weights > 0).all()


def test_a_resumed_run_has_the_graph_of_its_checkpoint(fit, foreign, data, tmp_path, monkeypatch):
    """Also where nobody calls seed_everything again."""

    def run(rounds, **options):
        rule = Gossip("erdos_renyi", probability=0.4)
        callbacks = [RoundCheckpoint(tmp_path)]
        loop = FederatedLoop(rule, buffers="average")
        options |= {"callbacks": callbacks, "enable_checkpointing": True}
        fit(
            foreign(optimizer="sgd", batchnorm=False),
            loop,
            data(num_clients=7, seed=0),
            rounds=rounds,
            **options,
        )
        return rule.weights

    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    before = run(1)
    monkeypatch.delenv("PL_GLOBAL_SEED")
    assert torch.equal(run(2, ckpt_path=tmp_path / "last.ckpt"), before)
