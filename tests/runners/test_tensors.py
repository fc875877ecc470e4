"""The tensors of a module, and functions of stacked tensors."""

import pytest
import torch
from torch import nn

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.types import FederationError
from two_classes import samples
from written_plainly import module


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
