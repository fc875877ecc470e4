"""The federation of a job of NVFlare."""

import torch
from torch import nn

from lightning_fl import aggregators
from lightning_fl.aggregators import ClusteredFL, CoordinateMedian, FedAdam, FedAvg, Scaffold
from lightning_fl.integrations.nvflare import FederationAggregator
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.policies import Schedule
from linear import Linear

RULES = {rule.__name__: rule for rule in (FedAvg, FedAdam, CoordinateMedian, Scaffold, ClusteredFL)}
RULES["Staged"] = lambda: aggregators.Staged([1], [FedAvg(), FedAdam()])


class Net(Linear):
    """A network with BatchNorm whose initial weights are always the same."""

    def __init__(self):
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)
        super().__init__(nn.Sequential(*layers).double())


def policy():
    return Schedule(lr=0.2, local_epochs=1)


class Server(FederationAggregator):
    def __init__(self, rule="FedAvg", sampled=None, checkpoint=None):
        self.rule, self.sampled = rule, sampled
        super().__init__(checkpoint)

    def server(self):
        rule = RULES[self.rule]()
        options = {"clients_per_round": self.sampled, "buffers": "average"}
        return RemoteServer(Net(), rule, policy(), seed=3, **options)
