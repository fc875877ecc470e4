"""FedNTD: keep what the global model knows of the other classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fl.functional.distillation import not_true_divergence
from lightning_fl.objectives.local_network import NET, LocalNetwork, evaluation_copy
from lightning_fl.objectives.terms import ModelView, Term, TermModule
from lightning_fl.options import check_number


class FedNTD(Term):
    r"""Keep predictions for the classes other than the true one near the global model.

    FedNTD (Lee et al., 2022, eq. 4 to 6): with the softmax :math:`\tilde q` of
    :math:`z_c / \tau` over all classes :math:`c \neq y`, of the client model and of the received
    model :math:`w^t`,

    .. math:: \beta \tau^2 \, \mathrm{KL}(\tilde q_{w^t} \,\|\, \tilde q_w).

    The received model is in evaluation mode and constant. It is one more forward pass per step.
    ``beta=0``, and two classes, are FedAvg.

    Args:
        beta: Strength :math:`\beta`, at least 0. A policy may set it for each round and client.
        temperature: Temperature :math:`\tau`, above 0.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> from lightning_fl import ClientModule
        >>> module = ClientModule(nn.Linear(4, 3), terms=[FedNTD()])
    """

    uses_batch = False
    stays_local = True
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"beta": {"min": 0}}
    received: LocalNetwork

    def __init__(self, beta: float = 1.0, temperature: float = 1.0) -> None:
        super().__init__()
        self.beta = check_number("beta", beta, min=0)
        self.temperature = check_number("temperature", temperature, above=0)
        # In a tuple, so that it is not a submodule.
        self._teacher: tuple[nn.Module, ...] = ()

    def prepare(self, module: TermModule) -> None:
        """Create the running statistics of the received model."""
        self.received = LocalNetwork(module.net, is_trained=False, has_parameters=False)
        self._teacher = (evaluation_copy(module.net),)

    def on_client_start(self, module: TermModule) -> None:
        """Note the running statistics of the received model."""
        self.received.copy(module.net)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the mean divergence of the samples."""
        tensors = global_model.params | self.received.tensors()
        own = {name.removeprefix(f"{NET}."): tensor for name, tensor in tensors.items()}
        with torch.no_grad():
            logits = functional_call(self._teacher[0], own, (batch[0],))
        divergences = not_true_divergence(client_model.outputs, logits, batch[1], self.temperature)
        return self.beta * client_model.module.mean_of(divergences)
