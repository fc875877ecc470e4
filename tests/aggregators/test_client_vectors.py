"""What Scaffold and FedDyn share: each client keeps a vector, and the server their mean."""

from functools import partial

import pytest
import torch

from lightning_fl import VectorizedClients
from lightning_fl.aggregators import FedAvg, FedDyn, Scaffold, Staged
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule
from two_classes import samples
from written_plainly import Lost, module, vector

#: Rules, the names of what clients keep, and what the server has.
RULES = [
    (Scaffold, "control", lambda r: r.control),
    (partial(FedDyn, 0.1), "gradient", lambda r: r.h),
]
every_rule = pytest.mark.parametrize(("make", "name", "mean"), RULES, ids=["Scaffold", "FedDyn"])


def kept(loop, name, part=0):
    """The vectors that clients keep, with zeros for those that have none."""
    rows = [rows[f"part.{part}.{name}"] for rows in loop.store.rows.values()]
    return torch.stack(rows + [torch.zeros_like(rows[0])] * (5 - len(rows)))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@every_rule
@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_dropped_client_keeps_its_vector(fit, make, name, mean):
    rule, made = make(), module()
    loop = FederatedLoop(rule, Schedule(num_steps=2), seed=1)
    fit(made, loop, samples(), rounds=1, callbacks=[Lost(2)])
    assert sorted(loop.store.rows) == [0, 1, 3, 4]
    own = kept(loop, name)
    close(mean(rule), own.mean(0))
    if isinstance(rule, FedDyn):  # it counts in the divisor of h only
        close(vector(made), vector(module()) - own.sum(0) / 0.1 / 4 - own.sum(0) / 0.1 / 5)


@every_rule
@pytest.mark.filterwarnings("ignore:.*dropped", "ignore:.*too few")
def test_vectors_change_in_a_round_that_keeps_the_model(fit, make, name, mean):
    rule, made = make(), module()
    loop = FederatedLoop(rule, Schedule(num_steps=2), seed=1, min_clients=3)
    fit(made, loop, samples(), rounds=2, callbacks=[Lost(2, 3, 4)])
    assert torch.equal(vector(made), vector(module()))
    assert mean(rule).abs().sum() > 0
    close(mean(rule), kept(loop, name).mean(0))


@every_rule
@pytest.mark.parametrize("group_size", [None, 2])
def test_frozen_parameters_have_no_vector_and_do_not_move(fit, make, name, mean, group_size):
    made, rule = module(), make()
    made.net.bias.requires_grad_(False)
    user = made if group_size is None else VectorizedClients(made, group_size, compile=False)
    loop = FederatedLoop(rule, Schedule(num_steps=2), seed=1, clients_per_round=3)
    fit(user, loop, samples())
    assert torch.equal(made.net.bias, module().net.bias)
    assert mean(rule)[:8].abs().sum() > 0
    assert not mean(rule)[8:].any()
    assert not kept(loop, name)[:, 8:].any()


@every_rule
def test_it_may_be_one_stage_of_several(fit, make, name, mean):
    """Its vectors rest in the other stage, and go on from where they were."""
    rule = Staged([1, 1], [make(), FedAvg("uniform"), make()])
    loop = fit(module(), FederatedLoop(rule, Schedule(num_steps=2), seed=1), samples())
    assert [row["stage"] for row in loop.rows] == [1, 2, 3]
    for stage, part in ((0, 0), (2, 1)):
        close(mean(rule.rules[stage]), kept(loop, name, part).mean(0))
