"""SecureAggregation: FedAvg up to rounding, what reaches a rule, noise of clients, refusals."""

# ruff: noqa: F403, F405

import math

import pytest
import torch
from scipy import stats
from torch import nn

from lightning_fl import ClientModule, aggregators
from lightning_fl.aggregators import *
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.context import Federation
from lightning_fl.functional.fixed_point import FixedPointSum
from lightning_fl.functional.privacy import epsilon
from lightning_fl.policies import Schedule
from lightning_fl.samplers import PoissonSampler
from lightning_fl.transforms import TopK
from lightning_fl.types import Cohort, FederationError
from rounds import aggregate, sent
from two_classes import samples
from written_plainly import Lost, close, module, vector

SAMPLES = torch.tensor([3, 8, 5, 4])
FOUR = Federation(4, Cohort(4, 4), num_samples=SAMPLES)


def started(rule, size=7, federation=FOUR):
    rule.setup(federation)
    rule.start(torch.zeros(size, dtype=torch.float64))
    return rule


def updates(size=7, scale=0.3):
    drawn = torch.Generator().manual_seed(0)
    delta = scale * torch.randn(4, size, generator=drawn, dtype=torch.float64)
    control = 0.1 * torch.randn(4, size, generator=drawn, dtype=torch.float64)
    steps, lr = torch.tensor([1, 2, 3, 4]), torch.full((4,), 0.1, dtype=torch.float64)
    extras = {"control_change": control}
    return sent(delta, SAMPLES, num_steps=steps, lr=lr, extras=extras)


def result(rule):
    for client in range(4):
        rule.update(updates().select(torch.tensor([client])))
    return rule.compute()


def test_a_round_by_hand():
    """Two clients with 3 and 1 samples, 6 bits: integers up to 15, in steps of 3 / 15."""
    rule = SecureAggregation(clip=1.0, bits=6)
    two = Federation(2, Cohort(2, 2), num_samples=torch.tensor([3, 1]))
    started(rule, 2, two)
    rows = torch.tensor([[0.5, -2.0], [0.25, 1.0]], dtype=torch.float64)
    rule.update(sent(rows, [3, 1]))
    # 1.5 is 7.5 steps, half to even 8; 0.25 is 1.25 steps, so 1; -3 is -15, and 1 is 5 steps.
    assert rule.compute().tolist() == pytest.approx([(8 + 1) * 0.2 / 4, (-15 + 5) * 0.2 / 4])
    exact = [1.5, -3.0, 0.25, 1.0]
    errors = [8 * 0.2 - 1.5, 0.0, 0.2 - 0.25, 0.0]
    assert rule.metrics() == {
        "secure_bits": 6,
        "secure_clipped": 0.25,
        "secure_rounding": pytest.approx(math.hypot(*errors) / math.hypot(*exact)),
    }


@pytest.mark.parametrize("bits", [8, 16, 32, 53])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_it_is_fedavg_up_to_the_bound_of_the_docstring(bits, weighting):
    found = result(started(SecureAggregation(FedAvg(weighting), clip=2.0, bits=bits)))
    expected = result(started(FedAvg(weighting)))
    weights = SAMPLES if weighting == "samples" else torch.ones(4)
    largest = (2 ** (bits - 1) - 1) // 4
    bound = 4 * 2.0 * float(weights.max()) / (2 * largest * float(weights.sum()))
    error = float((found - expected).abs().max())
    assert error <= bound * 1.001 + 1e-15
    assert bits == 53 or error > bound / 100


@pytest.mark.parametrize(
    "make",
    [
        FedAvg, FedYogi, FedExP, FedNova, NormClipping, Scaffold,
        lambda: Scaffold(weighting="samples"), FedDyn,
        lambda: FedCM(alpha=1.0), lambda: DPFedAvg(0.0, clip_norm=0.3),
        lambda: DPFedAvg(1.0, clip_norm=0.3, quantile=0.5, count_noise=2.0),
        lambda: DPFedAvg(1.0, clip_norm=0.3, noise_by="clients"),
    ],
)  # fmt: skip
def test_rules_of_sums_are_themselves_up_to_rounding(make):
    """With 53 bits, of all that they add."""
    secure = started(SecureAggregation(make(), clip=20.0, bits=53, max_weight=100.0))
    found, expected = result(secure), result(started(make()))
    close(found, expected, atol=1e-9)
    plain = started(make())
    result(plain)
    learned = {name: value for name, value in secure.metrics().items() if "secure" not in name}
    assert learned == pytest.approx(plain.metrics())


