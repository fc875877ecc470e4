"""Gossip: whole rounds against matrices, the mean, consensus, federations and what is refused."""

import pytest
import torch

from lightning_fl.aggregators import FedAvg, Gossip
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.contracts.context import Federation
from lightning_fl.types import ClientUpdate, Cohort, FederationError

PATH = [[0.7, 0.3, 0.0], [0.3, 0.4, 0.3], [0.0, 0.3, 0.7]]


def of(count, rule):
    rule.setup(Federation(count, Cohort(count, count)))
    return rule


def test_rounds_are_matrix_products_also_with_a_part_of_the_clients():
    rule = of(3, Gossip(mixing_matrix=PATH))
    w = torch.tensor(PATH, dtype=torch.float64)
    x, server = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    for ids in ([0, 1, 2], [1], [2, 0]):
        delta = torch.randn(len(ids), 4, generator=random, dtype=torch.float64)
        rule.start(server)
        ids = torch.tensor(ids)
        torch.testing.assert_close(rule.models_for(ids), x[ids], atol=1e-15, rtol=0)
        rule.update(ClientUpdate(ids, delta, torch.ones(len(ids))))
        server = rule.compute()
        step = torch.zeros_like(x)
        step[ids] = delta
        x = w @ (x + step)
        torch.testing.assert_close(rule.models, x, atol=1e-14, rtol=0)
        torch.testing.assert_close(server, x.mean(0), atol=1e-14, rtol=0)
    expected = ((x - x.mean(0)) ** 2).sum(1).mean().sqrt()
    assert rule.metrics()["consensus_distance"] == pytest.approx(expected.item())


@pytest.mark.parametrize("graph", ["ring", "grid", "erdos_renyi", "complete"])
def test_the_mean_moves_as_the_mean_of_updates_and_models_meet(graph):
    rule, average = of(6, Gossip(graph, seed=0)), FedAvg("uniform")
    random, server = torch.Generator().manual_seed(0), torch.zeros(3, dtype=torch.float64)
    delta = torch.randn(6, 3, generator=random, dtype=torch.float64)
    update = ClientUpdate(torch.arange(6), delta, torch.arange(1, 7))
    for each in (rule, average):
        each.start(server)
        each.update(update)
    torch.testing.assert_close(rule.compute(), average.compute(), atol=1e-14, rtol=0)
    before = rule.metrics()["consensus_distance"]
    still = ClientUpdate(torch.arange(6), torch.zeros_like(delta), torch.ones(6))
    for _ in range(200):
        rule.start(server)
        rule.update(still)
        rule.compute()
    assert rule.metrics()["consensus_distance"] < 1e-6 * max(before, 1)


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
