"""FedEM: E steps by brute force, whole rounds, its limit case, and what it refuses."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from by_hand import Batches
from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.callbacks.client_scores import ClientScores
from lightning_fl.functional.mixture import log_responsibilities, mixture_log_probabilities
from lightning_fl.objectives import FedEM
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from written import Written

sgd = functools.partial(torch.optim.SGD, lr=0.3)


def stacked(nets):
    """Weights and biases of linear networks, ``[M, 21]``."""
    return torch.stack([torch.cat([n.weight.flatten(), n.bias]).detach() for n in nets])


def responsibilities(losses, log_weights):
    return log_responsibilities(losses, log_weights).exp()


def test_responsibilities_by_hand():
    losses = torch.tensor([[0.2, 1.0, 3.0], [5.0, 0.1, 0.1]], dtype=torch.float64)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    mass = [
        [w * math.exp(-x) for w, x in zip(weights.tolist(), row, strict=True)] for row in losses
    ]
    expected = torch.tensor([[m / sum(row) for m in row] for row in mass], dtype=torch.float64)
    found = responsibilities(losses, weights.log())
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)
    assert responsibilities(losses + 1e4, weights.log()).isfinite().all()


def test_a_mixture_predicts_the_mean_of_probabilities():
    logits = torch.randn(3, 4, 5, dtype=torch.float64)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    expected = (logits.softmax(-1) * weights[:, None, None]).sum(0)
    found = mixture_log_probabilities(logits, weights.log()).exp()
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)


@pytest.fixture
def federation(fit, blobs, data):
    def train(rounds=2, module=None, batch_size=7, policy=None, **options):
        torch.manual_seed(0)
        made = module or FedEM(nn.Linear(6, 3), 2, sgd).double()
        samples = data(blobs(100), batch_size=batch_size, partition=Dirichlet(0.5, 5), seed=1)
        loop = FederatedLoop(policy=policy or Schedule(), seed=2, client_fraction=0.75)
        fit(made, loop, samples, rounds=rounds, **options)
        return made, loop, samples

    return train


def test_rounds_are_the_algorithm(federation):
    """Everyone's samples in one batch, two local steps: M steps with fixed responsibilities."""
    seen, policy = Batches(), Schedule(num_steps=2)
    module, loop, _ = federation(3, policy=policy, batch_size=None, callbacks=[seen])
    start = FedEM(nn.Linear(6, 3), 2, sgd, seed=0).double()
    theta, pi = stacked(start.net), {}

    def losses(theta, x, y):
        logits = [x @ t[:18].view(3, 6).T + t[18:] for t in theta]
        return torch.stack([F.cross_entropy(each, y, reduction="none") for each in logits], 1)

    for clients in seen.rounds:
        moved, counts = [], []
        for client, ((x, y), _) in clients.items():
            weights = pi.get(client, torch.full((2,), 0.5, dtype=torch.float64))
            mass = weights * torch.exp(-losses(theta, x, y))
            q = mass / mass.sum(1, keepdim=True)
            own = theta.clone().requires_grad_()
            for _ in range(2):
                loss = (q * losses(own, x, y)).sum(1).mean()
                own = (own - 0.3 * torch.autograd.grad(loss, own)[0]).detach().requires_grad_()
            pi[client] = q.mean(0)
            moved.append(own.detach())
            counts.append(len(x))
        p = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        theta = sum(w * each for w, each in zip(p, moved, strict=True))
    torch.testing.assert_close(stacked(module.net), theta, atol=1e-12, rtol=0)
    for client, weights in pi.items():
        kept = loop.store.get(client)
        mean = kept["parameter.log_expected"].exp() / kept["parameter.seen"]
        torch.testing.assert_close(mean, weights, atol=1e-12, rtol=0)


def test_batches_of_a_pass_are_the_whole_e_step(federation):
    """The weights after one pass are the mean over all samples, by the components as they came."""
    _, loop, data = federation(1)
    start = FedEM(nn.Linear(6, 3), 2, sgd, seed=0).double()
    params = {n: p.detach() for n, p in start.net.named_parameters(prefix="net")}
    assert len(loop.store.rows) == 3
    for client, kept in loop.store.rows.items():
        x, y = data.train.fetch(data.parts[client])
        q = responsibilities(start._sample_losses(x, y, params), torch.full((2,), 0.5).log())
        assert kept["parameter.seen"] == len(x)
        found = kept["parameter.log_expected"].exp() / len(x)
        torch.testing.assert_close(found, q.mean(0), atol=1e-12, rtol=0)


