import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import ByLabel


@pytest.mark.parametrize("normalized", [parametrizations.spectral_norm, spectral_norm])
@pytest.mark.parametrize("buffers", [None, "server"])
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_the_aggregated_model_has_a_spectral_norm_of_one(fit, data, normalized, buffers):
    """Means of unit vectors are shorter than 1, and the server's own fit its first weights."""
    torch.manual_seed(0)
    layer = normalized(nn.Linear(6, 8))
    net = nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 3)).double()
    module = ClientModule(net, optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
    fit(module, FederatedLoop(buffers=buffers), data(partition=ByLabel(1), num_clients=3))
    layer.eval()
    layer(torch.zeros(1, 6, dtype=torch.float64))  # the older form sets the weight here
    assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) == pytest.approx(1, abs=1e-3)
