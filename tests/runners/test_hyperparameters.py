"""Numbers of a policy in local steps: each client's own, in every way of training."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedNova
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.objectives import EntropyRegularizer, Proximal, WeightDivergence
from lightning_fl.objectives.terms import settable
from lightning_fl.policies import (
    DiscreteGaussianReinforce,
    HyperparameterPolicy,
    PersonalizedPolicyGradient,
    Schedule,
    StagedPolicy,
    Stragglers,
)
from lightning_fl.types import FederationError
from two_classes import samples


def module(*terms):
    torch.manual_seed(0)
    terms = terms or (Proximal(0.7),)
    return ClientModule(
        torch.nn.Linear(4, 2), terms, optimizer=lambda p: torch.optim.SGD(p, lr=0.2)
    ).double()


def vector(made):
    return torch.cat([p.detach().flatten() for p in made.parameters()])


class Each(HyperparameterPolicy):
    """A number for each client and round, some of them 0."""

    def __init__(self, name="mu", scale=1.0):
        super().__init__()
        self.name, self.scale = name, scale

    def sample(self, round, clients):
        mu = self.scale * ((clients + round) % 4).double()
        return {"num_steps": 2 + clients % 3, "lr": 0.1 + 0.02 * clients, self.name: mu}


class Foreign(LightningModule):
    """Reads its number from the attribute, and knows nothing else of the library."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2).double()
        self.federated_hyperparameters = {"decay": 0.0}

    def training_step(self, batch, batch_idx):
        x, y = batch
        square = sum(p.square().sum() for p in self.net.parameters())
        return F.cross_entropy(self.net(x), y) + self.federated_hyperparameters["decay"] * square

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def foreign():
    torch.manual_seed(0)
    return Foreign()


@pytest.fixture
def train(fit):
    def train(made, policy, wrap=lambda m: m, rounds=3, **options):
        loop = FederatedLoop(policy=policy, seed=1, clients_per_round=4)
        fit(wrap(made), loop, samples(), rounds=rounds, **options)
        return vector(made), loop

    return train


def plainly(plans, clients_batches, numbers, data):
    """FedAvg with a proximal term, written plainly; ``numbers`` is each client's mu per round."""
    net = module().net
    x = vector(net)
    for plan, batches, given in zip(plans, clients_batches, numbers, strict=True):
        moves, sizes = [], []
        for row, k in enumerate(plan.clients.tolist()):
            y = x.clone()
            for inputs, labels in batches[k]:
                torch.nn.utils.vector_to_parameters(y, net.parameters())
                loss = F.cross_entropy(net(inputs), labels)
                grads = torch.autograd.grad(loss, list(net.parameters()))
                gradient = torch.cat([g.flatten() for g in grads]) + given[k] * (y - x)
                y = y - float(plan.lr[row]) * gradient
            moves.append(y - x)
            sizes.append(len(data.parts[k]))
        weights = torch.tensor(sizes, dtype=torch.float64)
        x = x + weights @ torch.stack(moves) / weights.sum()
    return x


class Noted(FederatedLoop):
    """Notes the plans, and the batches that each client trains on."""

    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)
        vars(self).setdefault("plans", []).append(self.plan())
        vars(self).setdefault("batches", []).append({})

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        (row,) = self.plan().schedule[batch_idx].rows
        self.batches[-1].setdefault(int(self.plan().clients[row]), []).append(batch)


def test_each_client_trains_with_its_own_number(fit):
    made, data = module(), samples()
    loop = fit(made, Noted(policy=Each(), seed=1, clients_per_round=4), data)
    numbers = [{k: float((k + t) % 4) for k in range(5)} for t in range(3)]
    expected = plainly(loop.plans, loop.batches, numbers, data)
    torch.testing.assert_close(vector(made), expected, rtol=0, atol=1e-12)
    rounds = zip(loop.plans, numbers, strict=True)
    means = [sum(given[int(k)] for k in plan.clients) / 4 for plan, given in rounds]
    assert [row["mu"] for row in loop.rows] == means
    assert made.federated_hyperparameters == {"mu": None}
    assert made.terms[0].mu == 0.7


@pytest.mark.parametrize("make", [module, foreign])
@pytest.mark.parametrize("compiled", [False, True])
def test_vectorized_clients_give_the_same(train, monkeypatch, make, compiled):
    if compiled:  # without the compiler behind it
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
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
    graphs, _ = train(
        module(), Each(), lambda m: VectorizedClients(m, 2, compile=True, steps_per_batch=2)
    )
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


GRID = {"lr": [0.1], "num_steps": [3], "mu": [0.0, 1.0, 4.0]}
POLICIES = {
    "reinforce": lambda: DiscreteGaussianReinforce(GRID, policy_lr=1.0),
    "personalized": lambda: PersonalizedPolicyGradient([{"mu": 0.0}, {"mu": 4.0}], step=1.0),
    "stragglers": lambda: Stragglers(0.5, Schedule(0.1, 3, values={"mu": 1.0})),
    "staged": lambda: StagedPolicy([1], [Schedule(0.1, 2), Each()]),
}


@pytest.mark.parametrize(
    ("name", "group_size"),
    [("reinforce", 2), ("personalized", None), ("stragglers", None), ("staged", 2)],
)
def test_a_run_resumes_bit_for_bit(train, tmp_path, name, group_size):
    def run(rounds, **options):
        keep = RoundCheckpoint(str(tmp_path))
        made = module()
        wrap = (
            (lambda m: m)
            if group_size is None
            else lambda m: VectorizedClients(m, group_size, compile=False)
        )
        found, loop = train(
            made, POLICIES[name](), wrap, rounds, callbacks=[keep],
            enable_checkpointing=True, num_sanity_val_steps=None, **options,
        )  # fmt: skip
        return found, loop.rows

    whole = run(4)
    (tmp_path / "last.ckpt").unlink()
    run(2)
    again = run(4, ckpt_path=str(tmp_path / "last.ckpt"))
    assert torch.equal(whole[0], again[0])
    assert whole[1] == again[1]
    assert len({row.get("mu") for row in whole[1]}) > (name != "stragglers")


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda: Each(scale=-1.0), r"mu of Each in round 1 must be .* at least 0, got -"),
        (lambda: Each(scale=torch.inf), "mu of Each in round 1 must be"),
        (lambda: Schedule(values={"mu": -0.5}), r"mu of Schedule\(values=...\) must be .* -0.5"),
        (lambda: Schedule(values={"nu": 0.5}), r"sets nu, and ClientModule declares \['mu'\]"),
        (
            lambda: DiscreteGaussianReinforce({"mu": [-0.1, 0.5]}),
            r"mu of DiscreteGaussianReinforce\(grid=...\) must be .* at least 0, got -0.1",
        ),
        (
            lambda: PersonalizedPolicyGradient([{"mu": 0.5}, {"mu": -2.0}]),
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
