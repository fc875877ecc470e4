"""Numbers of a policy in local steps: each client's own, in every way of training."""

import pytest
import torch

import written_plainly
from lightning_fl import VectorizedClients, policies
from lightning_fl.aggregators import FedNova
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.objectives import EntropyRegularizer, Proximal, WeightDivergence
from lightning_fl.objectives.terms import settable
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.types import FederationError
from linear import Linear
from two_classes import samples
from written_plainly import Noted, loss_and_gradient, vector


def module(*terms):
    return written_plainly.module(terms or (Proximal(0.7),))


class Each(HyperparameterPolicy):
    """A number for each client and round, some of them 0."""

    def __init__(self, name="mu", scale=1.0):
        super().__init__()
        self.name, self.scale = name, scale

    def sample(self, round, clients):
        mu = self.scale * ((clients + round) % 4).double()
        return {"num_steps": 2 + clients % 3, "lr": 0.1 + 0.02 * clients.double(), self.name: mu}


class Foreign(Linear):
    """Reads its number from the attribute, and knows nothing else of the library."""

    federated_hyperparameters = {"decay": 0.0}  # noqa: RUF012  # a module declares it so

    def training_step(self, batch, batch_idx):
        square = sum(p.square().sum() for p in self.net.parameters())
        loss = super().training_step(batch, batch_idx)
        return loss + self.federated_hyperparameters["decay"] * square


def foreign():
    torch.manual_seed(0)
    return Foreign(torch.nn.Linear(4, 2)).double()


@pytest.fixture
def train(fit):
    def train(made, policy, wrap=lambda m: m, rounds=3, **options):
        loop = FederatedLoop(policy=policy, seed=1, clients_per_round=4)
        fit(wrap(made), loop, samples(), rounds=rounds, **options)
        return vector(made), loop

    return train


def test_each_client_trains_with_its_own_number(fit):
    made, data, means = module(), samples(), []
    loop = fit(made, Noted(policy=Each(), seed=1, clients_per_round=4), data)
    server = vector(module())
    for round, clients_batches in enumerate(loop.batches):
        numbers = {k: (k + round) % 4 for k in clients_batches}
        means.append(sum(numbers.values()) / 4)
        total, moved = sum(len(data.parts[k]) for k in numbers), torch.zeros_like(server)
        for k, batches in clients_batches.items():
            client = server.clone()
            for batch in batches:
                gradient = loss_and_gradient(client, *batch)[1]
                client -= (0.1 + 0.02 * k) * (gradient + numbers[k] * (client - server))
            moved += (client - server) * len(data.parts[k]) / total
        server = server + moved
    torch.testing.assert_close(vector(made), server, rtol=0, atol=1e-12)
    assert [row["mu"] for row in loop.rows] == means
    assert made.federated_hyperparameters == {"mu": None}
    assert made.terms[0].mu == 0.7


@pytest.mark.parametrize("make", [module, foreign])
@pytest.mark.parametrize("compiled", [False, True])
def test_vectorized_clients_give_the_same(train, uncompiled, make, compiled):
    policy = Each("mu" if make is module else "decay", 0.1)
    one, _ = train(make(), policy)
    other, _ = train(make(), policy, lambda m: VectorizedClients(m, 3, compile=compiled))
    torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    without, _ = train(make(), Each(policy.name, 0.0))
    assert (one - without).abs().max() > 1e-3


@pytest.mark.slow
def test_a_compiled_graph_takes_the_number_as_an_input(train):
    """A constant in the graph would be that of the first round."""
    plain, _ = train(module(), Each())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs, _ = train(module(), Each(), lambda m: VectorizedClients(m, 2, compile=True))
    torch.testing.assert_close(graphs, plain, rtol=0, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_the_constant_is_used_bit_for_bit_without_a_number(train):
    policy = Schedule(lr=0.1, num_steps=3)
    constant, _ = train(module(), policy)
    replaced, loop = train(module(Proximal(5.0)), Schedule(0.1, 3, values={"mu": 0.7}))
    assert torch.equal(constant, replaced)
    assert [row["mu"] for row in loop.rows] == [0.7] * 3


def test_terms_are_named_apart():
    terms = [Proximal(0.1), EntropyRegularizer(), WeightDivergence(), Proximal(0.2)]
    assert list(settable(terms)) == [
        "terms.0.mu",
        "EntropyRegularizer.coefficient",
        "WeightDivergence.coefficient",
        "terms.3.mu",
    ]


def test_every_term_may_have_its_own_number(train):
    """Two terms, one of which the policy changes: the divergence of mu / 2 is that of mu."""
    both = (Proximal(0.3), WeightDivergence(0.1))
    values = {"mu": 0.0, "coefficient": 0.35}
    changed, _ = train(module(*both), Schedule(0.1, 3, values=values))
    plain, _ = train(module(Proximal(0.7)), Schedule(0.1, 3))
    torch.testing.assert_close(changed, plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda: Each(scale=-1.0), r"mu of Each in round 1 must be .* at least 0, got -"),
        (lambda: Each(scale=torch.inf), "mu of Each in round 1 must be"),
        (lambda: Schedule(values={"mu": -0.5}), r"mu of Schedule\(values=...\) must be .* -0.5"),
        (lambda: Schedule(values={"nu": 0.5}), r"sets nu, and ClientModule declares \['mu'\]"),
        (
            lambda: policies.DiscreteGaussianReinforce({"mu": [-0.1, 0.5]}),
            r"mu of DiscreteGaussianReinforce\(grid=...\) must be .* at least 0, got -0.1",
        ),
        (
            lambda: policies.PersonalizedPolicyGradient([{"mu": 0.5}, {"mu": -2.0}]),
            r"mu of PersonalizedPolicyGradient\(candidates=...\) must be .*, got -2.0",
        ),
    ],
)
def test_values_out_of_range_are_refused(train, policy, match):
    with pytest.raises(FederationError, match=match):
        train(module(), policy())


def test_unknown_names_are_told_with_those_that_are_known(train):
    with pytest.warns(UserWarning, match=r"sets kappa, .* 'lr_factor', 'mu', 'num_steps'"):
        train(module(), Each("kappa"), rounds=1)


def test_names_of_the_loop_and_properties_cannot_be_declared(train):
    made = foreign()
    made.federated_hyperparameters = {"lr": 0.1}
    with pytest.raises(FederationError, match="'lr', which the loop uses itself"):
        train(made, Schedule())
    made.federated_hyperparameters = ["decay"]
    with pytest.raises(FederationError, match="a dictionary of numbers by name, got"):
        train(made, Schedule())


def test_fednova_refuses_a_strength_that_it_does_not_know(fit):
    loop = FederatedLoop(FedNova(), Schedule(0.1, 3, values={"mu": 0.5}), seed=1)
    with pytest.raises(FederationError, match="the policy sets mu: leave it out"):
        fit(module(), loop, samples())
