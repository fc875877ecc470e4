"""Learned hyperparameters by REINFORCE on a discrete Gaussian (Mostafa, 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_fl.contracts.feedback import Feedback
from lightning_fl.contracts.phases import Phase
from lightning_fl.functional.discrete_gaussian import (
    causal_weights,
    centered_weights,
    log_probabilities,
    normalized_axis,
    relative_reduction,
    score,
)
from lightning_fl.functional.randomness import RandomStream
from lightning_fl.options import check_choice, check_flag, check_integer, check_number, check_that
from lightning_fl.policies.base import ChoicePolicy, check_values, validated

#: Range of learning rates and local steps in the paper's tasks; the paper does not give its grid.
GRID: dict[str, Sequence[float]] = {
    "lr": (0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2),
    "num_steps": (4, 5, 6, 7, 8, 9, 10, 11, 12),
}


#: Maximum absolute value of a reward.
BOUND = 10.0


class DiscreteGaussianReinforce(ChoicePolicy):
    r"""Draw each round's hyperparameters from a discrete Gaussian and raise its expected reward.

    Mostafa (2019), section 3.2. In round :math:`t` all clients use the same grid point :math:`h_t`,
    drawn from :math:`P(h \mid \psi_t) \propto e^{-\frac12 (h - \mu)^T A (h - \mu)}`,
    :math:`\psi = \{\mu, A\}`, where every axis of the grid is scaled to
    :math:`[-\frac12, \frac12]`. The reward is the relative reduction of the loss,
    :math:`r_t = (L_t - L_{t+1}) / \lvert L_t \rvert`. Online REINFORCE with a baseline updates
    (eq. 7)

    .. math:: \psi_{t+1} = \psi_t + \eta_H \sum_{\tau = t - Z'}^{t} (r_\tau - \hat r_t)
        \nabla_{\psi_\tau} \log P(h_\tau \mid \psi_\tau), \quad Z' = \min(Z, t - 1).

    The sign in the paper is a minus, which would decrease the reward. The paper also divides by
    :math:`L_t`, which is equal for positive losses but has the wrong sign for negative losses. The
    mean stays inside the grid, and :math:`A = B B^T` stays positive definite. Rewards are clamped
    to [-10, 10] to limit the influence of a single round; -10 means that the loss grew by a factor
    of eleven or is not finite. With positive losses the reward is at most 1, so the upper bound
    concerns only losses near 0 that become negative. The paper's baseline of fixed, decaying values
    is :class:`Schedule`.

    Args:
        grid: Allowed values by name: ``lr``, ``num_steps``, ``local_epochs``, or a number that the
            module declares, such as ``mu`` of a ``Proximal`` term. None means ten learning rates
            from 0.02 to 0.2 and nine numbers of steps from 4 to 12.
        policy_lr: Learning rate :math:`\eta_H` of the policy.
        window: Number :math:`Z` of previous rounds in an update.
        precision: Number :math:`a` of the initial :math:`A = a I`; :math:`\mu` starts at the center
            of the grid.
        learn_precision: Learn :math:`A` in addition to :math:`\mu`.
        centered: Use eq. 6. Its baseline is centered on a round, and is available ``window`` rounds
            later.
        seed: Seed of the draws. None uses the seed of the run.
        loss: Source of :math:`L_t`. ``validation`` uses the server's validation samples.
            ``clients`` uses the mean loss of the round's initial model that clients report on their
            first batch. The reward of a round is then known one round later, and is accurate only
            if the cohort is representative of all clients.
        monitor: Name of the logged metric that is the validation loss.
        phases: Phases of local training; see :class:`Schedule`.

    Raises:
        FederationError: If an option is out of range; after a round without validation.

    Example:
        >>> policy = DiscreteGaussianReinforce({"lr": [0.1, 0.2], "num_steps": [5, 10]}, seed=1)
        >>> lr = policy.sample(0, torch.tensor([3, 8]))["lr"]
        >>> float(lr[0]) in (0.1, 0.2), bool(lr[0] == lr[1])
        (True, True)
    """

    option: ClassVar[str] = "grid"
    tables: ClassVar[Sequence[str]] = ("scores", "rewards")
    mean: Tensor
    root: Tensor
    scores: Tensor
    rewards: Tensor
    waiting: Tensor
    loss_then: Tensor

    def __init__(
        self,
        grid: Mapping[str, Sequence[float]] | None = None,
        policy_lr: float = 0.1,
        window: int = 5,
        precision: float = 5.0,
        learn_precision: bool = False,
        centered: bool = False,
        seed: int | None = None,
        loss: Literal["validation", "clients"] = "validation",
        monitor: str = "val_loss",
        phases: Sequence[Phase] = (),
    ) -> None:
        super().__init__(seed, monitor, phases)
        self.grid = {k: list(v) for k, v in (GRID if grid is None else grid).items()}
        _check_grid(self.grid)
        self.choices = self.grid
        self.policy_lr = check_number("policy_lr", policy_lr, min=0)
        self.learn_precision = check_flag("learn_precision", learn_precision)
        self.centered = check_flag("centered", centered)
        self.window = check_integer("window", window, min=int(self.centered))
        self.loss = check_choice("loss", loss, "validation", "clients")
        self.learns_from = frozenset(["val_loss" if loss == "validation" else "client_losses"])
        axes = [normalized_axis(values) for values in self.grid.values()]
        #: Grid points, ``[n, D]``, with every axis scaled to [-0.5, 0.5].
        self.points = torch.cartesian_prod(*axes).view(-1, len(axes))
        self.register_buffer("mean", torch.zeros(len(axes), dtype=torch.float64))
        start = check_number("precision", precision, above=0) ** 0.5
        self.register_buffer("root", start * torch.eye(len(axes), dtype=torch.float64))
        size = self.mean.numel() + self.root.numel()
        #: Scores and rewards of the last rounds, oldest first, ``[n, D + D^2]`` and ``[n]``.
        self.register_buffer("scores", torch.zeros(0, size, dtype=torch.float64))
        self.register_buffer("rewards", torch.zeros(0, dtype=torch.float64))
        #: Score of the round with a pending reward, and the loss before it (infinity if none).
        self.register_buffer("waiting", torch.zeros(1, size, dtype=torch.float64))
        self.register_buffer("loss_then", torch.tensor(torch.inf, dtype=torch.float64))

    @property
    def precision(self) -> Tensor:
        """Precision matrix :math:`A`, ``[D, D]``."""
        return self.root @ self.root.mT

    def probabilities(self) -> Tensor:
        """Return the probability of each grid point, ``[n]``."""
        return log_probabilities(self.points, self.mean, self.precision).exp()

    def _draw(self, round: int) -> int:
        random = self.random(RandomStream.POLICY, round)
        return int(torch.multinomial(self.probabilities(), 1, generator=random))

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the grid point of the round, the same for all clients."""
        index, chosen = self._draw(round), {}
        for name, values in reversed(self.grid.items()):
            index, at = divmod(index, len(values))
            value = torch.tensor(values[at], dtype=torch.float64)
            chosen[name] = (value.long() if name == "num_steps" else value).expand(len(clients))
        return {name: chosen[name] for name in self.grid}

    def update(self, feedback: Feedback) -> None:
        """Learn from the reward of this round, or of the previous one for ``loss='clients'``."""
        by_mean, by_root = score(self.points, self._draw(feedback.plan.round), self.mean, self.root)
        now = torch.cat([by_mean, by_root.flatten()])[None]
        if self.loss == "validation":
            self._learn(now, *validated(self, feedback))
            return
        reported = feedback.losses
        finite = reported[reported.isfinite()] if reported is not None else torch.empty(0)
        if not len(finite):
            return  # no report: the next reward covers both rounds
        after = float(finite.mean())
        if self.loss_then.isfinite():
            self._learn(self.waiting, float(self.loss_then), after)
        self.waiting.copy_(now)
        self.loss_then.fill_(after)

    def _learn(self, now: Tensor, before: float, after: float) -> None:
        """Update the distribution with the reward of a round and those before it."""
        reward = relative_reduction(before, after, BOUND)
        most = 2 * self.window + 1 if self.centered else self.window + 1
        self.scores = torch.cat([self.scores, now])[-most:]
        self.rewards = torch.cat([self.rewards, self.rewards.new_tensor([reward])])[-most:]
        if self.centered and len(self.rewards) < most:
            return
        weights = (centered_weights if self.centered else causal_weights)(self.rewards)
        move = self.policy_lr * (weights @ self.scores)
        self.mean.add_(move[: len(self.mean)]).clamp_(-0.5, 0.5)
        if self.learn_precision:
            self.root.add_(move[len(self.mean) :].view_as(self.root))

    def metrics(self) -> dict[str, float]:
        """Return the last reward, the mean in units of the grid, and the precision."""
        found = {"reward": float(self.rewards[-1])} if len(self.rewards) else {}
        names = list(self.grid)
        for at, (name, values) in enumerate(self.grid.items()):
            low, high = min(values), max(values)
            found[f"mean_{name}"] = float(self.mean[at]) * (high - low) + (low + high) / 2
        for i, one in enumerate(names):
            for j, other in enumerate(names[i:], i):
                found[f"precision_{one}_{other}"] = float(self.precision[i, j])
        return found


def _check_grid(grid: Mapping[str, Sequence[float]]) -> None:
    has_values = bool(grid) and all(grid.values())
    check_that("grid", grid, has_values, "a mapping with values for each name")
    check_values("grid", grid)
    for name, values in grid.items():
        check_that(f"values of {name} in grid", values, len(set(values)) == len(values), "distinct")