def test_a_rule_learns_the_sum_alone():
    """Other updates with the same integers in total, and the same model to the last bit."""
    rule = started(SecureAggregation(FedAvg("uniform"), bits=16))
    step = rule.aggregator.total.unit
    assert isinstance(rule.aggregator.total, FixedPointSum)
    numbers = torch.tensor([[50, -3], [7, 8], [0, 1], [2, 2]], dtype=torch.float64)
    moved = numbers + torch.tensor([[9, 4], [-9, 0], [0, -4], [0, 0]])
    models = []
    for rows in (numbers, moved):
        started(rule, 2)
        rule.update(sent(rows * step, SAMPLES))
        models.append(rule.compute())
    assert torch.equal(*models)


# --- noise of clients -----------------------------------------------------------------------------


def test_noise_of_clients_adds_up_to_that_of_the_server():
    size, zero = 100_000, torch.zeros(4, 100_000, dtype=torch.float64)
    rule = DPFedAvg(1.5, clip_norm=0.2, noise_by="clients")
    secure = started(SecureAggregation(rule, clip=2.0), size)
    secure.update(sent(zero, SAMPLES))
    noise, deviation = secure.compute(), 1.5 * 0.2 / 4
    assert secure.metrics()["noise"] == pytest.approx(deviation)
    assert stats.kstest(noise.numpy() / deviation, "norm").pvalue > 0.001
    assert secure.metrics()["epsilon"] == epsilon([(1.5, 1)], 4**-1.1, FOUR.sampling)


def test_noise_of_clients_depends_on_round_and_client():
    rule = started(DPFedAvg(1.0, noise_by="clients"), 1000)

    def noise_of(client):
        update = sent(torch.zeros(1, 1000), ids=[client])
        return aggregate(rule, torch.zeros(1000, dtype=torch.float64), update)

    rule.round.fill_(5)
    first, second = noise_of(0), noise_of(0)  # of rounds 5 and 6
    rule.round.fill_(5)
    assert torch.equal(noise_of(0), first)
    rule.round.fill_(5)
    for other in (noise_of(1), second):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.15


def test_noise_of_clients_that_drop_out_is_missing_and_paid():
    """Three of four: less noise in the model, and a larger epsilon; nobody: nothing is paid."""
    rule = started(DPFedAvg(2.0, noise_by="clients"))
    rule.update(updates().select(torch.tensor([0, 2, 3])))
    rule.conclude(3, 1)
    noise = 2.0 * math.sqrt(3 / 4)
    assert rule.metrics()["noise"] == pytest.approx(noise / 4)
    paid = epsilon([(noise, 1)], 4**-1.1, FOUR.sampling)
    assert rule.metrics()["epsilon"] == pytest.approx(paid)
    rule.start(torch.ones(7, dtype=torch.float64))
    assert torch.equal(rule.conclude(0, 1), torch.ones(7))
    assert rule.metrics()["epsilon"] == pytest.approx(paid)


def test_noise_of_clients_that_cannot_be_accounted_for_is_refused(fit):
    with pytest.raises(FederationError, match="quantile=None, or noise_by='server'"):
        DPFedAvg(quantile=0.5, noise_by="clients")
    options = {"sampler": PoissonSampler(), "clients_per_round": 2}
    loop = FederatedLoop(SecureAggregation(DPFedAvg(noise_by="clients")), **options)
    with pytest.raises(FederationError, match="divides the noise by the number of clients"):
        fit(module(), loop, samples(), rounds=1)


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_run_is_that_of_fedavg_and_the_table_has_the_bits(fit):
    models, rows = [], []
    # Entries of two classes change by opposite amounts: six of ten entries are whole pairs.
    options = {"seed": 1, "clients_per_round": 4, "update_transforms": [TopK(0.6)]}
    for rule in (FedAvg(), SecureAggregation(bits=40)):
        made = module()
        loop = FederatedLoop(rule, Schedule(num_steps=3), **options)
        fit(made, loop, samples(), rounds=3, callbacks=[Lost(2)])
        models.append(vector(made))
        rows.append(loop.rows)
    close(*models, atol=1e-9)
    for plain, secure in zip(*rows, strict=True):
        assert secure["secure_bits"] == 40
        assert secure["secure_clipped"] == 0
        assert 0 < secure["secure_rounding"] < 1e-8
        returned = secure["clients"] - secure["dropped"]
        assert secure["bytes_up"] == returned * 10 * 5  # all ten parameters, five bytes each
        assert secure["bytes_down"] == plain["bytes_down"]