def test_one_component_is_fedavg(federation, flat):
    module, _, _ = federation(module=FedEM(nn.Linear(6, 3), 1, sgd, seed=0).double())
    plain = ClientModule(nn.Linear(6, 3), optimizer=sgd).double()
    plain.net.load_state_dict(FedEM(nn.Linear(6, 3), 1, seed=0).double().net[0].state_dict())
    federation(module=plain)
    torch.testing.assert_close(flat(module.net), flat(plain.net), atol=1e-12, rtol=0)


def test_a_component_that_fits_badly_keeps_what_the_equation_gives_it():
    """Two batches in float32 with losses of 0 and 200: the weight is e^-200, neither 0 nor 1e-6."""
    module = FedEM(nn.Linear(1, 2), 2, sgd)
    with torch.no_grad():
        for net, scale in zip(module.net, (100.0, -100.0), strict=True):
            net.weight.copy_(torch.tensor([[-scale], [scale]]))
            net.bias.zero_()
    x, y = torch.ones(3, 1), torch.ones(3, dtype=torch.int64)
    for _ in range(2):
        module.training_step((x, y), 0)
    module.on_client_start()
    torch.testing.assert_close(module.log_weights.detach(), torch.tensor([0.0, -200.0]))
    module.training_step((x, 1 - y), 0)  # the other one fits: it comes back
    module.on_client_start()
    # Prior odds of e^-200 and a likelihood ratio of e^200: even.
    torch.testing.assert_close(module.weights, torch.tensor([0.5, 0.5]), atol=1e-4, rtol=0)


def test_components_differ_and_belong_to_the_seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    one, other = (FedEM(nn.Linear(6, 3), 2, seed=seed) for seed in (3, None))
    assert torch.equal(one.net[0].weight, other.net[0].weight)
    assert not torch.equal(one.net[0].weight, one.net[1].weight)
    assert torch.equal(one.net[1].weight, FedEM(nn.Linear(6, 3), 1, seed=4).net[0].weight)


def test_networks_with_buffers_are_refused():
    with pytest.raises(FederationError, match="has buffers"):
        FedEM(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_components_that_cannot_be_drawn_are_refused():
    weight = nn.Parameter(torch.randn(6, 3))
    with pytest.raises(FederationError, match="all components have equal parameters"):
        FedEM(Written(lambda net, x: x @ net.weight, weight=weight))
    layer = nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), nn.Linear(4, 3))
    one, other, _ = FedEM(layer).net
    assert not torch.equal(one[0].self_attn.in_proj_weight, other[0].self_attn.in_proj_weight)


def test_adapting_begins_from_equal_weights():
    torch.manual_seed(0)
    module = FedEM(nn.Linear(4, 3))
    batches = [(torch.randn(20, 4), torch.randint(3, (20,))) for _ in range(2)]
    alone = module.adapt(batches[1])
    module.adapt(batches[0])
    assert torch.equal(module.adapt(batches[1]), alone)


def test_who_took_no_part_gets_weights_of_its_own_before_it_is_scored(
    fit, data, blobs, monkeypatch
):
    samples = data(blobs(160), partition=Dirichlet(0.3, 10), local_test_size=0.3, seed=1)
    module = FedEM(nn.Linear(6, 3), optimizer=sgd).double()
    callback = PersonalizedEvaluation(steps=2)
    seen = []
    score = ClientScores._score

    def noted(self, client):
        seen.append((client, self._module.weights.detach().clone()))
        return score(self, client)

    monkeypatch.setattr(ClientScores, "_score", noted)
    loop = FederatedLoop(policy=Schedule(num_steps=3), seed=0, clients_per_round=1)
    fit(module, loop, samples, rounds=1, callbacks=[callback])
    for client in range(4):
        *_, server, personal = (weights for c, weights in seen if c == client)
        assert not torch.allclose(server, torch.full_like(server, 1 / 3))
        assert not torch.equal(server, personal)
    absent = next(c for c in range(4) if not loop.store.get(c))
    x, y = samples.train.fetch(samples.parts[absent])
    found = copy.deepcopy(module).adapt((x, y))
    torch.testing.assert_close(found, next(w for c, w in seen if c == absent))


def test_a_small_weight_is_not_rounded_to_zero():
    """By hand: q = 1e-50 / (1 + 1e-50) for the first sample, which float32 does not have."""
    losses = torch.tensor([[0.0, math.log(1e50)], [0.0, math.log(1e60)]])
    log_q = log_responsibilities(losses, torch.tensor([0.5, 0.5]).log())
    expected = torch.tensor([[0.0, -math.log(1e50)], [0.0, -math.log(1e60)]])
    torch.testing.assert_close(log_q, expected)
    assert responsibilities(losses, torch.tensor([0.5, 0.5]).log())[:, 1].tolist() == [0, 0]
