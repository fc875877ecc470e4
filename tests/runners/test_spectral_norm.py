import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import ByLabel

pytestmark = pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
both_forms = pytest.mark.parametrize("form", [parametrizations.spectral_norm, spectral_norm])


def normalized(form):
    torch.manual_seed(0)
    net = nn.Sequential(form(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3)).double()
    return ClientModule(net, optimizer=lambda params: torch.optim.SGD(params, lr=0.5))


@both_forms
@pytest.mark.parametrize("buffers", [None, "server"])
def test_the_aggregated_model_has_a_spectral_norm_of_one(fit, data, form, buffers):
    """Means of unit vectors are shorter than 1, and the server's own fit its first weights."""
    module = normalized(form)
    fit(module, FederatedLoop(buffers=buffers), data(partition=ByLabel(1), num_clients=3))
    layer = module.net[0].eval()
    layer(torch.zeros(1, 6, dtype=torch.float64))  # the older form sets the weight here
    assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) == pytest.approx(1, abs=1e-3)


@both_forms
def test_one_client_trains_as_without_a_federation(trainer, data, form):
    module, plain, samples = normalized(form), normalized(form), data(num_clients=1)
    loop = FederatedLoop(buffers="average", seed=samples.seed)
    trainer(loop).fit(module, datamodule=samples)
    trainer(False).fit(plain, datamodule=data(num_clients=1))
    for name, tensor in plain.net.state_dict().items():
        torch.testing.assert_close(module.net.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:validation and test use the global model")
def test_singular_vectors_that_stay_with_clients_keep_their_initial_values(fit, data):
    """A resumed run takes the first values of new clients from the module."""
    module = normalized(parametrizations.spectral_norm)
    singular_vectors = module.net[0].parametrizations.weight[0]
    before = singular_vectors._u.clone()
    fit(module, FederatedLoop(buffers="average", local_parameters=["net.0.*"]), data())
    assert torch.equal(singular_vectors._u, before)
