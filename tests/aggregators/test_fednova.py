"""FedNova: the algorithm written plainly, also with a momentum that changes."""

import pytest
import torch

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedNova
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.objectives import Proximal
from lightning_fl.policies import Schedule
from two_classes import samples
from written_plainly import LR, close, module


class Uneven(Schedule):
    """Steps that differ from client to client."""

    def sample(self, round, clients):
        return {"num_steps": 1 + clients % 4}


class Noting(FedNova):
    """Notes what arrives, and the model after each round."""

    def __init__(self, **options):
        super().__init__(**options)
        self.rounds = []

    def start(self, server, trained=None):
        super().start(server, trained)
        self.begun = server.clone(), []

    def update(self, clients):
        self.begun[1].append(clients.select(torch.arange(len(clients.clients))))
        super().update(clients)

    def compute(self):
        model = super().compute()
        self.rounds.append((*self.begun, model))
        return model


def coefficients(steps, momentum=0.0, pull=0.0):
    """Sum of the weights of a client's gradients in its move, step by step."""
    way = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * way
        way += velocity
    return way


def plainly(server, updates, weighting, momentum, mu=0.0):
    """The equation of the paper, for one round."""
    rows = [u.select(torch.tensor([i])) for u in updates for i in range(len(u.clients))]
    n = [1 if weighting == "uniform" else int(u.num_samples) for u in rows]
    p = [each / sum(n) for each in n]
    tau = [1 + int(u.clients) % 4 for u in rows]
    a = [coefficients(t, momentum, mu * LR) for t in tau]
    effective = sum(pk * (t if mu else ak) for pk, t, ak in zip(p, tau, a, strict=True))
    move = sum(pk * u.delta[0] / ak for pk, u, ak in zip(p, rows, a, strict=True))
    return server + effective * move


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize(
    ("momentum", "mu", "group_size"),
    [(0.0, 0.0, None), (0.9, 0.0, 2), (0.0, 0.5, None), (0.9, 0.0, None)],
)
def test_rounds_are_the_equation(fit, weighting, momentum, mu, group_size):
    terms = [Proximal(mu)] if mu else []
    rule, made = Noting(weighting=weighting), module(terms, momentum=momentum)
    user = made if group_size is None else VectorizedClients(made, group_size, compile=False)
    fit(user, FederatedLoop(rule, Uneven(), seed=1, clients_per_round=4), samples(), rounds=3)
    assert len(rule.rounds) == 3
    for server, updates, model in rule.rounds:
        close(model, plainly(server, updates, weighting, momentum, mu))


def test_the_momentum_is_that_of_the_round(fit):
    """A scheduler may change it from round to round."""

    class Scheduled(ClientModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
            self.momenta = []
            return [optimizer], [cycle]

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            self.momenta.append(self.optimizers().param_groups[0]["momentum"])

    rule, made = Noting(), Scheduled(torch.nn.Linear(4, 2)).double()
    fit(made, FederatedLoop(rule, Uneven(), seed=1), samples())
    assert len(set(made.momenta)) > 1
    for (server, updates, model), momentum in zip(rule.rounds, made.momenta, strict=True):
        close(model, plainly(server, updates, "samples", momentum))
