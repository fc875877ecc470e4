"""``Trainer(accumulate_grad_batches=...)``: an optimizer step of several local steps."""

import pytest
import torch
from torch.utils.data import TensorDataset

from by_hand import Batches
from lightning_fl.aggregators import FedAvg, FedNova, Scaffold
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import IID
from lightning_fl.policies import Schedule
from lightning_fl.runners import Phase
from lightning_fl.types import FederationError
from only import Only


@pytest.fixture
def regression(data):
    """Two clients with linear targets."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=random, dtype=torch.float64)
    samples = TensorDataset(x, x.sum(1))
    return data(samples, num_clients=2, batch_size=4, val=samples, partition=IID())


def stepwise(module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_the_last_step_of_a_client_updates_it_as_by_hand(fit, linear, regression, flat):
    """Three batches, and gradients of two: steps after the second and the third."""
    found = []
    for clients in ([0], [1], [0, 1]):
        module, seen = linear(), Batches()
        loop = FederatedLoop(FedAvg(weighting="uniform"), Schedule(num_steps=3), Only(clients))
        fit(module, loop, regression, rounds=1, accumulate_grad_batches=2, callbacks=[seen])
        found.append(flat(module))
        if len(clients) == 1:
            weight, batches = flat(linear()).requires_grad_(), seen.rounds[0][clients[0]]
            for group in (batches[:2], batches[2:]):
                loss = sum((x @ weight - y).square().mean() / 2 for x, y in group)
                (gradient,) = torch.autograd.grad(loss, weight)
                weight = (weight - 0.1 * gradient).detach().requires_grad_()
            assert torch.allclose(found[-1], weight, rtol=0, atol=1e-12)
    assert torch.allclose((found[0] + found[1]) / 2, found[2], rtol=0, atol=1e-12)


def test_counts_are_those_of_optimizer_steps(fit, foreign):
    module = foreign(dropout=0.0)
    counts, estimated = [], []

    def configure():
        estimated.append(module.trainer.estimated_stepping_batches)
        return stepwise(module)

    def noted(batch, batch_idx, step=module.training_step):
        counts.append((batch_idx, module.global_step))
        return step(batch, batch_idx)

    module.configure_optimizers, module.training_step = configure, noted
    policy = Schedule(num_steps=3)
    loop = FederatedLoop(policy=policy, buffers="average", clients_per_round=2, check=False)
    fit(module, loop, rounds=2, accumulate_grad_batches=2)
    first, second = [(0, 0), (1, 0), (2, 1)], [(0, 2), (1, 2), (2, 3)]
    assert counts == [*first, *first, *second, *second]
    assert estimated == [4]
    assert [row["num_steps"] for row in loop.rows] == [6, 6]
    assert loop.rows[1]["lr"] == pytest.approx(0.007)  # a scheduler of two optimizer steps


def test_clients_report_the_loss_of_a_batch(fit, foreign):
    losses = []
    for accumulated in (1, 2):
        loop = FederatedLoop(buffers="average")
        fit(foreign(dropout=0.0), loop, rounds=1, accumulate_grad_batches=accumulated)
        losses.append(list(loop.losses_in_the_round.values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("rule", [Scaffold(), FedNova()], ids=lambda rule: type(rule).__name__)
def test_rules_that_count_local_steps_are_refused(fit, linear, regression, rule):
    with pytest.raises(FederationError, match=f"{type(rule).__name__} .* accumulate_grad_"):
        fit(linear(), FederatedLoop(rule), regression, accumulate_grad_batches=2)


def test_optimizers_of_several_gradients_in_a_step_are_refused(fit, foreign):
    module = foreign()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), max_iter=2)
    with pytest.raises(FederationError, match="LBFGS evaluates the loss several times"):
        fit(module, FederatedLoop(buffers="average"), accumulate_grad_batches=2)


def test_phases_are_refused(fit, foreign):
    loop = FederatedLoop(policy=Schedule(phases=[Phase(["net.0.*"])]), buffers="average")
    with pytest.raises(FederationError, match="phases cannot be combined with accumulate_grad"):
        fit(foreign(), loop, accumulate_grad_batches=2)
