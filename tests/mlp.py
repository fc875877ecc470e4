"""A multilayer perceptron, for tests of rules that match its neurons."""

from itertools import pairwise

import torch
from torch import nn

from lightning_fl import ClientModule

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
