"""The federation of a job of NVFlare."""

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.aggregators import ClusteredFL, CoordinateMedian, FedAdam, FedAvg, Scaffold
from lightning_fl.integrations.nvflare import FederationAggregator
from lightning_fl.integrations.server import RemoteServer
from lightning_fl.policies import Schedule

RULES = {rule.__name__: rule for rule in (FedAvg, FedAdam, CoordinateMedian, Scaffold, ClusteredFL)}


class Net(LightningModule):
    """A network with BatchNorm whose initial weights are always the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)
        ).double()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


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