def test_an_empty_round_keeps_the_model():
    rule = started(SecureAggregation())
    assert rule.conclude(0, 1) is None
    assert rule.metrics() == {"secure_bits": 32, "secure_clipped": 0.0, "secure_rounding": 0.0}


# --- refusals -------------------------------------------------------------------------------------

#: Options of the rules that need some.
OPTIONS = {"Gossip": ["ring"], "Staged": [[1], [FedAvg(), FedAvg()]]}
#: Rules that need sums only.
OF_SUMS = {
    *("FedAvg", "FedOpt", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedNova", "FedCM"),
    *("Scaffold", "FedDyn", "FedExP", "NormClipping", "DPFedAvg", "ZeroPadding"),
    *("FedALA", "HeteroFL"),
}
ABSTRACT = {"Aggregator", "AdapterRule", "AsynchronousAggregator", "NeuronMatching"}
ABSTRACT |= {"ClientModels", "RobustAggregator", "SecureAggregation"}


@pytest.mark.parametrize("name", sorted({*aggregators.__all__} - ABSTRACT))
def test_rules_that_need_single_updates_are_refused_by_name(name):
    """No list of classes decides: it is what a rule keeps of the clients."""
    rule = SecureAggregation(getattr(aggregators, name)(*OPTIONS.get(name, [])))
    twenty = Federation(20, Cohort(20, 20), num_samples=torch.full((20,), 5))
    if name in OF_SUMS:
        started(rule, 4, twenty)
    else:
        with pytest.raises(FederationError, match=f"^{name} needs more than sums over clients"):
            started(rule, 4, twenty)


class Contributions(Schedule):
    learns_from = frozenset({"contributions"})


def test_runs_that_would_not_be_secure_are_refused_at_their_start(fit):
    def run(rule, made=None, **options):
        fit(made or module(), FederatedLoop(rule, seed=1, **options), samples(), rounds=1)

    with pytest.raises(FederationError, match=r"Krum needs more .*ids, deltas, weights"):
        run(SecureAggregation(aggregators.Krum()))
    with pytest.raises(FederationError, match=r"5 clients does not fit into 3 bits.* least 4"):
        run(SecureAggregation(bits=3))
    with pytest.raises(FederationError, match="Contributions learns from the updates of single"):
        run(SecureAggregation(), policy=Contributions())
    with pytest.raises(FederationError, match="SecureAggregation cannot be a stage of Staged"):
        run(Staged([1], [SecureAggregation(), FedAvg()]))
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    normalized = ClientModule(net, (), lambda p: torch.optim.SGD(p, lr=0.1)).double()
    with pytest.raises(FederationError, match="set buffers='server'"):
        run(SecureAggregation(), normalized, buffers="average")
    run(SecureAggregation(), normalized, buffers="server")


def test_all_clients_of_a_drawn_number_fit_into_the_bits():
    """PoissonSampler may draw every client."""
    drawn = Federation(100, Cohort(5, 100, "poisson"), num_samples=torch.ones(100))
    with pytest.raises(FederationError, match="a sum of 100 clients"):
        started(SecureAggregation(bits=7), 4, drawn)
    five = Federation(100, Cohort(5, 100), num_samples=torch.ones(100))
    started(SecureAggregation(bits=7), 4, five)


def test_the_largest_weight_is_known_or_given():
    unknown = Federation(4, Cohort(4, 4))
    with pytest.raises(FederationError, match="set max_weight"):
        started(SecureAggregation(), 4, unknown)
    started(SecureAggregation(FedAvg("uniform")), 4, unknown)
    rule = started(SecureAggregation(FedCM()))  # which divides by the way of its steps
    with pytest.raises(FederationError, match="max_weight=10 or more"):
        rule.update(updates())
