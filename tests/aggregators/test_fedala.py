"""FedALA: the algorithm written plainly, its limits, and the models that are evaluated."""

from functools import partial

import pytest
import torch

import written_plainly
from lightning_fl.aggregators import FedALA, FedAvg, Staged
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import Cohort
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from rounds import with_buffers
from two_classes import samples
from written_plainly import Lost, Noted, close, loss_and_gradient, trained, vector

ETA = 5.0


module = partial(written_plainly.module, make=written_plainly.hidden)


def data():
    options = {"batch_size": 1000, "local_test_size": 0.3}
    return samples(5, partition=Dirichlet(0.5, min_size=6), **options)


def plainly(loop, data, first, eta, passes, lost):
    """Algorithm 1; a batch is the whole client, so that gradients need no stream of batches."""
    x, net = vector(module()), module().net
    own, weights, learned, models = {}, {}, set(), []
    for batches in loop.batches:
        ends = {}
        for client, steps in batches.items():
            t, w = x.clone(), weights.get(client, torch.ones(len(x) - first, dtype=x.dtype))
            if client in own:
                way = x[first:] - own[client][first:]
                t[first:] = own[client][first:] + way * w
                for _ in range(1 if client in learned else passes):
                    _, gradient = loss_and_gradient(t, *steps[0], net)
                    w = (w - eta * gradient[first:] * way).clamp(0, 1)
                    t[first:] = own[client][first:] + way * w
            y = trained(t, steps, net=net)
            if client not in lost:
                if client in own:
                    learned.add(client)
                own[client], weights[client], ends[client] = y, w, y
        sizes = {client: int(data.num_samples[client]) for client in ends}
        if ends:
            x = sum(sizes[c] * y for c, y in ends.items()) / sum(sizes.values())
        models.append(x)
    return models, own, weights


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(("tensors", "first"), [(2, 15), (3, 12), (0, 0), (9, 0)])
@pytest.mark.parametrize("lost", [(), (2,)])
def test_rounds_are_the_algorithm_with_partial_participation(fit, tensors, first, lost):
    rule, rows = FedALA(tensors, lr=ETA, first_passes=3), data()
    rule = Staged([9], [rule, FedAvg()]) if lost else rule
    loop = Noted(rule, Schedule(num_steps=3), seed=1, clients_per_round=3)
    scores = PersonalizedEvaluation(steps=0)
    made = module()
    fit(made, loop, rows, rounds=5, callbacks=[Lost(*lost), scores])
    models, own, weights = plainly(loop, rows, first, ETA, 3, lost)
    close(loop.models, models)
    assert any(0 < float(w.min()) < 1 for w in weights.values())
    for client in range(5):
        t = models[-1].clone()
        if client in own:
            v = own[client][first:]
            t[first:] = v + (t[first:] - v) * weights[client]
        torch.nn.utils.vector_to_parameters(t, made.net.parameters())
        x, y = rows.train.fetch(rows.local_tests[client])
        right = (made.net(x).argmax(1) == y).double().mean()
        assert scores.rows[client]["kept"] == float(right)


@pytest.mark.parametrize(("fraction", "calls"), [(1.0, 3), (0.8, 3), (0.5, 2), (0.1, 1)])
def test_a_pass_takes_a_share_of_the_batches(fit, monkeypatch, fraction, calls):
    """Three batches per epoch; five passes in the second round, and one in the third."""
    from lightning_fl.federation.measures import Measures

    counted, evaluated = [], Measures.batch_gradients

    def noted(*args):
        gradients = evaluated(*args)
        return lambda models: counted.append(args[-1]) or gradients(models)

    monkeypatch.setattr(Measures, "batch_gradients", noted)
    rule = FedALA(fraction=fraction, first_passes=5)
    fit(module(), FederatedLoop(rule, seed=1), samples(1), rounds=3)
    assert [counted.count(i) for i in range(3)] == [0, 5 * calls, calls]


def test_buffers_are_not_mixed():
    federation = Federation(2, Cohort(2, 2), layout=with_buffers(2))
    (part,) = FedALA().client_parts()
    memory = {name: row[None] for name, row in part.initial_memory(federation).items()}
    assert [memory[name].numel() for name in ("model", "weights", "rounds")] == [2, 2, 1]
    memory |= {"weights": torch.tensor([[0.25, 1.0]]), "rounds": torch.tensor([3])}
    found = part.personal_models(federation, torch.tensor([[4.0, 5.0, 6.0]]), memory)
    assert found.tolist() == [[1.0, 5.0, 6.0]]
