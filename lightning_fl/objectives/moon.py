"""MOON: model-contrastive learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.functional.contrastive import model_contrastive_loss
from lightning_fl.objectives.local_network import LocalNetwork, evaluation_copy
from lightning_fl.objectives.recorder import LAST_INPUT, Recorder, Trace
from lightning_fl.objectives.terms import ModelView, Term, TermModule
from lightning_fl.options import check_number


class MOON(Term):
    r"""Pull representations towards the global model, away from the client's previous model.

    Li et al. (2021), eq. 3: with the representations :math:`z` of a sample in the client model,
    :math:`z_{glob}` in the received model and :math:`z_{prev}` in the model of the same client at
    the end of its last round,

    .. math:: -\mu \log \frac{e^{\cos(z, z_{glob}) / \tau}}
        {e^{\cos(z, z_{glob}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}.

    As in the authors' program (QinbinLi/MOON), the two partners are in evaluation mode, with the
    running statistics (BatchNorm) of their own models, and without gradient; the client model is in
    training mode. In the first round of a client, its previous model is the received model, so
    that the term has no gradient. Rounds without the client, or with a dropped update, do not
    change its previous model. ``mu=0`` is FedAvg.

    The representation is the output of a projection head that feeds the classifier. Each step needs
    three forward passes.

    Args:
        mu: Strength :math:`\mu`, at least 0. The paper uses 5 for CIFAR-10, and 1 or 10 for other
            data.
        temperature: Temperature :math:`\tau`, above 0.
        point: Name of the module of the network whose output is the representation. None takes the
            input of the last layer, which must be linear.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if the network cannot
            be traced, or the representation is not found.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_fl import ClientModule
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> module = ClientModule(net, terms=[MOON(mu=1.0)])
    """

    uses_batch = False
    wants_trace = True
    wants_global_trace = False
    stays_local = True
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mu": {"min": 0}}
    previous: LocalNetwork
    received: LocalNetwork

    def __init__(self, mu: float = 5.0, temperature: float = 0.5, point: str | None = None) -> None:
        super().__init__()
        self.mu = check_number("mu", mu, min=0)
        self.temperature = check_number("temperature", temperature, above=0)
        self.points = LAST_INPUT if point is None else [point]
        # In a tuple, so that it is not a submodule.
        self._partner: tuple[Recorder, ...] = ()

    def prepare(self, module: TermModule) -> None:
        """Create the previous model and the running statistics of the received model."""
        self.previous = LocalNetwork(module.net, is_trained=False)
        self.received = LocalNetwork(module.net, is_trained=False, has_parameters=False)
        self._partner = (Recorder(evaluation_copy(module.net), self.points),)

    def build(self, recorder: Recorder, trace: Trace) -> None:
        """Check the representation."""
        if len(trace.activations) != 3:
            raise FederationError(
                f"MOON requires a representation inside the network, and {self.points} is its input"
                " or its output, or is called several times: set point to the name of a module"
                " before the classifier"
            )

    def on_client_start(self, module: TermModule) -> None:
        """Start the previous model of a new client from the received model."""
        self.previous.start(module.net)
        self.received.copy(module.net)

    def on_client_end(self, module: TermModule) -> None:
        """Store the trained model for the next round of the client."""
        self.previous.copy(module.net)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the mean contrastive loss of the samples."""
        z = _representation(client_model.trace)
        z_global, z_previous = (
            self._evaluated(global_model.params | own.tensors(), batch[0])
            for own in (self.received, self.previous)
        )
        losses = model_contrastive_loss(z, z_global, z_previous, self.temperature)
        return self.mu * client_model.module.mean_of(losses)

    def _evaluated(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the representations of a model in evaluation mode."""
        (partner,) = self._partner
        return _representation(partner.fixed(tensors, x))


def _representation(trace: Trace) -> Tensor:
    """Return the activation before the output, ``[batch, features]``."""
    return trace.activations[-2].flatten(1)
