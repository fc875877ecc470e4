"""FedLC and FedRS: by hand with the class counts of clients, their limits, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from by_hand import Both, forward, gradient, module, moved, network, sgd, skewed
from lightning_fl import ClientModule, FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.functional.calibration import calibrated_logits
from lightning_fl.objectives import FedLC, FedProto, FedRoD, FedRS
from lightning_fl.types import FederationError


def calibrated(z, y, n):
    """Cross-entropy over the classes that a client has."""
    present = [c for c in range(3) if n[c]]
    z = {c: z[:, c] - 0.7 * float(n[c]) ** -0.25 for c in present}
    total = sum(each.exp() for each in z.values())
    return -torch.stack([z[int(c)][i] - total[i].log() for i, c in enumerate(y)]).mean()


def restricted(z, y, n):
    z = z * torch.tensor([1.0 if count else 0.3 for count in n], dtype=z.dtype)
    return -z.log_softmax(1)[torch.arange(len(y)), y].mean()


@pytest.mark.parametrize(
    ("make", "loss"), [(lambda: FedLC(0.7), calibrated), (lambda: FedRS(0.3), restricted)]
)
def test_by_hand(run, make, loss):
    both = Both(run, lambda: module(make()), rounds=2)
    counts = both.data.class_counts.tolist()

    def train(client, params, buffers, batches):
        for x, y in batches:

            def value(p, x=x, y=y):
                return loss(forward(p, buffers, x)[1], y, counts[client])

            params = moved(params, gradient(value, params))
        return params, buffers

    both.assert_trained_as(train)


@pytest.mark.parametrize("term", [FedLC, FedRoD, FedProto])
def test_labels_that_are_no_classes_are_refused(fit, term):
    x = torch.randn(24, 6)
    rows = TensorDataset(x, x[:, 0])
    user = ClientModule(network(False), [term()], sgd())
    words = f"{term.__name__} requires the number of samples of each class"
    with pytest.raises(FederationError, match=words):
        fit(user, FederatedLoop(), FederatedDataModule(rows, rows, num_clients=2), rounds=1)


def test_without_a_federation_it_is_refused():
    user = ClientModule(network(False), [FedLC()], sgd())
    with pytest.raises(FederationError, match="add a FederatedLoop"):
        user.training_step((torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), 0)


@pytest.mark.parametrize(("terms", "expected"), [((), 0), ((FedLC(),), 1 + 2)])
def test_classes_are_counted_once_per_round_if_a_term_asks(fit, monkeypatch, terms, expected):
    """Counting reads the labels of all clients; the term itself asks once, at the start."""
    calls, count = [], FederatedDataModule.class_counts.fget

    def counted(data):
        calls.append(data)
        return count(data)

    monkeypatch.setattr(FederatedDataModule, "class_counts", property(counted))
    fit(module(*terms, batchnorm=False), FederatedLoop(seed=0), skewed(), rounds=2)
    assert len(calls) == expected


def test_missing_classes_get_no_gradient():
    z = torch.randn(4, 3, requires_grad=True)
    logits = calibrated_logits(z, torch.tensor([3, 0, 5]), 1.0)
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 2, 2, 0]))
    assert torch.autograd.grad(loss, z)[0][:, 1].tolist() == [0.0] * 4
