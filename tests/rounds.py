"""Rounds of a rule by itself, without a loop."""

import torch

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.types import ClientUpdate, Cohort


def sent(delta, samples=None, ids=None, **options):
    """Updates of clients: of the first ones, with a sample each, unless others are given."""
    delta = torch.as_tensor(delta)
    ids = torch.arange(len(delta)) if ids is None else torch.tensor(ids)
    samples = torch.ones(len(delta)) if samples is None else torch.as_tensor(samples)
    return ClientUpdate(ids, delta, samples, **options)


def of(clients, rule, sampled=None, drawn="fixed", **options):
    """Return a rule that is set up for so many clients."""
    rule.setup(Federation(clients, Cohort(sampled or clients, clients, drawn), **options))
    return rule


def with_buffers(parameters, buffers=1):
    """A vector of parameters, and of buffers after them."""
    shapes = {"w": torch.Size([parameters]), "mean": torch.Size([buffers])}
    return VectorLayout(shapes, num_parameters=parameters)


def aggregate(rule, server, *updates):
    """Return the model after a round."""
    rule.start(server)
    for update in updates:
        rule.update(update)
    return rule.compute()
