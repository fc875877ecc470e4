"""DPFedAvg: the noise itself, what is paid, rounds of nobody, resumption."""

import csv
import math
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from scipy import stats

from lightning_fl import ClientModule
from lightning_fl.aggregators import DPFedAvg, dp_fedavg
from lightning_fl.callbacks import ClientFaults, FederatedLoop, RoundCheckpoint
from lightning_fl.functional.privacy import epsilon
from lightning_fl.policies import (
    DiscreteGaussianReinforce,
    PersonalizedPolicyGradient,
    Schedule,
    Stragglers,
)
from lightning_fl.samplers import PoissonSampler, RoundRobinSampler, UniformSampler
from lightning_fl.types import Cohort, FederationError
from rounds import aggregate, of, sent


def started(server, seed=0, clients=40, sampled=4, **options):
    rule = of(clients, DPFedAvg(**options), sampled, "poisson", seed=seed)
    rule.start(server)
    return rule


def update(*rows, samples=None):
    return sent(torch.tensor(rows, dtype=torch.float64), samples)


@pytest.fixture
def resumable(simulate, tmp_path):
    """Train with a checkpoint after each round, or go on from the last one."""

    def run(rule, rounds=1, resume=False, **options):
        keep = [] if resume else [RoundCheckpoint(str(tmp_path))]
        options |= {"rounds": rounds, "enable_checkpointing": not resume}
        options |= {"ckpt_path": str(tmp_path / "last.ckpt")} if resume else {}
        return simulate(*keep, aggregator=rule, **options)

    return run


def test_without_noise_by_hand():
    """Sums of clipped updates over the expected number of clients, whatever samples they say."""
    rule = started(torch.tensor([1.0, 1.0], dtype=torch.float64), noise_multiplier=0.0)
    rule.update(update([3.0, 4.0], [0.0, 0.5], samples=[1, 1000]))
    assert rule.compute().tolist() == pytest.approx([1 + 0.6 / 4, 1 + 1.3 / 4])
    figures = {"clip_norm": 1.0, "noise": 0.0, "epsilon": math.inf, "delta": 40**-1.1}
    assert rule.metrics() == figures


def test_a_frozen_parameter_that_the_module_changes_is_not_in_the_norm():
    """The server keeps its own, as with a moving average of the trained parameters."""
    rule = started(torch.ones(3).double(), noise_multiplier=0.0, quantile=0.5)
    rule.start(torch.ones(3).double(), torch.tensor([True, True, False]))
    rule.update(update([0.3, 0.4, 100.0]))
    assert rule.compute().tolist() == pytest.approx([1 + 0.3 / 4, 1 + 0.4 / 4, 1.0])
    assert float(rule.clip) == pytest.approx(math.exp(-0.2 * 0.5 / 4))


def test_noise_has_the_variance_that_it_says():
    size = 200_000
    server = torch.zeros(size, dtype=torch.float64)
    rule = started(server, noise_multiplier=1.5, clip_norm=0.2)
    rule.update(sent(torch.zeros(1, size).double()))
    noise = rule.compute()
    deviation = 1.5 * 0.2 / 4
    assert rule.metrics()["noise"] == pytest.approx(deviation)
    assert stats.kstest(noise.numpy() / deviation, "norm").pvalue > 0.001
    assert float(noise.std()) == pytest.approx(deviation, rel=0.01)
    # Another round and another seed have noise of their own, the same round the same.
    rule.start(server)
    again = rule.compute()
    assert abs(float(torch.corrcoef(torch.stack([noise, again]))[0, 1])) < 0.02
    for seed, equal in ((0, True), (1, False)):
        other = started(server, seed=seed, noise_multiplier=1.5, clip_norm=0.2)
        assert torch.equal(other.compute(), noise) is equal


def test_the_norm_follows_the_quantile_by_hand():
    """Andrew et al., 2021, algorithm 1, step by step."""
    zero, clip = torch.zeros(1, dtype=torch.float64), 1.0
    options = {"noise_multiplier": 0.0, "clip_norm": 1.0, "quantile": 0.75, "clip_lr": 0.5}
    rule = started(zero, sampled=2, **options)
    for rows in ([[0.5], [2.0]], [[0.5], [0.6]], [[3.0], [4.0]]):
        aggregate(rule, zero, update(*rows))
        assert rule.metrics()["clip_norm"] == pytest.approx(clip)
        part = sum(abs(row[0]) <= clip for row in rows) / 2
        clip *= math.exp(-0.5 * (part - 0.75))
    assert float(rule.clip) == pytest.approx(clip)


