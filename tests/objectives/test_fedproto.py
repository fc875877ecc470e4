"""FedProto: by hand with networks that stay with their clients, and what is refused."""

import pytest
import torch

from by_hand import Batches, cross_entropy, forward, gradient, moved, network, sgd, skewed, start
from lightning_fl import ClientModule, FederatedLoop, VectorizedClients
from lightning_fl.aggregators import FedAdam, FedAvg
from lightning_fl.objectives import FedProto
from lightning_fl.policies import Schedule
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError

DECAY = 0.05
LOCAL = {"local_parameters": ["net.*"], "aggregator": FedAvg("uniform")}
pytestmark = pytest.mark.filterwarnings("ignore:validation and test use the global model")


def module(strength=0.7, weighting="uniform", batchnorm=True):
    terms = [FedProto(strength, weighting)]
    return ClientModule(network(batchnorm), terms, sgd(weight_decay=DECAY)).double()


def distance(f, y, prototypes):
    """Equation 8: the mean over samples and features; 0 without a prototype."""
    total = torch.zeros((), dtype=torch.float64)
    for each, true in zip(f, y.tolist(), strict=True):
        if true in prototypes:
            total = total + ((each - prototypes[true]) ** 2).mean()
    return total / len(y)


def trained(params, buffers, batches, prototypes, strength):
    """A client's network after the round, and the features of each class in training."""
    features = {0: [], 1: [], 2: []}
    for x, y in batches:
        seen = []

        def loss(p, x=x, y=y, seen=seen):
            f, z = forward(p, buffers, x)
            seen.append(f.detach())
            return cross_entropy(z, y) + strength * distance(f, y, prototypes)

        grads = gradient(loss, params)
        params = moved(params, {n: g + DECAY * params[n] for n, g in grads.items()})
        for each, true in zip(seen[0], y.tolist(), strict=True):
            features[true].append(each)
    return params, buffers, {c: torch.stack(rows) for c, rows in features.items() if rows}


def plainly(rounds, strength, weighting, batchnorm=True):
    """Return the network of each client, and the prototypes of the classes of the last round."""
    networks, prototypes = {}, {}
    for clients in rounds:
        sent = []
        for client, batches in clients.items():
            before = networks.get(client) or start(network(batchnorm).double())
            *after, features = trained(*before, batches, prototypes, strength)
            networks[client] = after
            sent.append(features)
        prototypes = {}
        for c in range(3):
            rows = [features[c] for features in sent if c in features]
            if rows and weighting == "samples":
                prototypes[c] = torch.cat(rows).mean(0)
            elif rows:
                prototypes[c] = torch.stack([each.mean(0) for each in rows]).mean(0)
    return networks, prototypes


def assert_equal(user, loop, networks, prototypes):
    term = user.terms[0]
    assert (term.weights > 1e-9).nonzero()[:, 0].tolist() == sorted(prototypes)
    for c, value in prototypes.items():
        found = term.weighted[c] / term.weights[c]
        torch.testing.assert_close(found.detach(), value, rtol=0, atol=1e-12)
    for client, (params, buffers) in networks.items():
        rows = loop.store.get(client)
        for kind, tensors in (("parameter", params), ("buffer", buffers)):
            for name, value in tensors.items():
                torch.testing.assert_close(rows[f"{kind}.net.{name}"], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strength", "weighting"), [(0.7, "uniform"), (0.7, "samples"), (0.0, "uniform")]
)
def test_by_hand(run, strength, weighting):
    """The optimizer decays weights, and not prototypes; absent clients keep their network."""
    user, other = module(strength, weighting), module(strength, weighting)
    loop, rounds, _ = run(user, **LOCAL)
    networks, prototypes = plainly(rounds, strength, weighting)
    vectorized, _, _ = run(other, 2, **LOCAL)
    assert_equal(user, loop, networks, prototypes)
    assert_equal(other, vectorized, networks, prototypes)
    for name, value in network(True).double().named_parameters():
        assert torch.equal(user.net.get_parameter(name), value)  # not averaged


def test_a_class_without_a_client_has_no_prototype(fit):
    """Others are pulled to the prototypes of the last round only."""
    seen, options = Batches(), {"clients_per_round": 2, **LOCAL}
    for group, callbacks in ((None, [seen]), (2, [])):
        user = module(batchnorm=False)
        clients = user if group is None else VectorizedClients(user, group, compile=False)
        loop = FederatedLoop(policy=Schedule(num_steps=3), seed=2, **options)
        fit(clients, loop, skewed(), rounds=4, callbacks=callbacks)
        networks, prototypes = plainly(seen.rounds, 0.7, "uniform", batchnorm=False)
        assert len(prototypes) == 2
        assert_equal(user, loop, networks, prototypes)


def test_rounding_errors_of_a_sum_are_no_prototype(run):
    """Without a client, the sum of updates is minus the old weight, up to rounding."""
    user = module()
    run(user, rounds=1, **LOCAL)
    term = user.terms[0]
    term.weights.data = torch.tensor([1e-17, 0.5, 0.0], dtype=torch.float64)
    term.weighted.data.fill_(3.0)
    term.on_client_start(user)
    assert term.known.tolist() == [0, 1, 0]
    assert term.prototypes[1].tolist() == [6.0] * 5


def test_only_class_means_travel(run):
    loop, _, _ = run(module(), rounds=1, **LOCAL)
    row = loop.rows[0]
    assert row["bytes_up"] == row["bytes_down"] == row["clients"] * 8 * (3 * 5 + 3)


def test_prototypes_are_saved_and_loaded_without_a_fit(run):
    user, again = module(), module()
    run(user, rounds=1, **LOCAL)
    again.load_state_dict(user.state_dict())
    for name in ("weighted", "weights"):
        assert torch.equal(getattr(again.terms[0], name), getattr(user.terms[0], name))
    assert {n for n in user.state_dict() if "terms" in n} == {"terms.0.weighted", "terms.0.weights"}
    run(again, rounds=1, **LOCAL)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"aggregator": FedAdam()}, "FedAdam"),
        ({"aggregator": FedAvg(normalization="all")}, "normalization='all'"),
        ({"update_transforms": [TopK(0.5)]}, "an update transform"),
    ],
)
def test_what_does_not_average_prototypes_and_weights_alike_is_refused(run, options, wrong):
    with pytest.raises(FederationError, match=f"and {wrong} would change"):
        run(module(), **LOCAL | options)
