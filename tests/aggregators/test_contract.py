"""What every server rule keeps to; a new one earns these tests with one row."""

# ruff: noqa: F403, F405

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from lightning_fl.aggregators import *
from lightning_fl.aggregators.robust import RobustAggregator
from lightning_fl.types import ClientUpdate
from rounds import aggregate, of, with_buffers


def of_twenty(rule, sampled=5, **options):
    return of(20, rule, sampled, num_samples=torch.full((20,), 30), **options)


RULES = {
    "FedAvg": FedAvg,
    "FedAvg(uniform)": lambda: FedAvg(weighting="uniform"),
    "FedOpt": FedOpt,
    "Downpour": Downpour,
    "FedAvgM": FedAvgM,
    "FedAdagrad": FedAdagrad,
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
    "FedControl": FedControl,
    "FedCostWAvg": FedCostWAvg,
    "FedPIDAvg": FedPIDAvg,
    "ClusteredFL": ClusteredFL,
    "ClusteredFL(splits)": lambda: ClusteredFL(eps1=99.0, eps2=0.0, warmup=0),
    "Gossip": lambda: of_twenty(Gossip("ring")),
    "FedALA": FedALA,
    "FedAMP": lambda: of_twenty(FedAMP()),
    "FedAMP(cosine)": lambda: of_twenty(FedAMP(similarity="cosine")),
    "HeteroFL": lambda: of_twenty(HeteroFL()),
    "IFCA": lambda: of_twenty(IFCA(3)),
    "CoordinateMedian": CoordinateMedian,
    "TrimmedMean": TrimmedMean,
    "Krum": Krum,
    "FedNova": FedNova,
    "FedBuff": lambda: FedBuff(lr=0.5),
    "FedAsync": FedAsync,
    "Scaffold": lambda: of_twenty(Scaffold()),
    "Scaffold(samples)": lambda: of_twenty(Scaffold(lr=0.5, weighting="samples")),
    "FedDyn": lambda: of_twenty(FedDyn()),
    "FedExP": FedExP,
    "FedCM": FedCM,
    "PowerOfChoice": lambda: of_twenty(PowerOfChoice()),
    "QFedAvg": lambda: QFedAvg(2.5),
    "AFL": lambda: of_twenty(AFL(gamma=0.1), 20),
    "AFL(samples)": lambda: of_twenty(AFL(initial="samples"), 20),
    "GeometricMedian": GeometricMedian,
    "NormClipping": NormClipping,
    # Without a module there are no adapters; these have test files of their own.
    "FlexLoRA": FlexLoRA,
    "ZeroPadding": lambda: ZeroPadding(weighting="norm"),
    # Without its noise; how clients are drawn a FederatedLoop says.
    "DPFedAvg": lambda: of_twenty(DPFedAvg(0.0, clip_norm=0.5), drawn="poisson"),
    "SecureAggregation": lambda: of_twenty(SecureAggregation(FedAvgM(), clip=9.0, max_weight=50.0)),
    "Staged": lambda: Staged([1], [FedAvg(), FedAdam()]),
}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
every_shape = pytest.mark.parametrize("size", [1, 7])
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def problem(k=5, size=7, dtype=torch.float64, seed=0):
    """A server and the updates of ``k`` clients."""
    generator = torch.Generator().manual_seed(seed)
    server = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    delta = torch.randn(k, size, generator=generator, dtype=torch.float64).to(dtype)
    num_samples = torch.randint(1, 50, (k,), generator=generator)
    before, after = 0.5 + torch.rand(2, k, generator=generator)
    change = torch.randn(k, size, generator=generator, dtype=torch.float64).to(dtype)
    extras = {"loss_before": before, "loss_after": after, "control_change": change}
    extras["cluster"] = torch.arange(k) % 3.0
    steps = torch.randint(1, 9, (k,), generator=generator)
    lr = torch.full((k,), 0.1, dtype=torch.float64)
    return server, ClientUpdate(torch.arange(k), delta, num_samples, steps, lr, extras)


def rows(update, order):
    return update.select(torch.tensor(order))


@every_rule
@every_shape
@every_dtype
def test_the_server_is_a_fixed_point_when_clients_equal_it(make, size, dtype):
    server, update = problem(size=size, dtype=dtype)
    still = replace(update, delta=torch.zeros_like(update.delta))
    rule = make()
    for _ in range(3):
        assert torch.equal(aggregate(rule, server, still), server)


@every_rule
@every_shape
@every_dtype
def test_dtype_and_shape_are_the_servers(make, size, dtype):
    server, update = problem(size=size, dtype=dtype)
    for rule in (make(), copy.deepcopy(make()), pickle.loads(pickle.dumps(make()))):
        found = aggregate(rule, server, update)
        assert (found.shape, found.dtype) == ((size,), dtype)
        assert found.isfinite().all()
        assert not torch.equal(found, server)


@every_rule
def test_inputs_are_left_untouched(make):
    server, update = problem()
    copies = copy.deepcopy((server, update))
    found = aggregate(make(), server, update)
    found += 1
    assert torch.equal(server, copies[0])
    for name in ("clients", "delta", "num_samples"):
        assert torch.equal(getattr(update, name), getattr(copies[1], name))
    assert all(torch.equal(update.extras[name], copies[1].extras[name]) for name in update.extras)


