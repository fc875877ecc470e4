"""DP-SGD: gradients of single samples, noise, accounting, and what it refuses."""

import csv
import math
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from lightning_fl.aggregators import FedAdam, Scaffold
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint, RunReport
from lightning_fl.contracts.plan import Cohort
from lightning_fl.functional.privacy import clipped_sum, epsilon, sample_epsilon
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.objectives import DPSGD, SampleAccountant
from lightning_fl.optimizers import PFedMe
from lightning_fl.policies import PersonalizedPolicyGradient, Schedule
from lightning_fl.types import FederationError
from two_classes import samples

pytest.importorskip("opacus", reason='needs pip install ".[privacy]"')
SGD = partial(torch.optim.SGD, lr=0.3)


def made(net=None, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) if net is None else net
    given = {"noise_multiplier": 1.0, "clip_norm": 0.5, "batch_size": 6, "delta": 0.01}
    return DPSGD(net, **given | options, optimizer=SGD).double()


def run(fit, module, rounds=2, data=None, callbacks=(), trainer=None, **options):
    options = {"policy": Schedule(num_steps=3), "seed": 1, "clients_per_round": 3} | options
    loop = FederatedLoop(**options)
    data = data or samples(batch_size=None)
    fit(module, loop, data, rounds=rounds, callbacks=callbacks, **trainer or {})
    return loop


def batch(count=9):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(count, 4, generator=random, dtype=torch.float64)
    return x, torch.arange(count) % 2


def gradient(module, given, seed=5):
    torch.manual_seed(seed)
    module.zero_grad()
    loss = module.training_step(given, 0)
    loss.backward()
    return {name: p.grad for name, p in module.net.named_parameters()}, float(loss.detach())


# --- the step -------------------------------------------------------------------------------------


def plainly(module, given, clip, drawn):
    """The clipped sum over drawn samples, with a backward pass for each of them."""
    total = {name: torch.zeros_like(p) for name, p in module.net.named_parameters()}
    losses = []
    for x, y in zip(given[0][drawn], given[1][drawn], strict=True):
        module.zero_grad()
        loss = nn.functional.cross_entropy(module.net(x[None]), y[None])
        loss.backward()
        losses.append(float(loss.detach()))
        own = {name: p.grad.clone() for name, p in module.net.named_parameters()}
        norm = torch.cat([g.flatten() for g in own.values()]).norm()
        for name, g in own.items():
            total[name] += g * min(1.0, clip / float(norm))
    return total, losses


def test_a_step_by_hand():
    """The same random numbers: first the samples, then the noise, parameter by parameter."""
    module, given = made(), batch()
    torch.manual_seed(5)
    drawn = torch.rand(9) < 6 / 9
    expected, losses = plainly(module, given, 0.5, drawn)
    torch.manual_seed(5)
    torch.rand(9)
    noise = {name: torch.randn_like(p) for name, p in module.net.named_parameters()}
    found, loss = gradient(module, given)
    for name, clipped in expected.items():
        right = (clipped + 1.0 * 0.5 * noise[name]) / 6
        torch.testing.assert_close(found[name], right, rtol=0, atol=1e-14)
    assert 0 < drawn.sum() < 9
    assert loss == pytest.approx(sum(losses) / len(losses))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus' own hooks
