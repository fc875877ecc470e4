"""One client at a time: a module's own parameters, in place."""

import pytest
import torch
from torch import nn

from lightning_fl.runners import SequentialRunner, client_runner
from lightning_fl.types import FederationError, ServerState


class Pair(nn.Module):
    """A matrix and a number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor(5.0))


def sequential(kind=torch.optim.SGD, keep=False, **options):
    module = Pair()
    return client_runner(module, "average", kind(module.parameters(), lr=0.1, **options), keep)


def step(runner, gradient=1.0):
    for parameter in runner.module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    runner.optimizer.step()


def load(runner, rows):
    now = runner.read()
    runner.load(ServerState(now.vector[None], now.counters), [rows], [0.1])


def test_a_module_that_is_not_vectorized_trains_in_itself(foreign):
    module = foreign()
    runner = client_runner(module, "average", torch.optim.SGD(module.parameters()), False)
    assert type(runner) is SequentialRunner
    assert runner.module is module


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
    ],
)
def test_a_client_goes_on_with_its_optimisers_state(kind, options):
    """Two steps in two rounds are two steps in one, bit for bit, where the server stays."""
    ends = []
    for rounds in (1, 2):
        made = sequential(kind, keep=True, **options)
        step(made, 1.0)
        if rounds == 2:
            now, rows = made.read(), {n: r.clone() for n, r in made.rows()[0].items()}
            made.write(ServerState(torch.zeros(5), now.counters))
            kept = {name: row.clone() for name, row in rows.items()}
            made.write(now)
            load(made, rows)
        step(made, 3.0)
        ends.append(made.read().vector)
    assert torch.equal(*ends)
    # What was kept is another round's too: a step must not reach into it.
    assert all(torch.equal(rows[name], kept[name]) for name in kept)


def test_a_state_that_is_not_a_tensor_cannot_be_kept():
    made = sequential(keep=True)
    made.optimizer.state[made.module.bias] = {"momentum_buffer": None}
    assert made.rows() == [{}]
    made.optimizer.state[made.module.bias] = {"history": [1, 2]}
    with pytest.raises(FederationError, match=r"does not support SGD.* history.* Choose .*reset"):
        made.rows()


def test_what_a_client_starts_from_is_handed_over_and_taken_back():
    made = sequential()
    made.module.federated_global_parameters = {}
    load(made, {})
    step(made)
    assert made.module.federated_global_parameters["bias"].item() == 5
    assert made.module.federated_global_parameters["weight"].tolist() == [[1, 2], [3, 4]]
    assert made.module.bias.item() != 5
    made.close()
    assert made.module.federated_global_parameters == {}
