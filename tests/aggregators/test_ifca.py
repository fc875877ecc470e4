"""IFCA: the algorithm written plainly, on two groups of clients, its limits, and refusals."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import TensorDataset

from lightning_fl import ClientModule
from lightning_fl.aggregators import IFCA
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.objectives import Proximal
from lightning_fl.partition import Natural
from lightning_fl.policies import Schedule
from lightning_fl.transforms import TopK
from lightning_fl.types import ClientUpdate, FederationError
from written_plainly import Lost, Noted, close, module, of_all_samples, trained, vector


def groups():
    """Five clients of unequal sizes; odd ones have the labels of the others exchanged."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=random, dtype=torch.float64)
    client = torch.arange(60).sqrt().long() % 5
    train = TensorDataset(x, (x[:, 0] > 0).long() ^ (client % 2))
    options = {"num_clients": None, "partition": Natural(), "keys": client.tolist()}
    return FederatedDataModule(train, train, batch_size=4, seed=0, **options)


class Begun(Callback):
    """Notes the models with which the run begins."""

    def on_train_epoch_start(self, trainer, pl_module):
        if not hasattr(self, "models"):
            (loop,) = (c for c in trainer.callbacks if isinstance(c, FederatedLoop))
            self.models = loop.aggregator.models.clone()


def plainly(loop, data, starts, weighting, mu, lost):
    """Algorithm 1 with option II, on the batches of a run."""
    models, last = list(starts), {}
    for batches in loop.batches:
        ends = {}
        for client, steps in batches.items():
            losses = [float(of_all_samples(m, data, client)[0]) for m in models]
            j = losses.index(min(losses))
            y = trained(models[j], steps, mu=mu)
            if client not in lost:
                weight = len(data.parts[client]) if weighting == "samples" else 1
                ends.setdefault(j, []).append((weight, y))
                last[client] = j
        for j, members in ends.items():
            models[j] = sum(w * y for w, y in members) / sum(w for w, _ in members)
        yield models, sum(models[j] for j in last.values()) / len(last), dict(last)


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(
    ("weighting", "lost"), [("uniform", ()), ("samples", ()), ("uniform", (1,))]
)
def test_rounds_are_the_algorithm_with_partial_participation(fit, weighting, lost):
    rule, begun, data = IFCA(3, weighting), Begun(), groups()
    loop = Noted(rule, Schedule(num_steps=4), seed=1, clients_per_round=4)
    fit(module([Proximal(0.3)]), loop, data, rounds=4, callbacks=[begun, Lost(*lost)])
    expected = list(plainly(loop, data, begun.models, weighting, 0.3, lost))
    close(loop.models, [mean for _, mean, _ in expected])
    models, _, last = expected[-1]
    close(rule.models, torch.stack(models))
    assert rule.cluster_of.tolist() == [last.get(client, -1) for client in range(5)]
    assert rule.metrics() == {"clusters": len(set(last.values()))}
    assert len(set(last.values())) > 1
    assert any(a != last for _, _, a in expected)
    starts = torch.stack([models[max(last.get(client, 0), 0)] for client in range(5)])
    close(rule.models_for(torch.arange(5)), starts)


def test_initial_models_differ_by_seed_and_begin_with_that_of_the_module(fit):
    found = []
    for seed in (0, 0, 1):
        begun = Begun()
        loop = FederatedLoop(IFCA(3, seed=seed), seed=1)
        fit(module(), loop, groups(), rounds=1, callbacks=[begun])
        found.append(begun.models)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][0], vector(module()))
    assert not any(torch.equal(*pair) for pair in (found[0][:2], found[0][1:], found[2][:2]))
    assert not (found[0][1:] == found[2][1:]).any()


def test_networks_that_cannot_be_drawn_anew_are_refused(fit):
    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(FederationError, match="implement reset_parameters"):
        fit(ClientModule(Fixed()), FederatedLoop(IFCA(2), seed=1), groups(), rounds=1)


@pytest.mark.parametrize("cluster", [-1, 0.5, 2])
def test_a_cluster_that_is_none_is_refused(fit, cluster):
    rule = IFCA(2)
    fit(module(), FederatedLoop(rule, seed=1), groups(), rounds=1)
    sent = {"cluster": torch.tensor([cluster])}
    with pytest.raises(FederationError, match="of 2: use the same rule on both"):
        rule.update(ClientUpdate(torch.zeros(1), rule.server[None], torch.ones(1), extras=sent))


def test_update_transforms_are_refused(fit):
    """They would act on the way from the received to the chosen model, too."""
    loop = FederatedLoop(IFCA(2), seed=1, update_transforms=[TopK(0.5)])
    with pytest.raises(FederationError, match="IFCA lets clients start from another model"):
        fit(module(), loop, groups(), rounds=1)


def test_buffers_of_the_server_stay(fit):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    net[1].running_mean.fill_(5.0)
    begun = Begun()
    loop = FederatedLoop(IFCA(2), Schedule(num_steps=1), seed=1, buffers="server")
    fit(ClientModule(net).double(), loop, groups(), rounds=1, callbacks=[begun])
    for models in (begun.models, loop.aggregator.models):
        assert (models[:, 14:16] == 5).all()


def test_hooks_at_the_start_of_a_client_see_the_model_that_it_trains(fit):
    class Seeing(ClientModule):
        def on_client_start(self):
            self.seen = vector(self).clone()

        def training_step(self, batch, batch_idx):
            differences.append(float((vector(self) - self.seen).abs().max()))
            return super().training_step(batch, batch_idx)

    differences = []
    torch.manual_seed(0)
    user = Seeing(torch.nn.Linear(4, 2)).double()
    loop = FederatedLoop(IFCA(2), Schedule(num_steps=1), seed=1, check=False)
    fit(user, loop, groups(), rounds=2)
    assert len(loop.aggregator.cluster_of.unique()) == 2
    assert len(differences) == 10
    assert not any(differences)
