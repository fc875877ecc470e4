"""Results of a round, from which policies learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_fl.contracts.plan import RoundPlan


@dataclass(frozen=True)
class Feedback:
    r"""Results of a round, from which a policy learns.

    Args:
        plan: Plan of the round.
        val_loss_before: Validation loss of the global model before the round; None if unknown.
        val_loss: Validation loss of the global model after the round; None if validation did not
            run.
        losses: Loss of the model at the start of the round on the first batch of each client,
            without objective terms, ``[k]``. NaN for clients with a dropped update. None if the
            policy does not learn from ``client_losses``.
        weights: Number of samples of each client divided by the total over clients with a used
            update, ``[k]``.
        contributions: Function that returns the first-order effect of each client on the
            validation loss of the global model, ``[k]``:
            :math:`p_k \langle \nabla L(w^{t+1}), w_k - w^t \rangle` with weight :math:`p_k`. NaN
            for clients with a dropped update. None if the policy does not learn from
            ``contributions``.
        metrics: Metrics logged in the round.
        dropped: Causes of dropped updates by client id.
    """

    plan: RoundPlan
    val_loss_before: float | None
    val_loss: float | None
    losses: Tensor | None = None
    weights: Tensor | None = None
    contributions: Callable[[], Tensor] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)
