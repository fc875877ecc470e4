"""The tensors of a module, and functions of stacked tensors."""

import pytest
import torch
from torch import nn

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.runners import VectorizedClients
from lightning_fl.runners.tensors import beside, flatten, is_equal, scattered, select, unflatten
from lightning_fl.types import FederationError
from two_classes import samples
from written_plainly import module


@pytest.mark.parametrize("wrap", [lambda m: m, VectorizedClients], ids=["plain", "vectorized"])
@pytest.mark.parametrize("name", ["weight", "added"])
def test_a_parameter_that_was_added_or_replaced_is_refused(fit, wrap, name):
    made = module()

    def change():
        if made.current_epoch == 1:
            made.net.register_parameter(name, nn.Parameter(made.net.weight.detach().clone()))

    made.on_train_epoch_start = change
    with pytest.raises(FederationError, match=f"net.{name} .* added or replaced during the fit"):
        fit(wrap(made), FederatedLoop(), samples(), rounds=2)
    made.on_train_epoch_start = lambda: made.net.bias.data.copy_(torch.ones(2))
    fit(wrap(made), FederatedLoop(), samples(), rounds=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_stack_is_rows_and_back(shape, dtype):
    like = torch.zeros(shape, dtype=dtype)
    stack = torch.arange(4.0).view(4, *[1] * len(shape)).expand(4, *shape).to(dtype)
    rows = flatten(stack)
    assert rows.shape == (4, like.numel())
    assert torch.equal(unflatten(rows, like), stack)


def test_rows_of_some_clients_return_to_their_places():
    values, rows = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])
    assert select(values, rows).tolist() == [[3], [1]]
    assert scattered(values[:2], rows, 3).tolist() == [[2], [0], [1]]


def test_one_value_for_each_client_multiplies_its_part_of_a_stack():
    stack = torch.ones(2, 3, 1)
    assert (beside(torch.tensor([2.0, 5.0]), stack) * stack)[:, :, 0].tolist() == [[2] * 3, [5] * 3]


def test_equal_means_bit_for_bit_and_as_many():
    nan = [torch.tensor([1.0, torch.nan])]
    assert is_equal(nan, [nan[0].clone()])
    assert not is_equal(nan, [])
    assert not is_equal([torch.ones(1)], [torch.ones(1) + 1e-7])
