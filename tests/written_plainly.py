"""What tests of rules share that compare a fit with the algorithm, written plainly."""

import copy

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule

LR = 0.2


def linear():
    return nn.Linear(4, 2)


def hidden():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def module(terms=(), make=linear, **options):
    torch.manual_seed(0)
    return ClientModule(make(), terms, lambda p: torch.optim.SGD(p, lr=LR, **options)).double()


def vector(made):
    return torch.cat([p.detach().flatten() for p in made.parameters()])


class Noted(FederatedLoop):
    """Notes the batches that each client trains on, and the model after each round.

    Vectorized clients have batches of lists, which are noted for the first of a group.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.batches, self.models = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(trainer, pl_module)
        self.batches.append({})

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        client = int(self.plan().clients[self.plan().schedule[batch_idx].rows[0]])
        self.batches[-1].setdefault(client, []).append(batch)

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.models.append(vector(self.runner.module))


class Lost(Callback):
    """Loses the updates of some clients."""

    def __init__(self, *clients):
        self.clients = clients

    def on_client_updates(self, plan, clients, delta, dropped):
        dropped |= {c: "crashed" for c in clients.tolist() if c in self.clients}
        return delta


class Uneven(Schedule):
    """Steps and rates that differ from client to client."""

    def sample(self, round, clients):
        return {"num_steps": 1 + clients % 3, "lr": 0.1 + 0.02 * clients.double()}


def loss_and_gradient(point, x, y, net=None):
    """Cross-entropy of the linear model or of another network, and its gradient."""
    net = copy.deepcopy(module().net if net is None else net)
    nn.utils.vector_to_parameters(point, net.parameters())
    loss = nn.functional.cross_entropy(net(x), y)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    return loss.detach(), torch.cat([g.flatten() for g in grads])


def trained(start, batches, lr=LR, mu=0.0, decay=0.0, added=0.0, net=None, momentum=0.0):
    """The model of a client after its local steps, with terms that are added to the steps."""
    y, m = start.clone(), 0.0
    for batch in batches:
        _, gradient = loss_and_gradient(y, *batch, net)
        m = momentum * m + gradient + mu * (y - start) + decay * y
        y = y - lr * (m + added)
    return y


def close(found, expected, atol=1e-12):
    """Compare up to rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def samples_of(data, client):
    """All training samples of a client."""
    return tuple(t[data.parts[client]] for t in data.train.tensors)


def of_all_samples(point, data, client):
    """Loss of all training samples of a client, and its gradient."""
    return loss_and_gradient(point, *samples_of(data, client))
