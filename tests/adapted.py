"""A network with LoRA adapters, written by hand: tests of rules need no peft."""

import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule


class Adapter(nn.Module):
    """A frozen linear layer with an adapter; names are those of peft."""

    def __init__(self, base, rank, scaling=0.5):
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), scaling
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        added = self.lora_B["default"](self.lora_A["default"](x))
        return self.base_layer(x) + self.scaling * added

    def product(self):
        return self.lora_B["default"].weight @ self.lora_A["default"].weight


class Adapted(ClientModule):
    """Two adapted layers and a trained head; ``seen`` has each client's model at start and end."""

    def __init__(self, rank=4, optimizer=None, features=6, classes=3):
        torch.manual_seed(0)
        net = nn.Sequential(
            Adapter(nn.Linear(features, 8), rank),
            nn.Tanh(),
            Adapter(nn.Linear(8, 7), rank),
            nn.Tanh(),
            nn.Linear(7, classes),
        )

        def sgd(params):
            return torch.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.1)

        made = sgd if optimizer is None else optimizer
        super().__init__(net, optimizer=lambda ps: made([p for p in ps if p.requires_grad]))
        self.seen, self.local = [], list[str]()
        self.double()

    @property
    def federated_local_parameters(self):
        return self.local

    def state(self):
        return {n: p.detach().clone() for n, p in self.net.named_parameters() if p.requires_grad}

    def on_client_start(self):
        self.seen.append([self.state()])

    def on_client_end(self):
        super().on_client_end()
        self.seen[-1].append(self.state())


def train(fit, data, module, rule, rounds=1, callbacks=(), **options):
    """Train five clients with unequal numbers of samples; return the loop."""
    loop = FederatedLoop(rule, **{"policy": Schedule(num_steps=2), "seed": 2, **options})
    samples = data(num_clients=5, partition=Dirichlet(2.0))
    fit(module, loop, samples, rounds=rounds, callbacks=callbacks)
    return loop


#: Names of the factors of both adapters.
PAIRS = [(f"{i}.lora_A.default.weight", f"{i}.lora_B.default.weight") for i in (0, 2)]
HEAD = ["4.weight", "4.bias"]
