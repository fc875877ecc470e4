"""Parameters and buffers that stay with each client."""

import copy
import functools

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frozen import frozen_once
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule
from lightning_fl.runners.local_tensors import local_tensors, split_tensors
from lightning_fl.types import FederationError
from linear import Linear
from written_plainly import samples_of

NORM = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]


class Normalized(Linear):
    """A network with BatchNorm that nothing in its name tells, and a shared step counter."""

    def __init__(self, local=()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        super().__init__(net, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.federated_local_parameters = list(local)
        self.double()

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


def local_norm():
    return Normalized([f"net.1.{name}" for name in NORM])


def by_hand(samples, rounds, epochs):
    """FedBN with full batches: the layers between the BatchNorm layers are averaged by n_k."""
    server, own = local_norm(), {}
    total = sum(len(y) for _, y in samples)
    for _ in range(rounds):
        ends = []
        for client, (x, y) in enumerate(samples):
            module = copy.deepcopy(server)
            module.net[1].load_state_dict(own.get(client, server.net[1].state_dict()))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
            for _ in range(epochs):
                optimizer.zero_grad()
                F.cross_entropy(module.net(x), y).backward()
                optimizer.step()
            own[client] = copy.deepcopy(module.net[1].state_dict())
            ends.append(module.state_dict())
        for name, value in server.net.named_parameters():
            if not name.startswith("1."):
                pairs = zip(ends, samples, strict=True)
                value.data.copy_(sum(end[f"net.{name}"] * len(y) / total for end, (_, y) in pairs))
    return server, own


@pytest.mark.parametrize("buffers", ["average", "server", "local"])
def test_local_batchnorm_is_fedbn_by_hand(fit, ragged, buffers, wrap):
    module, datamodule = local_norm(), ragged(batch_size=100)
    loop = FederatedLoop(policy=Schedule(local_epochs=3), buffers=buffers, seed=1)
    fit(wrap(module), loop, datamodule, rounds=2)
    samples = [samples_of(datamodule, client) for client in range(7)]
    server, own = by_hand(samples, 2, 3)
    for name, value in server.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], value, atol=1e-12, rtol=0)
    for client, state in own.items():
        rows = loop.store.get(client)
        assert len(rows) == len(NORM) + (buffers == "local")
        for name, value in state.items():
            kind = "parameter" if name in ("weight", "bias") else "buffer"
            row = rows[f"{kind}.net.1.{name}"]
            torch.testing.assert_close(row, value, atol=1e-12, rtol=0)
    assert module.steps == (0 if buffers == "server" else 6)
    # 28 + 15 shared parameters in float64, and the step counter.
    assert loop.rows[0]["bytes_up"] == loop.rows[0]["bytes_down"] == 7 * (43 + 1) * 8


class Tied(L.LightningModule):
    """Two layers with one weight, a layer with two names, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.norm = nn.SyncBatchNorm(2)
        self.again = self.norm
        self.frozen = nn.Embedding(3, 2)
        self.frozen.weight.requires_grad_(False)


NORM_NAMES = [f"norm.{name}" for name in NORM]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], []),
        (["*.weight"], ["one.weight", "norm.weight", "frozen.weight"]),
        (["type:_BatchNorm"], NORM_NAMES),
        (["again.*"], NORM_NAMES),
        (["two.*"], ["one.weight", "two.bias"]),
        (["type:*BatchNorm", "t*.bias"], ["two.bias", *NORM_NAMES]),
        (["type:Embed*"], ["frozen.weight"]),
    ],
)
def test_patterns_match_names_and_types(patterns, names):
    assert sorted(local_tensors(Tied(), patterns)) == sorted(names)


@pytest.mark.parametrize(
    ("module", "patterns", "message"),
    [
        (Tied(), ["one.wieght"], r"'one\.wieght' in local_param.* matches no .* are one\.weight"),
        (Tied(), ["two.bias", "type:BatchNrm1d"], "'type:BatchNrm1d' in local_param.* matches no"),
        (Tied(), ["type:Module"], "all trained parameters of Tied are local"),
        (Tied(), ["type:Linear", "type:_BatchNorm"], "all trained parameters of Tied are local"),
        (Normalized(["net.9"]), [], r"'net\.9' in federated_local_parameters matches no"),
        (
            Normalized([n for n, _ in Normalized().named_parameters()]),
            [],
            "all trained parameters of Normalized are local",
        ),
    ],
)
def test_tensors_that_cannot_be_local_are_refused(module, patterns, message):
    with pytest.raises(FederationError, match=message):
        split_tensors(module, False, patterns)


def test_constants_are_shared_even_if_a_pattern_matches_them():
    with frozen_once():
        constants, local = split_tensors(Tied(), False, ["type:Embedding", "two.bias"])
    assert list(constants) == ["frozen.weight"]
    assert local == ["two.bias"]
