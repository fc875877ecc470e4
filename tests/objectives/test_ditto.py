"""Ditto: by hand, its limits, and what it refuses."""

import pytest
import torch
from torch import nn

from by_hand import LR, Both, copied, module, moved, task_gradient
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.objectives import APFL, Ditto
from lightning_fl.optimizers import PFedMe
from lightning_fl.policies import Schedule
from lightning_fl.runners import Phase
from lightning_fl.types import FederationError


@pytest.mark.parametrize("batchnorm", [False, True])
def test_by_hand(run, batchnorm):
    """Clients are absent in some rounds; the anchor is the received model, not the local one."""
    strength, factor = 0.7, 0.5
    scores = PersonalizedEvaluation(steps=0)
    both = Both(run, lambda: module(Ditto(strength, factor), batchnorm=batchnorm), [scores])
    assert {len(clients) for clients in both.rounds} == {3}
    personal = {}

    def train(client, x, buffers, batches):
        if client not in personal:
            personal[client] = dict(x), copied(buffers)
        y, (v, statistics) = x, personal[client]
        for batch in batches:
            grads = task_gradient(v, statistics, batch)
            grads = {n: g + strength * (v[n] - x[n]) for n, g in grads.items()}
            v = moved(v, grads, factor * LR)
            y = moved(y, task_gradient(y, buffers, batch))
        personal[client] = v, statistics
        return y, buffers

    params, buffers = both.assert_trained_as(train)
    for client, (v, statistics) in personal.items():
        both.assert_kept(client, {**v, **statistics})
        assert scores.rows[client]["kept"] == both.accuracy(client, v, statistics)
        assert scores.rows[client]["server"] == both.accuracy(client, params, buffers)


def test_what_does_not_go_with_a_personal_model_is_refused(fit, data):
    with pytest.raises(FederationError, match="two personal models"):
        fit(module(Ditto(), APFL()), datamodule=data())
    with pytest.raises(FederationError, match="PFedMe cannot train the second model of Ditto"):
        fit(module(Ditto(), optimizer=PFedMe), datamodule=data())
    with pytest.raises(FederationError, match=r"LBFGS .* Ditto .* use SGD or Adam"):
        fit(module(Ditto(), optimizer=torch.optim.LBFGS), datamodule=data())
    policy = Schedule(phases=[Phase("shared")])
    loop = FederatedLoop(policy=policy, local_parameters=["net.3.*"])
    with pytest.raises(FederationError, match=r"phases train no .* Ditto.*'terms\.0\.\*'"):
        fit(module(Ditto()), loop, datamodule=data())

    class Own(ClientModule):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(FederationError, match=r"Own\.configure_optimizers does not set them"):
        fit(Own(nn.Linear(6, 3), [Ditto(lr_factor=0.5)]).double(), datamodule=data())


@pytest.mark.parametrize("wrap", [lambda m: m, VectorizedClients])
def test_an_optimizer_without_the_personal_model_is_refused(wrap, fit, data):
    net = nn.Linear(6, 3)
    user = module(Ditto(), optimizer=lambda _: torch.optim.SGD(net.parameters(), lr=0.1))
    user.net = net.double()
    with pytest.raises(FederationError, match=r"leaves out .* Ditto.* self\.parameters\(\)"):
        fit(wrap(user), datamodule=data(), rounds=1)
