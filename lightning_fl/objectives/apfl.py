"""APFL: a learned mixture of a local model and the global model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.functional.interpolation import interpolate
from lightning_fl.objectives.local_network import LocalNetwork
from lightning_fl.objectives.parameter_groups import ParameterGroup
from lightning_fl.objectives.terms import ModelView, Term, TermModule
from lightning_fl.options import check_flag, check_number


class APFL(Term):
    r"""Mix a local model :math:`v` with the shared model :math:`w` (Deng et al., 2020, Alg. 1).

    The personal model of a client is :math:`\bar v = \alpha v + (1 - \alpha) w`, a mixture of
    parameters. In a local step, all three are updated on the same batch from their values before
    the step:

    .. math:: w &\leftarrow w - \eta \nabla f(w), \\
        v &\leftarrow v - \eta\, \alpha \nabla f(\bar v), \\
        \alpha &\leftarrow \Pi_{[0, 1]}
            \bigl(\alpha - \eta \langle v - w, \nabla f(\bar v) \rangle\bigr).

    :math:`w` is trained and aggregated as without the term. (Dropout draws other masks, since it
    also draws those of :math:`\bar v`.) :math:`v` and :math:`\alpha` stay on the client; in rounds
    without the client, or if its update is dropped, they do not change. A new client starts with
    :math:`v = w`, the received model. A constant :math:`\alpha` of 0 is FedAvg, and of 1 local
    training. With another optimizer than SGD, its step replaces :math:`\eta` times the gradient;
    weight decay does not apply to :math:`\alpha`. The running statistics (BatchNorm) of the mixture
    stay on the client.

    The authors' program (MLOPTPSU/FedTorch) mixes outputs instead of parameters, and updates
    :math:`\alpha` once per round with an additional :math:`0.02 \alpha`; this class follows the
    paper. :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates the mixture with the
    received model in the column ``kept``.

    Args:
        alpha: Initial weight :math:`\alpha` of the local model, from 0 to 1.
        adaptive: Whether :math:`\alpha` is trained.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if gradients are
            clipped by their joint norm, or another term has a personal model, too.

    Example:
        >>> from lightning_fl import ClientModule
        >>> module = ClientModule(nn.Linear(4, 3), terms=[APFL(alpha=0.25)])
    """

    uses_batch = False
    stays_local = True
    is_independent = True
    personal: LocalNetwork
    weight: Tensor
    included: Tensor

    def __init__(self, alpha: float = 0.5, adaptive: bool = True) -> None:
        super().__init__()
        self.alpha = check_number("alpha", alpha, min=0, max=1)
        self.adaptive = check_flag("adaptive", adaptive)

    def prepare(self, module: TermModule) -> None:
        """Create the local model and its weight.

        An optimizer step cannot project. So the optimizer trains ``moved``, the unbounded sum of
        the steps of alpha in this round, and ``weight`` is the projected alpha, which includes the
        steps up to ``included``.
        """
        self.personal = LocalNetwork(module.net, is_trained=True)
        like = next(iter(self.personal.parameters())).detach()
        self.moved = nn.Parameter(like.new_zeros(()), requires_grad=self.adaptive)
        self.register_buffer("weight", like.new_full((), self.alpha), persistent=False)
        self.register_buffer("included", like.new_zeros(()), persistent=False)

    def current_alpha(self) -> Tensor:
        r"""Return :math:`\alpha` after the last optimizer step, a scalar without gradient."""
        return (self.weight + (self.moved.detach() - self.included)).clamp(0, 1)

    @torch.no_grad()
    def on_client_start(self, module: TermModule) -> None:
        """Start the local model of a new client from the received model."""
        self.personal.start(module.net)
        self.moved.zero_()
        self.included.zero_()

    @torch.no_grad()
    def _include_last_step(self) -> Tensor:
        """Include the last step of alpha in its weight; return alpha."""
        alpha = self.current_alpha()
        self.weight.copy_(alpha)
        self.included.copy_(self.moved)
        return alpha

    def on_client_end(self, module: TermModule) -> None:
        """Include the last step of alpha."""
        self._include_last_step()

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the loss of the mixture, with gradients for the local model and alpha only."""
        alpha = self._include_last_step() + (self.moved - self.moved.detach())  # of derivative 1
        v = self.personal.parameters_by_name()
        w = {name: client_model.params[name].detach() for name in v}
        mixture = self.personal.tensors() | interpolate(v, w, alpha)
        return client_model.module.loss_with(batch, mixture)

    def personal_model(self, module: TermModule) -> dict[str, Tensor]:
        """Return the mixture of the local model and the model of the module."""
        w = dict(module.net.named_parameters(prefix="net"))
        v = self.personal.parameters_by_name()
        return self.personal.tensors() | interpolate(v, w, self.current_alpha())

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Return alpha, without weight decay."""
        return [ParameterGroup([self.moved], decays=False)]
