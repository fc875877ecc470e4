"""Rules that keep a model of each client."""

import pytest
import torch

from lightning_fl.aggregators import FedAMP, Gossip
from rounds import aggregate, of, sent


@pytest.mark.parametrize("rule", [Gossip("ring"), FedAMP()], ids=["Gossip", "FedAMP"])
def test_clients_begin_with_the_model_of_the_first_round(rule):
    """A hook may change the model between the start of the fit and that of the first round."""
    ids = torch.arange(3)
    of(3, rule).start(torch.zeros(2))
    rule.start(torch.ones(2))
    assert rule.models_for(ids).tolist() == [[1.0, 1.0]] * 3
    aggregate(rule, torch.ones(2), sent(torch.ones(3, 2)))
    rule.start(torch.full((2,), 7.0))
    assert rule.models_for(ids).tolist() == [[2.0, 2.0]] * 3