@every_rule
def test_what_becomes_of_an_update_later_does_not_matter(make):
    server, update = problem()
    expected = aggregate(make(), server, update)
    rule = make()
    rule.start(server)
    rule.update(update)
    update.delta.zero_()
    assert torch.equal(rule.compute(), expected)


@every_rule
@every_dtype
def test_order_and_grouping_of_clients_do_not_change_a_bit(make, dtype):
    server, update = problem(k=9, dtype=dtype)
    expected = aggregate(make(), server, update)
    for order in ([8, 7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 0, 5, 8, 2, 6, 7]):
        assert torch.equal(aggregate(make(), server, rows(update, order)), expected)
        one_by_one = [rows(update, [i]) for i in order]
        assert torch.equal(aggregate(make(), server, *one_by_one), expected)
        in_two = rows(update, order[:4]), rows(update, order[4:])
        assert torch.equal(aggregate(make(), server, *in_two), expected)


@every_rule
def test_a_round_knows_nothing_of_updates_before_its_start(make):
    server, update = problem()
    _, other = problem(seed=1)
    rule = make()
    rule.start(server + 5)
    rule.update(other)
    rule.start(server)
    rule.reset()
    rule.update(update)
    assert torch.equal(rule.compute(), aggregate(make(), server, update))


@every_rule
def test_the_value_may_be_asked_for_twice(make):
    server, update = problem()
    rule = make()
    first = aggregate(rule, server, update)
    assert torch.equal(rule.compute(), first)


@every_rule
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_the_server_stays_when_nobody_returned(make):
    server, _ = problem()
    assert torch.equal(aggregate(make(), server), server)


@every_rule
def test_its_state_is_saved_and_loaded_between_rounds(make, tmp_path):
    rule, again = make(), make()
    server, update = problem()
    server = aggregate(rule, server, update)
    assert "server" not in rule.state_dict()  # the module's checkpoint has it already
    torch.save(rule.state_dict(), tmp_path / "rule.pt")
    again.start(server)
    again.load_state_dict(torch.load(tmp_path / "rule.pt", weights_only=True))
    _, update = problem(seed=1)
    assert torch.equal(aggregate(rule, server, update), aggregate(again, server, update))


@every_rule
def test_a_skipped_round_has_no_metrics_of_an_earlier_one(make):
    """A resumed run has not computed the earlier round, so that its table would differ."""
    rule, again = make(), make()
    server, update = problem()
    server = aggregate(rule, server, update)
    again.start(server)
    again.load_state_dict(copy.deepcopy(rule.state_dict()))
    found = []
    for each in (rule, again):
        each.start(server)
        each.conclude(0, 1)
        found.append(each.metrics())
    assert found[0] == found[1]


@every_rule
def test_a_rule_may_go_on_with_a_model_of_another_size(make):
    if isinstance(make(), Staged):
        pytest.skip("it goes on with the next stage")
    rule = make()
    aggregate(rule, *problem(size=7))
    server, update = problem(size=3)
    assert torch.equal(aggregate(rule, server, update), aggregate(make(), server, update))


@every_rule
def test_every_client_starts_from_a_model_of_the_servers_size(make):
    server, _ = problem()
    rule = make()
    rule.start(server)
    assert rule.models_for(torch.tensor([4, 0, 2])).shape == (3, 7)
    assert torch.equal(rule.models_for(torch.tensor([1]))[0], server)


@pytest.mark.parametrize(
    "make",
    [Downpour, FedAvgM, FedBuff, FedCM, FedDyn, FedExP, FedNova, QFedAvg, Scaffold, FedControl],
)
def test_buffers_are_averaged_and_change_nothing_else(make):
    """Four parameters and three buffers, of one client or of another size."""
    server, update = problem()
    extras = update.extras | {"control_change": update.extras["control_change"][:, :4]}
    update, found = replace(update, num_samples=torch.full((5,), 3), extras=extras), []
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    for factor in (1.0, 100.0):
        rule, delta = of_twenty(make(), layout=with_buffers(4, 3)), update.delta.clone()
        delta[:, 4:] *= factor
        found.append(aggregate(rule, server, replace(update, delta=delta)))
        if make is not FedControl:  # which has weights of its own
            mean = server[4:] + weights @ delta[:, 4:]
            torch.testing.assert_close(found[-1][4:], mean, rtol=0, atol=1e-12)
    assert torch.equal(found[0][:4], found[1][:4])


@every_rule
def test_nothing_of_a_client_stays_in_memory(make):
    keeps = ClusteredFL | Downpour | FlexLoRA | Gossip | FedControl | Staged | RobustAggregator
    keeps |= PowerOfChoice | FedAMP | IFCA
    if isinstance(make(), keeps):
        pytest.skip("it keeps updates until all are there, or figures of clients")
    server, update = problem(k=1)
    rule = make()
    sizes = []
    for count in (1, 20):
        aggregate(rule, server, *[update] * count)
        tensors = [*rule.metric_state.values(), *rule.buffers()]
        sizes.append(sum(t.numel() for t in tensors))
    assert sizes[0] == sizes[1]