def test_the_count_is_noisy_and_updates_pay_for_it(monkeypatch):
    # With the count, epsilon is that of the noise multiplier, which need not be found 400 times.
    monkeypatch.setattr(dp_fedavg, "epsilon", lambda ledger, delta, cohort: ledger)
    parts = []
    for seed in range(400):
        options = {"quantile": 0.5, "clip_lr": 1.0, "count_noise": 3.0, "noise_multiplier": 2.0}
        rule = started(torch.zeros(1, dtype=torch.float64), seed, 100, 10, **options)
        rule.update(update(*[[0.1]] * 6, *[[9.0]] * 4))
        rule.compute()
        parts.append(0.5 - math.log(float(rule.clip)))
        noise = (2.0**-2 - 6.0**-2) ** -0.5 / 10
        assert rule.metrics()["noise"] == pytest.approx(noise)
    parts = torch.tensor(parts)
    assert float(parts.mean()) == pytest.approx(0.6, abs=4 * 0.3 / 20)
    assert float(parts.std()) == pytest.approx(0.3, rel=0.15)
    assert rule.metrics()["epsilon"] == [(2.0, 1)]


@pytest.mark.parametrize(
    ("sampler", "drawn"), [(PoissonSampler(), "poisson"), (UniformSampler(), "fixed")]
)
def test_epsilon_in_the_table_is_the_accountants(simulate, sampler, drawn):
    rule = DPFedAvg(noise_multiplier=2.0, delta=1e-3)
    options = {"clients_per_round": 3, "clients": 12, "sampler": sampler, "rounds": 2}
    _, loop = simulate(aggregator=rule, **options)
    cohort = Cohort(3, 12, drawn)
    expected = [epsilon([(2.0, t)], 1e-3, cohort) for t in (1, 2)]
    assert [row["epsilon"] for row in loop.rows] == expected
    with open(loop.table_path(loop.fit.trainer)) as file:
        written = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert written == expected


def test_a_resumed_run_adds_what_it_spends(resumable):
    def run(rounds, noise=1.0, **options):
        rule = DPFedAvg(noise, quantile=0.5, count_noise=2.0)
        options = {"client_fraction": 0.5, "sampler": PoissonSampler(), "clients": 8} | options
        return rule, resumable(rule, rounds, **options)[1]

    # Other noise is added up; other cohorts cannot be.
    run(1)
    with pytest.raises(FederationError, match="saved with poisson cohorts of 4 clients, and"):
        run(2, resume=True, sampler=UniformSampler())
    rule, second = run(2, 2.0, resume=True)
    assert rule.ledger == [(1.0, 1), (2.0, 1)]
    cohort = Cohort(4, 8, "poisson")
    assert second.rows[-1]["epsilon"] == epsilon([(1.0, 1), (2.0, 1)], 8**-1.1, cohort)


def test_rounds_of_nobody_are_rounds(simulate, monkeypatch):
    """With coins of 1/8 for 8 clients a third of the rounds is empty, and has its noise."""
    monkeypatch.setattr(dp_fedavg, "epsilon", lambda *_: 1.0)
    rule = DPFedAvg(noise_multiplier=1.0)
    options = {"clients_per_round": 1, "clients": 8, "sampler": PoissonSampler(), "rounds": 12}
    _, loop = simulate(aggregator=rule, **options)
    counts = [row["clients"] for row in loop.rows]
    assert 0 < counts.count(0) < 12
    for row in loop.rows:
        if row["clients"] == 0:
            assert (row["num_samples"], row["num_steps"], row["bytes_up"]) == (0, 0, 0)
            assert (row["dropped"], row["bytes_down"]) == (0, 0)
    assert rule.ledger == [(1.0, 12)]
    assert len({row["val_loss"] for row in loop.rows}) == 12


def test_a_round_in_which_everyone_is_lost_has_its_noise(simulate):
    """Else it would be seen that nobody returned."""
    rule = DPFedAvg(noise_multiplier=1.0)
    _, loop = simulate(ClientFaults(dropout=1.0), aggregator=rule)
    assert [row["dropped"] for row in loop.rows] == [4, 4, 4]
    assert loop.rows[-1]["epsilon"] == epsilon([(1.0, 3)], 4**-1.1, Cohort(4, 4))
    assert len({row["val_loss"] for row in loop.rows}) == 3


def test_buffers_of_clients_are_refused(fit, foreign):
    loop = FederatedLoop(aggregator=DPFedAvg(), buffers="average")
    with pytest.raises(FederationError, match="does not protect buffers that clients change"):
        fit(foreign(), loop)


class Mine(PoissonSampler):
    """Draws in another way than its parent."""

    def sample(self, round, count, num_samples, generator):
        return torch.arange(count)


class Claims(UniformSampler):
    drawn = "poisson"


class Stepwise(ClientModule):
    """A scheduler of steps, or one that watches a metric."""

    def __init__(self, module, monitor=None, is_manual=False):
        super().__init__(module.net)
        self.monitor, self.automatic_optimization = monitor, not is_manual

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.monitor is None:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": schedule, "monitor": self.monitor}]


