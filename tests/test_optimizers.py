"""The optimizers of servers and clients, against their equations written plainly."""

import copy
import functools
import math

import pytest
import torch

from lightning_fl.aggregators import FedOpt
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.objectives import ParameterGroup
from lightning_fl.objectives.parameter_groups import split_groups
from lightning_fl.optimizers import Adaptive, Combined, PFedMe
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError


def plainly(rule, gradients, lr, beta1, beta2, tau):
    """Reddi et al. (2021), Algorithm 2, for one number."""
    x, m, v = 0.0, 0.0, tau**2
    for gradient in gradients:
        delta = -gradient
        m = beta1 * m + (1 - beta1) * delta
        if rule == "adagrad":
            v = v + delta**2
        elif rule == "adam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))
        x = x + lr * m / (math.sqrt(v) + tau)
    return x


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
@pytest.mark.parametrize("tau", [1e-3, 0.5])
def test_a_few_steps_are_the_equations(rule, tau):
    gradients = [[0.5, -2.0], [0.1, 1.0], [-3.0, 0.0], [0.2, 0.3]]
    x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Adaptive([x], rule, lr=0.3, betas=(0.8, 0.9), tau=tau)
    for gradient in gradients:
        x.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    expected = [plainly(rule, each, 0.3, 0.8, 0.9, tau) for each in zip(*gradients, strict=True)]
    assert x.tolist() == pytest.approx(expected, abs=1e-14)


def parts(w, v):
    return [torch.optim.SGD([w], lr=0.1, momentum=0.9), torch.optim.Adam([v], lr=0.2)]


def test_combined_steps_equal_separate_steps_and_its_state_is_restored():
    def made():
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2)]

    def closure_of(params, optimizers):
        def closure():
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (params[0] * params[1]).square().sum() + params[1].sum()
            loss.backward()
            return loss

        return closure

    params, expected = made(), made()
    separate = parts(*expected)
    for _ in range(4):
        closure_of(expected, separate)()
        for optimizer in separate:
            optimizer.step()
    combined = Combined(*parts(*params))
    for _ in range(2):
        combined.step(closure_of(params, [combined]))
    restored = Combined(*parts(*params))
    restored.load_state_dict(combined.state_dict())
    for _ in range(2):
        restored.step(closure_of(params, [restored]))
    assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))


def test_combined_is_copied_and_refuses_later_groups():
    own = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    combined = Combined(*parts(*own))
    copied = copy.deepcopy(combined)
    others = [p for group in copied.param_groups for p in group["params"]]
    for param in (*own, *others):
        param.grad = torch.ones(2)
    for optimizer in (combined, copied):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(others, own, strict=True))
    with pytest.raises(FederationError, match="cannot be added to Combined"):
        combined.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


def test_a_personal_model_and_an_optimizer_of_a_term_are_refused():
    w, v = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    group = ParameterGroup([v], optimizer=torch.optim.Adam)
    with pytest.raises(FederationError, match="PFedMe has a personal model"):
        split_groups(PFedMe([w, v]), [group])


def test_adaptive_minimizes_and_leaves_what_has_no_gradient():
    x, idle = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Adaptive([{"params": [x]}, {"params": [idle], "lr": 5.0}], "yogi", lr=0.05)

    def closure():
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(100)]
    assert losses[-1] < 0.05 * losses[0]
    assert idle.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("betas", "words"),
    [
        ((0.9, 1.0), r"betas must be a number in \[0, 1\), got 1.0"),
        ((0.9,), "betas must be two numbers, got"),
    ],
)
def test_betas_that_are_none_are_refused(betas, words):
    with pytest.raises(FederationError, match=words):
        Adaptive([torch.zeros(1)], "adam", betas=betas)


# --- pFedMe ---------------------------------------------------------------------------------------


def quadratic(w, a, b):
    """A closure for a / 2 (w - b)^2."""

    def closure():
        w.grad = a * (w.detach() - b)
        return (a / 2 * (w.detach() - b) ** 2).sum()

    return closure


@pytest.mark.parametrize("warm", [True, False])
def test_moreau_envelope_by_hand(warm):
    """Two local steps of three inner ones, written out."""
    w = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    options = {"lr": 0.3, "personal_lr": 0.1, "lam": 1.5, "inner_steps": 3, "warm": warm}
    optimizer, x, theta = PFedMe([w], **options), 2.0, None
    for a, b in ((1.0, 0.5), (2.0, -1.0)):
        optimizer.step(quadratic(w, a, b))
        theta = theta if warm and theta is not None else x
        for _ in range(3):
            theta -= 0.1 * (a * (theta - b) + 1.5 * (theta - x))
        x -= 0.3 * 1.5 * (x - theta)
        assert w.item() == pytest.approx(x, abs=1e-14)
        assert optimizer.state[w]["theta"].item() == pytest.approx(theta, abs=1e-14)


def test_many_inner_steps_find_the_proximal_point():
    """Of a / 2 (x - b)^2 at w it is (a b + lam w) / (a + lam)."""
    w = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = PFedMe([w], lr=1.0, personal_lr=0.2, lam=3.0, inner_steps=400)
    optimizer.step(quadratic(w, 2.0, -1.0))
    point = (2 * -1 + 3 * 2) / 5
    assert optimizer.state[w]["theta"].item() == pytest.approx(point, abs=1e-12)
    assert w.item() == pytest.approx(2 - 3 * (2 - point), abs=1e-12)


def test_a_round_of_pfedme_is_the_algorithm(fit, linear):
    """Two clients with their whole data as a batch, R = 2 local steps, beta = 0.5."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=random, dtype=torch.float64)
    y = torch.randn(20, generator=random, dtype=torch.float64)
    samples = torch.utils.data.TensorDataset(x, y)
    data = FederatedDataModule(samples, samples, num_clients=2, batch_size=None, seed=0)
    module = linear()
    options = {"lr": 0.1, "personal_lr": 0.05, "lam": 3.0, "inner_steps": 4}
    module.configure_optimizers = lambda: PFedMe(module.parameters(), **options)
    server = module.net.weight.detach()[0].clone()
    rule = FedOpt(functools.partial(torch.optim.SGD, lr=0.5))
    loop = FederatedLoop(aggregator=rule, policy=Schedule(num_steps=2), seed=0)
    fit(module, loop, data, rounds=2)
    for _ in range(2):
        locals_ = []
        for part in data.parts:
            w = server.clone()
            theta = w.clone()
            for _ in range(2):
                for _ in range(4):
                    gradient = 2 * x[part].T @ (x[part] @ theta - y[part]) / len(part)
                    theta = theta - 0.05 * (gradient + 3.0 * (theta - w))
                w = w - 0.1 * 3.0 * (w - theta)
            locals_.append(w)
        server = 0.5 * server + 0.5 * (locals_[0] + locals_[1]) / 2
    torch.testing.assert_close(module.net.weight[0], server, atol=1e-13, rtol=0)


def test_inner_steps_are_one_number():
    one, two = ({"params": [torch.zeros(1)], "inner_steps": count} for count in (1, 2))
    with pytest.raises(FederationError, match="inner_steps must be equal"):
        PFedMe([one, two])
