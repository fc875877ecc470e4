"""Federations by hand: batches of a real fit, a network without torch.nn, plain autograd."""

import copy
import functools

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.partition import Dirichlet, Shards
from lightning_fl.policies import Schedule

LR = 0.3


def network(batchnorm):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5) if batchnorm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 5), norm, nn.Tanh(), nn.Linear(5, 3))


def sgd(**options):
    return functools.partial(torch.optim.SGD, lr=LR, **options)


def module(*terms, batchnorm=True, optimizer=None, **options):
    return ClientModule(network(batchnorm), terms, optimizer or sgd(**options)).double()


def skewed():
    """Three clients with one class each, which a batch of unequal size ends."""
    random = torch.Generator().manual_seed(0)
    y = torch.arange(36) % 3
    train = TensorDataset(torch.randn(36, 6, generator=random, dtype=torch.float64), y)
    return FederatedDataModule(
        train, train, num_clients=3, partition=Shards(1), batch_size=5, seed=0
    )


class Batches(L.Callback):
    """What each client trained on: for each round, a dictionary of client ids to batches."""

    def __init__(self):
        self.rounds = []

    def on_train_epoch_start(self, trainer, module):
        self.plan, self.count = trainer.datamodule.plan(), 0
        self.rounds.append({})

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        row = self.plan.schedule[self.count].rows[0]
        self.count += 1
        self.rounds[-1].setdefault(int(self.plan.clients[row]), []).append(batch)


def federation(
    fit, data, blobs, module, group_size=None, rounds=3, callbacks=(), trainer=None, **options
):
    """Train a module; return the loop, the batches if they are seen, and the data."""
    given = {"policy": Schedule(num_steps=3), "seed": 0, "client_fraction": 0.7}
    given |= {"buffers": "average"}
    loop = FederatedLoop(**given | options)
    datamodule = data(
        blobs(130),
        batch_size=9,
        seed=0,
        partition=Dirichlet(1.0, min_size=18),
        drop_last=True,
        local_test_size=0.2,
    )
    seen = Batches()
    user, watchers = module, [seen]
    if group_size is not None:
        user, watchers = VectorizedClients(module, group_size, compile=False), []
    callbacks = [*watchers, *callbacks]
    fit(user, loop, datamodule, rounds=rounds, callbacks=callbacks, **trainer or {})
    return loop, seen.rounds, datamodule


def copied(tensors):
    return {name: t.clone() for name, t in tensors.items()}


def start(net):
    """Return trained parameters and floating-point buffers by name."""
    params = {name: p.detach().clone() for name, p in net.named_parameters()}
    buffers = {n: b.clone() for n, b in net.named_buffers() if b.is_floating_point()}
    return params, buffers


def forward(params, buffers, x, train=True):
    """Return the representation before the last layer and logits; update running statistics."""
    h = x @ params["0.weight"].T + params["0.bias"]
    if buffers:
        mean, variance = buffers["1.running_mean"], buffers["1.running_var"]
        if train:
            n = len(h)
            batch_mean = h.mean(0)
            batch_variance = (h - batch_mean).square().mean(0)
            mean.mul_(0.9).add_(0.1 * batch_mean.detach())
            variance.mul_(0.9).add_(0.1 * batch_variance.detach() * n / (n - 1))
            mean, variance = batch_mean, batch_variance
        h = (h - mean) / (variance + 1e-5).sqrt() * params["1.weight"] + params["1.bias"]
    z = h.tanh()
    return z, z @ params["3.weight"].T + params["3.bias"]


def cross_entropy(logits, y):
    return (logits.logsumexp(1) - logits[torch.arange(len(y)), y]).mean()


def gradient(loss, params):
    """Return the gradients of a function of parameters, by name."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def task_loss(params, buffers, batch):
    return cross_entropy(forward(params, buffers, batch[0])[1], batch[1])


def task_gradient(params, buffers, batch):
    return gradient(lambda p: task_loss(p, buffers, batch), params)


def moved(params, grads, lr=LR):
    return {n: p - lr * grads[n] for n, p in params.items()}


def descended(params, batch, steps, lr, factor=1.0):
    """Return the parameters of a linear layer after steps of gradient descent on one batch."""
    x, y = batch

    def loss(layer):
        return factor * cross_entropy(x @ layer["weight"].T + layer["bias"], y)

    for _ in range(steps):
        params = moved(params, gradient(loss, params), lr)
    return params


def simulate(net, rounds, num_samples, train):
    """Return the global parameters and buffers after FedAvg.

    Args:
        net: The initial network.
        rounds: Batches by client, for each round.
        num_samples: Number of samples of each client.
        train: Function of client, received parameters, received buffers and batches that returns
            the client's parameters and buffers.
    """
    params, buffers = start(net)
    for clients in rounds:
        ends, total = [], sum(int(num_samples[client]) for client in clients)
        for client, batches in clients.items():
            received = {n: b.clone() for n, b in buffers.items()}
            p, b = train(client, params, received, batches)
            ends.append((int(num_samples[client]) / total, {**p, **b}))
        mean = {n: sum(weight * end[n] for weight, end in ends) for n in {**params, **buffers}}
        params, buffers = {n: mean[n] for n in params}, {n: mean[n] for n in buffers}
    return params, buffers


def assert_equal(net, params, buffers, rtol=0, atol=1e-12):
    now = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, value in {**params, **buffers}.items():
        torch.testing.assert_close(now[name].detach(), value, rtol=rtol, atol=atol)


def local(loop, client, name="personal"):
    """Return the tensors of a client's LocalNetwork of the first term, by name in the network."""
    found = {}
    for key, row in loop.store.get(client).items():
        _, _, rest = key.partition(f"terms.0.{name}.net/")
        if rest:
            found[rest.replace("/", ".")] = row
    return found


class Both:
    """A module that clients train one after another and two at a time, beside the same by hand.

    Args:
        run: The fixture, which is :func:`federation`.
        make: Function that returns a module of :func:`network`.
        callbacks: Callbacks of the first fit.
        options: Options of both fits.
    """

    def __init__(self, run, make, callbacks=(), **options):
        self.user, self.other = make(), make()
        self.first = copy.deepcopy(self.user.net)
        self.loop, self.rounds, self.data = run(self.user, callbacks=callbacks, **options)
        self.vectorized, _, _ = run(self.other, 2, **options)

    def assert_trained_as(self, train, **tolerances):
        """Compare with a function, as for :func:`simulate`; return its parameters and buffers."""
        params, buffers = simulate(self.first, self.rounds, self.data.num_samples, train)
        for module in (self.user, self.other):
            assert_equal(module.net, params, buffers, **tolerances)
        return params, buffers

    def assert_kept(self, client, expected, name="personal"):
        """Compare the tensors of a client's LocalNetwork after both fits."""
        for loop in (self.loop, self.vectorized):
            found = local(loop, client, name)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12)

    def accuracy(self, client, params, buffers):
        """Return the accuracy of a network on the test samples of a client."""
        x, y = self.data.train.fetch(self.data.local_tests[client])
        return (forward(params, buffers, x, train=False)[1].argmax(1) == y).double().mean()
