"""Fed-RoD: by hand with the class counts of clients, its limits, and what it refuses."""

import pytest
import torch
from torch import nn

from by_hand import Both, cross_entropy, forward, gradient, module, moved, sgd
from lightning_fl import ClientModule, FederatedLoop, VectorizedClients
from lightning_fl.callbacks import PersonalizedEvaluation
from lightning_fl.functional.calibration import balanced_logits
from lightning_fl.objectives import FedRoD
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from two_classes import samples

HEAD = "parameter.terms.0.head."


def balanced(z, y, n, gamma):
    """Minus the log-likelihood under the prior of the client, over the classes that it has."""
    present = [c for c in range(3) if n[c]]
    total = sum(float(n[c]) ** gamma * z[:, c].exp() for c in present)
    right = [float(n[int(c)]) ** gamma * z[i, c].exp() / total[i] for i, c in enumerate(y)]
    return -torch.stack(right).log().mean()


@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_by_hand(run, gamma):
    """The body and the shared head do not learn from the personal loss; absent clients keep P."""
    scores = PersonalizedEvaluation(steps=0)
    both = Both(run, lambda: module(FedRoD(gamma)), [scores])
    counts, heads = both.data.class_counts.tolist(), {}

    def train(client, params, buffers, batches):
        zeros = {n: torch.zeros_like(params[f"3.{n}"]) for n in ("weight", "bias")}
        head = heads.get(client, zeros)
        for x, y in batches:
            seen = []

            def loss(p, x=x, y=y, seen=seen):
                f, z = forward(p, buffers, x)
                seen += [f.detach(), z.detach()]
                return balanced(z, y, counts[client], gamma)

            grads = gradient(loss, params)
            f, z = seen

            def personal(p, y=y, f=f, z=z):
                return cross_entropy(z + f @ p["weight"].T + p["bias"], y)

            head, params = moved(head, gradient(personal, head)), moved(params, grads)
        heads[client] = head
        return params, buffers

    params, buffers = both.assert_trained_as(train)
    for client, head in heads.items():
        for loop in (both.loop, both.vectorized):
            for name, value in head.items():
                found = loop.store.get(client)[HEAD + name]
                torch.testing.assert_close(found, value, rtol=0, atol=1e-12)
        sums = {f"3.{name}": params[f"3.{name}"] + value for name, value in head.items()}
        assert scores.rows[client]["kept"] == both.accuracy(client, params | sums, buffers)
    assert set(module().state_dict()) == set(both.user.state_dict())


def test_the_personal_model_is_the_network_with_the_sum_of_both_heads(run):
    user = module(FedRoD())
    run(user, rounds=1)
    before = {n: p.detach().clone() for n, p in user.net.named_parameters()}
    for param in user.terms[0].head.values():
        assert not param.any()  # a new client
        param.data.normal_()
    head = {f"3.{name}": value.detach().clone() for name, value in user.terms[0].head.items()}
    assert user.federated_personalize([])
    for name, param in user.net.named_parameters():
        assert torch.equal(param, before[name] + head.get(name, 0.0))


def test_what_it_cannot_train_is_refused(run):
    frozen, tied = module(FedRoD()), module(FedRoD())
    frozen.net[3].requires_grad_(False)
    tied.net.again = tied.net[3].weight
    for user in (frozen, tied):
        with pytest.raises(FederationError, match="last layer, 3, which is frozen or shares a par"):
            run(user)


def test_clients_are_fine_tuned_with_their_own_class_counts(fit, data):
    seen = []

    class Noting(FedRoD):
        def changed(self, logits, counts):
            seen.append(counts.tolist())
            return super().changed(logits, counts)

    samples = data(local_test_size=0.25, unseen_clients=["3"])
    user = ClientModule(nn.Sequential(nn.Linear(6, 3)), terms=[Noting()]).double()
    scores = PersonalizedEvaluation(steps=1)
    loop = FederatedLoop(policy=Schedule(num_steps=1), seed=1, check=False)
    fit(user, loop, samples, rounds=1, callbacks=[scores])
    parts = [*samples.parts, *samples.unseen_parts]
    expected = [samples.class_labels[part].bincount(minlength=3).tolist() for part in parts]
    assert len(parts) == 4
    assert seen[3:] == expected  # after the local steps of three clients


def test_padded_samples_do_not_train_the_head(fit):
    heads = []
    for group in (None, 3):
        torch.manual_seed(0)
        made = ClientModule(nn.Sequential(nn.Linear(4, 2, bias=False)), [FedRoD()], sgd()).double()
        user = made if group is None else VectorizedClients(made, group, compile=False)
        loop = FederatedLoop(policy=Schedule(num_steps=4), seed=0)
        data = samples(3, batch_size=5, partition=Dirichlet(0.5, min_size=3))
        fit(user, loop, data, rounds=2)
        heads.append(torch.stack([loop.store.get(client)[HEAD + "weight"] for client in range(3)]))
    torch.testing.assert_close(*heads, rtol=0, atol=1e-12)
    assert len(set(data.num_samples.tolist())) > 1


def test_equal_counts_do_not_change_the_gradient_and_missing_classes_get_none():
    z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 2, 2, 0, 0])

    def slope(logits):
        return torch.autograd.grad(nn.functional.cross_entropy(logits, y), z)[0]

    torch.testing.assert_close(slope(balanced_logits(z, torch.full((3,), 7), 1.0)), slope(z))
    missing = balanced_logits(z, torch.tensor([3, 0, 5]), 1.0)
    assert slope(missing)[:, 1].tolist() == [0.0] * 5
    assert torch.equal(balanced_logits(z, torch.tensor([3, 0, 5]), 0.0), z)
