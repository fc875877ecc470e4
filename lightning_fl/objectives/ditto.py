"""Ditto: a personal model for each client, regularized towards the global model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightning_fl.functional.proximal import proximal_penalty
from lightning_fl.objectives.local_network import LocalNetwork
from lightning_fl.objectives.parameter_groups import ParameterGroup
from lightning_fl.objectives.terms import ModelView, Term, TermModule
from lightning_fl.options import check_number


class Ditto(Term):
    r"""Train a personal model :math:`v_k` beside the client model (Li et al., 2021, Algorithm 1).

    In each local step the personal model of client :math:`k` makes a step on the same batch as the
    client model,

    .. math:: v_k \leftarrow v_k
        - \eta_p \bigl(\nabla f_k(v_k) + \lambda (v_k - x)\bigr),

    where :math:`x` is the model that the client received in this round. The client model is
    trained and aggregated as without the term, for any :math:`\lambda`, so Ditto can be combined
    with any aggregation rule. (Dropout draws other masks, since it also draws those of
    :math:`v_k`. Rules that divide by the learning rate, such as
    :class:`~lightning_fl.aggregators.Scaffold`, require ``lr_factor=1``.) :math:`\lambda = 0`
    trains :math:`v_k` on local samples only.

    The personal model has its own optimizer state and its own running statistics (BatchNorm). It
    stays on the client; in rounds without the client, or if its update is dropped, it does not
    change. A new client starts from the received model. ``train_loss`` includes the loss of the
    personal model and the penalty. :class:`~lightning_fl.callbacks.PersonalizedEvaluation`
    evaluates the personal model in the column ``kept``.

    Args:
        strength: Strength :math:`\lambda`, at least 0. The paper uses 1, or the best of 0.1, 1 and
            2. The step is stable for :math:`\eta_p \lambda < 2`.
        lr_factor: Ratio :math:`\eta_p / \eta` of the learning rates of the personal model and of
            the client model.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if gradients are
            clipped by their joint norm, or another term has a personal model, too.

    Example:
        >>> from torch import nn
        >>> from lightning_fl import ClientModule
        >>> module = ClientModule(nn.Linear(4, 3), terms=[Ditto(strength=0.1)])
    """

    uses_batch = False
    stays_local = True
    is_independent = True
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"strength": {"min": 0}}
    personal: LocalNetwork

    def __init__(self, strength: float = 1.0, lr_factor: float = 1.0) -> None:
        super().__init__()
        self.strength = check_number("strength", strength, min=0)
        self.lr_factor = check_number("lr_factor", lr_factor, above=0)

    def prepare(self, module: TermModule) -> None:
        """Create the personal model."""
        self.personal = LocalNetwork(module.net, is_trained=True)

    def on_client_start(self, module: TermModule) -> None:
        """Start the personal model of a new client from the received model."""
        self.personal.start(module.net)

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the loss of the personal model and its penalty."""
        loss = client_model.module.loss_with(batch, self.personal.tensors())
        v = self.personal.parameters_by_name()
        x = (global_model.params[name] for name in v)
        return loss + proximal_penalty(v.values(), x, self.strength)

    def personal_model(self, module: TermModule) -> dict[str, Tensor]:
        """Return the personal model of the client."""
        return self.personal.tensors()

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Return the parameters of the personal model with their learning rate."""
        if self.lr_factor == 1:
            return ()
        return [ParameterGroup(list(self.personal.parameters()), self.lr_factor)]
