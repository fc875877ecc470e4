"""What a policy is told after a round."""

import torch

from lightning_fl.types import Feedback, RoundPlan


def feedback(round=0, before=None, after=None, losses=None, clients=None, **options):
    """Feedback of clients that make a step each; by default one for each loss, or two."""
    losses = None if losses is None else torch.as_tensor(losses, dtype=torch.float64)
    count = 2 if losses is None else len(losses)
    clients = torch.arange(count) if clients is None else torch.tensor(clients)
    plan = RoundPlan(0, round, clients, torch.ones_like(clients))
    return Feedback(plan, before, after, losses, **options)