def test_gradients_are_those_of_opacus():
    """Its GradSampleModule and DPOptimizer, on the same samples and without noise."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module, given = made(noise_multiplier=0.0, batch_size=9, clip_norm=0.7), batch()
    found, _ = gradient(module, given)
    wrapped = GradSampleModule(made(seed=0).net)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.7, "expected_batch_size": 9}
    optimizer = DPOptimizer(torch.optim.SGD(wrapped.parameters(), lr=1.0), **options)
    nn.functional.cross_entropy(wrapped(given[0]), given[1]).backward()
    optimizer.pre_step()
    for (name, grad), p in zip(found.items(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=0, atol=1e-6, msg=name)


def test_many_samples_are_processed_in_parts(monkeypatch):
    expected = gradient(made(batch_size=100), batch(150))
    monkeypatch.setattr("lightning_fl.objectives.dp_sgd.AT_ONCE", 7)
    found = gradient(made(batch_size=100), batch(150))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_a_step_that_draws_nobody_is_noise_alone():
    module = made(batch_size=1, noise_multiplier=2.0, clip_norm=3.0)
    given = batch(1000)
    seed = next(s for s in range(99) if not _drawn(s, 1000, 1).any())
    found, loss = gradient(module, given, seed)
    noise = torch.cat([g.flatten() for g in found.values()])
    assert loss == 0
    assert noise.ne(0).all()
    assert float(noise.square().mean().sqrt()) == pytest.approx(6.0, rel=0.5)


def _drawn(seed, count, size):
    torch.manual_seed(seed)
    return torch.rand(count) < size / count


def test_one_sample_moves_the_sum_by_the_clipping_norm_at_most():
    gradients = {"a": torch.randn(5, 3, 2).double() * 10, "b": torch.randn(5).double()}
    whole = clipped_sum(gradients, 0.3)
    for i in range(5):
        rest = torch.arange(5) != i
        without = clipped_sum({name: g[rest] for name, g in gradients.items()}, 0.3)
        moved = torch.cat([(whole[name] - without[name]).flatten() for name in whole])
        assert float(moved.norm()) <= 0.3 * (1 + 1e-12)
    zero = clipped_sum({"a": torch.zeros(2, 3)}, 1.0)
    assert not zero["a"].any()


# --- accounting -----------------------------------------------------------------------------------


def test_epsilon_is_that_of_opacus_and_of_another_accountant():
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.05, 40), (0.8, 0.1, 7)]
    found = sample_epsilon({(1.1, 0.05): 40, (0.8, 0.1): 7}, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    other = epsilon([(1.0, 100)], 1e-5, Cohort(10, 100, "poisson"))  # dp-accounting
    assert sample_epsilon({(1.0, 0.1): 100}, 1e-5) == pytest.approx(other, rel=0.01)
    assert sample_epsilon({(1.0, 0.1): 3, (0.0, 0.1): 1}, 1e-5) == math.inf
    assert sample_epsilon({}, 1e-5) == sample_epsilon({(0.0, 0.1): 0}, 1e-5) == 0


def test_each_client_has_an_epsilon_and_the_table_the_largest(fit):
    """Clients of different sizes, sampled rarely: nothing is lost while a client does not train."""
    module, taken = made(), dict.fromkeys(range(5), 0)
    data = samples(batch_size=None)
    loop = run(fit, module, rounds=4, data=data, callbacks=[RunReport()])
    for row in loop.rows:
        assert row["sample_epsilon"] > 0
    (accountant,) = [c for c in module.trainer.callbacks if isinstance(c, SampleAccountant)]
    losses = [row["sample_epsilon"] for row in loop.rows]
    assert losses == sorted(losses)
    history = loop.table_path(module.trainer).parent
    for row in csv.DictReader((history / "participation.csv").read_text().splitlines()):
        client = int(row["client"])
        taken[client] = 3 * int(row["rounds"])
        kind = (1.0, min(1.0, 6 / int(data.num_samples[client])))
        expected = sample_epsilon({kind: taken[client]}, 0.01)
        assert float(row["sample_epsilon"]) == pytest.approx(expected, rel=1e-5)
    assert sum(taken.values()) == 4 * 3 * 3
    assert losses[-1] == pytest.approx(max(accountant.epsilons().values()), rel=1e-6)


def test_a_second_fit_of_a_module_adds_to_the_loss_of_the_first(fit):
    whole = run(fit, made(), rounds=4).rows[-1]["sample_epsilon"]
    module = made()
    run(fit, module)
    assert run(fit, module).rows[-1]["sample_epsilon"] > 0.9 * whole


def test_a_round_that_ends_after_its_aggregation_counts(fit):
    module = made()

    def fail(*_):
        raise RuntimeError("in validation")

    with pytest.raises(RuntimeError, match="in validation"):
        run(fit, module, rounds=1, callbacks=[LambdaCallback(on_validation_start=fail)])
    run(fit, module)
    assert sum(sum(steps.values()) for steps in module._steps.values()) == 3 * 3 * 3


# --- refusals -------------------------------------------------------------------------------------


def test_what_it_cannot_serve_is_refused(fit):
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(FederationError, match=r"BatchNorm \(1\) mixes .* GroupNorm"):
        run(fit, made(net), buffers="average")
    with pytest.raises(FederationError, match="set batch_size=None and replacement=False"):
        run(fit, made(), data=samples(batch_size=4))
    with pytest.raises(FederationError, match="replacement=False of the data module"):
        run(fit, made(), data=samples(batch_size=None, replacement=True))
    for optimizer in (partial(torch.optim.LBFGS, max_iter=4), partial(PFedMe, inner_steps=2)):
        several = DPSGD(nn.Linear(4, 2), delta=0.01, optimizer=optimizer).double()
        with pytest.raises(FederationError, match="several noisy gradients in a step, of which"):
            run(fit, several)
    with pytest.raises(FederationError, match="Scaffold adds to the work of clients"):
        run(fit, made(), aggregator=Scaffold())
    policy = PersonalizedPolicyGradient([{"num_steps": 1}, {"num_steps": 2}])
    with pytest.raises(FederationError, match="PersonalizedPolicyGradient learns from contr"):
        run(fit, made(), policy=policy)
    with pytest.raises(FederationError, match=r"delta=0\.5 would allow .* less than 0\.0"):
        run(fit, made(delta=0.5))
    run(fit, made(), aggregator=FedAdam())


def test_steps_of_both_kinds_count_in_a_run_that_is_resumed_with_other_noise(fit, tmp_path):
    expected = run(fit, made(), rounds=4)

    def saved(module, rounds, path=None):
        saver = RoundCheckpoint(dirpath=tmp_path, every_n_rounds=1)
        trainer = {"enable_checkpointing": True, "ckpt_path": path}
        return run(fit, module, rounds=rounds, callbacks=[saver], trainer=trainer)

    saved(made(), 2)
    loop = saved(made(seed=7, noise_multiplier=2.0), 4, tmp_path / "last.ckpt")
    last = loop.rows[-1]["sample_epsilon"]
    assert loop.rows[1]["sample_epsilon"] < last < expected.rows[-1]["sample_epsilon"]


def test_random_numbers_depend_on_seed_round_and_client_alone(fit):
    """Each client starts its own stream, whoever trains before it."""
    states = []

    class Noted(DPSGD):
        def training_step(self, batch, batch_idx):
            if not batch_idx:
                states.append(torch.get_rng_state())
            return super().training_step(batch, batch_idx)

    module = Noted(nn.Linear(4, 2), batch_size=6, delta=0.01, optimizer=SGD).double()
    run(fit, module, rounds=1, clients_per_round=5)
    for client in range(5):
        random = generator(1, RandomStream.CLIENT, 0, client)
        assert any(torch.equal(random.get_state(), state) for state in states)
