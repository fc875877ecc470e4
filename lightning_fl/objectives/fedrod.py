"""Fed-RoD: a balanced shared model, and a personal head beside its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.functional.calibration import balanced_logits
from lightning_fl.objectives.calibrated import CalibratedLoss
from lightning_fl.objectives.local_network import NET
from lightning_fl.objectives.recorder import LAST_INPUT, Recorder
from lightning_fl.objectives.terms import ModelView, TermModule
from lightning_fl.options import check_number


class FedRoD(CalibratedLoss):
    r"""Train the shared model with balanced logits, and a personal head beside its last layer.

    Fed-RoD (Chen and Chao, 2022), with logits :math:`z`, the input :math:`f` of the last layer, the
    personal head :math:`P_k` and :math:`n_c` training samples of class :math:`c` on the client:

    .. math:: \mathrm{CE}(z_c + \gamma \log n_c) + \mathrm{CE}(\bar z + P_k \bar f)

    The first loss replaces the cross-entropy in training and trains the shared model. Classes that
    the client does not have leave its softmax. :math:`\bar z` and :math:`\bar f` have no gradient:
    the second loss trains :math:`P_k` only, which stays with the client.
    :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates :math:`z + P_k f` in the
    column ``kept``; since the last layer is linear, it is the network with the sum of both heads.
    A new client has :math:`P_k = 0`, so that it predicts as the shared model.

    With ``gamma=0`` the shared model is that of the rule without the term, such as FedAvg. The
    variant with heads that are generated from class shares is not implemented.

    Args:
        gamma: Exponent :math:`\gamma` of the class counts, at least 0. The paper uses 1. A policy
            may set it for each round and client.

    Raises:
        FederationError: If ``gamma`` is negative. At the start of a fit, if the labels of the data
            are not classes; if the network cannot be traced, or does not end with a linear layer
            that is trained; if gradients are clipped by their joint norm, or another term has a
            personal model, too.

    Example:
        >>> from lightning_fl import ClientModule
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> module = ClientModule(net, terms=[FedRoD()])
    """

    wants_trace = True
    wants_global_trace = False
    points = LAST_INPUT
    stays_local = True
    is_independent = True
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"gamma": {"min": 0}}

    def __init__(self, gamma: float = 1.0) -> None:
        super().__init__()
        self.gamma = check_number("gamma", gamma, min=0)
        #: Personal head, with the shapes of the last layer, from the start of a fit.
        self.head = nn.ParameterDict()
        self._layer = ""

    def prepare(self, module: TermModule) -> None:
        """Create the personal head, which is 0."""
        super().prepare(module)
        self._layer = str(Recorder(module.net, LAST_INPUT).last_layer)
        layer = module.net.get_submodule(self._layer)
        every = [id(param) for _, param in module.net.named_parameters(remove_duplicate=False)]
        if any(not p.requires_grad or every.count(id(p)) > 1 for p in layer.parameters()):
            raise FederationError(
                f"FedRoD adds a personal head to the last layer, {self._layer}, which is frozen or"
                " shares a parameter: train it with parameters of its own, or remove the term"
            )
        zeros = {name: torch.zeros_like(param) for name, param in layer.named_parameters()}
        self.head = nn.ParameterDict(zeros)

    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the balanced logits."""
        return balanced_logits(logits, counts, self.gamma)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the change of the loss of the shared model, plus the loss of the personal one."""
        balanced = super().forward(client_model, global_model, batch)
        module, trace, logits = client_model.module, client_model.trace, client_model.outputs
        personal = F.linear(trace.activations[-2].detach(), **self.head)
        losses = F.cross_entropy(logits.detach() + personal, batch[1], reduction="none")
        return balanced + module.mean_of(losses)

    def personal_model(self, module: TermModule) -> dict[str, Tensor]:
        """Return the last layer of the module plus the personal head."""
        layer = module.net.get_submodule(self._layer)
        return {
            f"{NET}.{self._layer}.{name}": param + self.head[name]
            for name, param in layer.named_parameters()
        }
