"""What a finished round reports: a row of the table of rounds, and feedback for the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.contracts.feedback import Feedback
from lightning_fl.federation.dropped import count_causes
from lightning_fl.federation.results import weights_and_losses

if TYPE_CHECKING:
    from lightning_fl.federation.round import Round


def feedback(
    round: Round, before: float | None, after: float | None, metrics: Mapping[str, float]
) -> Feedback:
    """Return the results from which the policy learns.

    Args:
        round: The round, which is aggregated.
        before: Validation loss before the round; None if unknown.
        after: Validation loss after the round; None if unknown.
        metrics: Metrics logged in the round.
    """
    fit, plan, results = round.fit, round.plan, round.results
    weights, losses = weights_and_losses(plan.clients, results.losses, fit.planner.num_samples)

    def contributions() -> Tensor:
        measure = fit.measures.contributions
        return weights * measure(fit.runner, round.updates, plan.clients, plan.round)

    wanted = fit.policy.learns_from
    if "client_losses" in wanted and weights.any() and losses.isnan().all():
        rank_zero_warn(
            f"{type(fit.policy).__name__} learns from the losses of clients, and there is none:"
            " return the loss in training_step"
        )
    return Feedback(
        plan,
        before,
        after,
        losses if "client_losses" in wanted else None,
        weights,
        contributions if "contributions" in wanted else None,
        metrics,
        results.dropped,
    )


def metrics(round: Round) -> dict[str, Any]:
    """Return the columns of the loop for the table of rounds."""
    plan, results, dropped = round.plan, round.results, round.results.dropped
    sent = results.rates  # by all clients, if they train here
    rates = [sent[client] for client in plan.clients.tolist() if client in sent] or [math.nan]
    # The mean of equal values would round.
    lr = rates[0] if len(set(rates)) == 1 else fmean(rates)
    per_client = {count: round.traffic.of_a_client(count) for count in {*round.unused.values()}}
    of_client = {client: per_client[count] for client, count in round.unused.items()}
    numbers = plan.hyperparameters
    declared = {name: numbers[name] for name in round.fit.runner.declared.values if name in numbers}
    return {
        "round": plan.round + 1,
        "clients": len(plan.cohort),
        "dropped": len(dropped),
        "dropped_clients": " ".join(map(str, dropped)),
        **count_causes(dropped),
        "num_samples": results.num_samples,
        "num_steps": 0 if plan.is_empty else int(plan.num_steps.sum()),
        "lr": lr,
        **{name: _mean(value) for name, value in declared.items()},
        "bytes_up": sum(
            up for client, (up, _) in of_client.items() if client not in results.dropped
        ),
        "bytes_down": sum(down for _, down in of_client.values()),
        **({"kept": 1} if round.is_kept else {}),
    }


def _mean(value: Tensor) -> float:
    """Return the mean over clients; exactly the common value if there is one."""
    return float(value[0] if (value == value[0]).all() else value.double().mean())
