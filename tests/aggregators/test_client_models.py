"""Rules that keep a model of each client."""

import pytest
import torch

from lightning_fl.aggregators import FedAMP, Gossip
from lightning_fl.contracts.context import Federation
from lightning_fl.types import ClientUpdate, Cohort


@pytest.mark.parametrize("rule", [Gossip("ring"), FedAMP()], ids=["Gossip", "FedAMP"])
def test_clients_begin_with_the_model_of_the_first_round(rule):
    """A hook may change the model between the start of the fit and that of the first round."""
    ids = torch.arange(3)
    rule.setup(Federation(num_clients=3, sampling=Cohort(size=3, clients=3)))
    rule.start(torch.zeros(2))
    rule.start(torch.ones(2))
    assert rule.models_for(ids).tolist() == [[1.0, 1.0]] * 3
    rule.update(ClientUpdate(ids, torch.ones(3, 2), torch.ones(3)))
    rule.compute()
    rule.start(torch.full((2,), 7.0))
    assert rule.models_for(ids).tolist() == [[2.0, 2.0]] * 3
