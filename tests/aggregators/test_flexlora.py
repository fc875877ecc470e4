"""FlexLoRA beside a plain derivation with full matrices, and its limits."""

import functools
import warnings
from operator import itemgetter

import pytest
import torch

from adapted import HEAD, PAIRS, Adapted, train
from lightning_fl import ClientModule
from lightning_fl.aggregators import FlexLoRA, ZeroPadding
from lightning_fl.callbacks import ClientFaults, FederatedLoop
from lightning_fl.objectives import APFL, Ditto
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError
from written_plainly import close

RANKS = [1, 2, 4, 3, 4]


@pytest.fixture
def run(fit, data):
    """Train a module of five clients; returns it, the loop, and what is noted of rounds."""

    def run(rule, rounds=1, callbacks=(), **options):
        module, note = Adapted(), Note()
        loop = train(fit, data, module, rule, rounds, [*callbacks, note], **options)
        return module, loop, note.rounds

    return run


class Note(ClientFaults):
    """Notes the clients of each round, their samples, and the global model after it."""

    def __init__(self):
        super().__init__()
        self.rounds = []

    def on_train_epoch_end(self, trainer, module):
        (loop,) = (c for c in trainer.callbacks if isinstance(c, FederatedLoop))
        dropped = [int(c) for c in str(loop.rows[-1]["dropped_clients"]).split()]
        clients = loop.plan_of_the_round.clients.tolist()
        self.rounds.append(
            {
                "clients": clients,
                "states": module.seen[-len(clients) :],
                "used": [client not in dropped for client in clients],
                "samples": trainer.datamodule.num_samples[clients].double(),
                "global": module.state(),
            }
        )


def mean(each, weighting, of):
    """The average of a function of the models with which clients end a round."""
    weights = each["samples"] if weighting == "samples" else torch.ones(len(each["clients"]))
    weights = weights.double() * torch.tensor(each["used"])
    weights = weights / weights.sum()
    return sum(p * of(end) for p, (_, end) in zip(weights, each["states"], strict=True))


def sum_of_products(each, a, b, weighting="samples"):
    """The average of the full products of a round."""
    return mean(each, weighting, lambda end: end[b] @ end[a])


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
            close(found[b] @ found[a], best(wanted, 4))
            close(found[a] @ found[a].T, torch.eye(4).double())
            s = torch.linalg.svdvals(wanted).square()
            lost.append(float(s[4:].sum() / s.sum()))
            if i + 1 < len(rounds):  # the next round starts from the best of each rank
                later = rounds[i + 1]
                for client, (start, _) in zip(later["clients"], later["states"], strict=True):
                    cut = best(wanted, RANKS[client])
                    close(start[b] @ start[a], cut)
        assert loop.rows[i]["lost_energy"] == pytest.approx(max(lost), abs=1e-12)
        for name in HEAD:
            close(each["global"][name], mean(each, weighting, itemgetter(name)))
    assert max(row["lost_energy"] for row in loop.rows) > 1e-9


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


def test_products_of_a_total_rank_within_the_modules_lose_nothing(run):
    _, loop, rounds = run(FlexLoRA([1, 1, 1, 1, 1]), rounds=3, clients_per_round=3)
    for each, row in zip(rounds, loop.rows, strict=True):
        for a, b in PAIRS:
            found, wanted = each["global"], sum_of_products(each, a, b)
            close(found[b] @ found[a], wanted)
        assert row["lost_energy"] < 1e-30
    # The rows that no client has trained are ready to be trained.
    a, b = PAIRS[0]
    assert not each["global"][b][:, 3:].any()
    torch.testing.assert_close(each["global"][a].norm(dim=1), torch.ones(4).double())