TWO = [{"lr": 0.1}, {"lr": 0.2}]
REPORTED = DiscreteGaussianReinforce({"lr": [0.1, 0.2]}, loss="clients")
NOISY_COUNT = {"quantile": 0.5, "count_noise": 5.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_clients": 2}, r"requires min_clients=1, got .* would reveal the number"),
        ({"aggregator": DPFedAvg(delta=0.3)}, "delta=0.3 would .* one of 4 .* less than 0.25"),
        ({"aggregator": DPFedAvg(quantile=0.5)}, r"got 0\.2: increase count_noise"),
        (
            {"aggregator": DPFedAvg(**NOISY_COUNT)},
            r"count_noise must be a number in \(0, 4\], got 5.* clients per round",
        ),
        *(
            ({"sampler": sampler}, "no privacy accountant supports this sampling of 2 of 4")
            for sampler in (RoundRobinSampler(), Mine(), Claims())
        ),
        *(
            ({"policy": policy}, "learns from reports of single clients")
            for policy in (PersonalizedPolicyGradient(TWO), Stragglers(0.5, REPORTED))
        ),
        # What one client could pass to the others.
        ({"wrap": Stepwise}, r'counts local steps.*interval="epoch"'),
        ({"wrap": partial(Stepwise, is_manual=True)}, "a scheduler that counts local steps"),
        *(
            ({"callbacks": [EarlyStopping(name)]}, f"EarlyStopping monitors '{name}'")
            for name in ("train_loss", "federation/num_samples")
        ),
        (
            {"wrap": partial(Stepwise, monitor="train_loss")},
            "ReduceLROnPlateau monitors 'train_loss'",
        ),
    ],
)
def test_run_that_cannot_be_private_is_refused(simulate, options, words):
    drawn = {"clients_per_round": 2} if "sampler" in options else {}
    options = {"aggregator": DPFedAvg(), **drawn, **options}
    with pytest.raises(FederationError, match=words):
        simulate(*options.pop("callbacks", ()), **options)


REWARDED = PersonalizedPolicyGradient(TWO, "reward", monitor="loss")


@pytest.mark.parametrize("policy", [REWARDED, Stragglers(0.5, REWARDED)])
def test_reward_that_clients_report_is_refused(fit, foreign, policy):
    loop = FederatedLoop(aggregator=DPFedAvg(), policy=policy)
    with pytest.raises(FederationError, match="PersonalizedPolicyGradient monitors 'loss'"):
        fit(foreign(batchnorm=False), loop)


def test_metrics_of_validation_may_be_monitored(simulate):
    simulate(EarlyStopping("val_loss"), aggregator=DPFedAvg(), rounds=1)


def test_continuations_with_other_options_draw_other_noise(resumable):
    """Else the difference of two models that go on from one checkpoint has no noise."""

    def faster(module):
        module.make_optimizer = partial(torch.optim.SGD, lr=0.1001)
        return module

    def model(rule=None, rounds=2, **options):
        options = {"policy": Schedule(num_steps=1), "resume": rounds == 2} | options
        rule = rule or DPFedAvg(1.0, 1e-6)  # updates are nothing beside the noise
        made, _ = resumable(rule, rounds, **options)
        return made.net.weight.detach() * 1e6

    start = model(rounds=1)
    same = model()
    assert torch.equal(model(), same)
    deviation = float((same - start).std())
    assert deviation > 0.05
    for other in (
        model(DPFedAvg(1.0, 1e-6, delta=0.01)),
        model(DPFedAvg(1.0, 1.0001e-6)),
        model(wrap=faster),
        model(policy=Schedule(num_steps=2)),
    ):
        assert float((other - same).std()) > 0.5 * deviation
    one, two = (
        model(rounds=1, policy=Stragglers(0.5, Schedule(num_steps=1, lr=lr))) for lr in (0.1, 0.2)
    )
    assert float((one - two).std()) > 0.5 * deviation, "a policy within a policy"


def test_policies_do_not_hear_single_clients(simulate):
    heard = []

    class Listens(Schedule):
        def update(self, feedback):
            heard.append(feedback.losses)

    simulate(aggregator=DPFedAvg(), policy=Listens(num_steps=2))
    assert heard == [None] * 3


def test_a_budget_ends_a_run(simulate):
    budget = epsilon([(2.0, 5)], 4**-1.1, Cohort(4, 4)) - 1e-6
    stop = EarlyStopping(
        "federation/epsilon", mode="max", stopping_threshold=budget, check_on_train_epoch_end=True
    )
    _, loop = simulate(stop, aggregator=DPFedAvg(2.0), rounds=9)
    assert len(loop.rows) == 5


def test_a_whole_number_of_noise_goes_on_from_a_checkpoint():
    rule, again = started(torch.zeros(1), noise_multiplier=2), started(torch.zeros(1))
    rule.compute()
    again.set_extra_state(rule.get_extra_state())
    assert again.ledger == [(2.0, 1)]


def test_a_norm_that_is_given_anew_counts_in_a_resumed_run(resumable):
    resumable(DPFedAvg(1.0, 1.0))
    _, found = resumable(DPFedAvg(1.0, 0.5), 2, resume=True)
    assert [row["clip_norm"] for row in found.rows] == [1.0, 0.5]


def test_buffers_stay_the_servers(fit, foreign):
    module = foreign()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    fit(module, FederatedLoop(aggregator=DPFedAvg(), buffers="server"))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])
