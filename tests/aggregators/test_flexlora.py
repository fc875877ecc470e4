"""FlexLoRA beside a plain derivation with full matrices, and its limits."""

import functools
import warnings

import pytest
import torch

from adapted import HEAD, PAIRS, Adapted
from lightning_fl import ClientModule
from lightning_fl.aggregators import FedAvg, FlexLoRA, ZeroPadding
from lightning_fl.callbacks import ClientFaults, FederatedLoop
from lightning_fl.objectives import APFL, Ditto
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError

RANKS = [1, 2, 4, 3, 4]


@pytest.fixture
def run(fit, data):
    def run(rule, rounds=1, num_clients=5, callbacks=(), rank=4, **options):
        module, wanted = Adapted(rank), []
        loop = FederatedLoop(rule, **{"policy": Schedule(num_steps=3), "seed": 2, **options})
        samples = data(num_clients=num_clients, partition=Dirichlet(2.0))
        note = Note(module, loop, samples, wanted)
        fit(module, loop, samples, rounds=rounds, callbacks=[*callbacks, note])
        return module, loop, wanted

    return run


class Note(ClientFaults):
    """Notes the clients of each round, their samples, and the global model after it."""

    def __init__(self, module, loop, samples, rounds):
        super().__init__()
        self.module, self.loop, self.samples, self.rounds = module, loop, samples, rounds

    def on_train_epoch_end(self, trainer, pl_module):
        plan = self.loop.plan_of_the_round
        dropped = [int(c) for c in str(self.loop.rows[-1]["dropped_clients"]).split()]
        clients = plan.clients.tolist()
        seen, self.module.seen[:] = self.module.seen[:], []
        self.rounds.append(
            {
                "clients": clients,
                "states": seen,
                "used": [client not in dropped for client in clients],
                "samples": self.samples.num_samples[clients].double(),
                "global": self.module.state(),
            }
        )


def sum_of_products(each, a, b, weighting="samples"):
    """The average of the full products of a round."""
    weights = each["samples"] if weighting == "samples" else torch.ones(len(each["clients"]))
    weights = weights.double() * torch.tensor(each["used"])
    weights = weights / weights.sum()
    ends = [end for _, end in each["states"]]
    return sum(p * end[b] @ end[a] for p, end in zip(weights, ends, strict=True))


def best(matrix, rank):
    u, s, vh = torch.linalg.svd(matrix)
    return u[:, :rank] * s[:rank] @ vh[:rank]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_it_is_the_decomposition_of_the_average_product(run, weighting):
    faults = ClientFaults(dropout=0.3)
    with pytest.warns(UserWarning, match="dropped"):
        _, loop, rounds = run(
            FlexLoRA(RANKS, weighting), rounds=4, clients_per_round=4, callbacks=[faults]
        )
    assert any(not all(each["used"]) for each in rounds)
    for i, each in enumerate(rounds):
        lost = []
        for a, b in PAIRS:
            wanted = sum_of_products(each, a, b, weighting)
            found = each["global"]
            torch.testing.assert_close(found[b] @ found[a], best(wanted, 4), rtol=0, atol=1e-12)
            torch.testing.assert_close(
                found[a] @ found[a].T, torch.eye(4).double(), atol=1e-12, rtol=0
            )
            s = torch.linalg.svdvals(wanted).square()
            lost.append(float(s[4:].sum() / s.sum()))
            if i + 1 < len(rounds):  # the next round starts from the best of each rank
                later = rounds[i + 1]
                for client, (start, _) in zip(later["clients"], later["states"], strict=True):
                    cut = best(wanted, RANKS[client])
                    torch.testing.assert_close(start[b] @ start[a], cut, rtol=0, atol=1e-12)
        assert loop.rows[i]["lost_energy"] == pytest.approx(max(lost), abs=1e-12)
        weights = each["samples"] if weighting == "samples" else torch.ones(4).double()
        weights = weights * torch.tensor(each["used"])
        for name in HEAD:
            ends = [end[name] for _, end in each["states"]]
            mean = sum(p * end for p, end in zip(weights / weights.sum(), ends, strict=True))
            torch.testing.assert_close(each["global"][name], mean, rtol=0, atol=1e-12)
    assert max(row["lost_energy"] for row in loop.rows) > 1e-9


def test_factors_that_share_a_are_averaged_as_by_fedavg(run):
    """After one step from B = 0 all A are equal: the average of products is that of B times A."""
    one = {"policy": Schedule(num_steps=1)}
    exact, _, _ = run(FlexLoRA(), **one)
    plain, _, _ = run(FedAvg(), **one)
    for i in (0, 2):
        torch.testing.assert_close(
            exact.net[i].product(), plain.net[i].product(), rtol=0, atol=1e-12
        )


def test_clients_cannot_keep_their_optimizer_state(run):
    with pytest.raises(
        FederationError, match=r"FlexLoRA changes the coordinates.*states: set optimizer_state: re"
    ):
        run(FlexLoRA(), optimizer_state="keep")


def test_clients_cannot_keep_errors_of_a_compression(run):
    with pytest.raises(FederationError, match="cannot keep errors that TopK feeds back: set"):
        run(FlexLoRA(), update_transforms=[TopK(0.5)])
    run(FlexLoRA(), update_transforms=[TopK(0.5, error_feedback=False)])


@pytest.mark.parametrize("term", [Ditto, APFL])
def test_clients_cannot_keep_a_second_model_with_adapters(fit, data, term):
    def module():
        net = Adapted().net
        return ClientModule(net, [term()], functools.partial(torch.optim.SGD, lr=0.1)).double()

    with pytest.raises(FederationError, match=r"cannot keep terms.*lora_A.*, an adapter of a sec"):
        fit(module(), FederatedLoop(FlexLoRA()), data(), rounds=1)
    fit(module(), FederatedLoop(ZeroPadding()), data(), rounds=1)


def test_a_round_without_updates_keeps_the_model(run):
    faults = ClientFaults(dropout=0.999)
    with warnings.catch_warnings(action="ignore"):
        module, loop, _ = run(FlexLoRA(RANKS), callbacks=[faults])
    assert loop.rows[0]["dropped"] == 5
    before = Adapted().state()
    assert all(torch.equal(value, before[name]) for name, value in module.state().items())


def test_one_client_keeps_its_product(run):
    module, _, rounds = run(FlexLoRA(), num_clients=1)
    ((_, end),) = rounds[0]["states"]
    plain, _, _ = run(FedAvg(), num_clients=1)
    for i, (a, b) in zip((0, 2), PAIRS, strict=True):
        torch.testing.assert_close(module.net[i].product(), end[b] @ end[a], rtol=0, atol=1e-12)
        torch.testing.assert_close(
            module.net[i].product(), plain.net[i].product(), rtol=0, atol=1e-12
        )


def test_products_of_a_total_rank_within_the_modules_lose_nothing(run):
    _, loop, rounds = run(FlexLoRA([1, 1, 1, 1, 1]), rounds=3, clients_per_round=3)
    for each, row in zip(rounds, loop.rows, strict=True):
        for a, b in PAIRS:
            found, wanted = each["global"], sum_of_products(each, a, b)
            torch.testing.assert_close(found[b] @ found[a], wanted, rtol=0, atol=1e-12)
        assert row["lost_energy"] < 1e-30
    # The rows that no client has trained are ready to be trained.
    a, b = PAIRS[0]
    assert not each["global"][b][:, 3:].any()
    torch.testing.assert_close(each["global"][a].norm(dim=1), torch.ones(4).double())
