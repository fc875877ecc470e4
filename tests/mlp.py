"""A multilayer perceptron, for tests of rules that match its neurons."""

from itertools import pairwise

import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule

#: Options of the rules that match neurons.
MATCHED = {"gamma": 1.0, "client_variance": 0.5, "prior_variance": 5.0}


def net(*sizes, activation=nn.ReLU):
    layers = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), activation()]
    return nn.Sequential(*layers[:-1])


def module(sizes=(6, 8, 3), activation=nn.ReLU, seed=0):
    torch.manual_seed(seed)
    made = net(*sizes, activation=activation)
    return ClientModule(made, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()


def federation(rule, num_steps=5, **options):
    """Return a loop whose clients make so many steps in a round."""
    return FederatedLoop(rule, Schedule(num_steps=num_steps), **options)
