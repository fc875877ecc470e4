"""Per-client hyperparameters learned by policy gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_fl.contracts.client_part import check_losses
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.feedback import Feedback
from lightning_fl.contracts.phases import Phase
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, derive_seed
from lightning_fl.functional.tables import PLACES, with_place
from lightning_fl.options import check_choice, check_flag, check_number, check_that
from lightning_fl.policies.base import ChoicePolicy, check_values

#: Decay of running means.
KEPT = 0.9
#: Minimum penalty of a dropped update, in root mean squares, and causes that are penalized. Others,
#: such as a lost connection, do not depend on the setting.
DROPPED, PENALIZED = 3.0, ("non_finite", "late")


class PersonalizedPolicyGradient(ChoicePolicy):
    r"""Draw hyperparameters per client, and learn which ones decrease the validation loss.

    Client :math:`i` has logits :math:`\alpha_i` over the candidates, and draws :math:`Z_i` from
    :math:`p = (1 - \varepsilon) \operatorname{softmax}(\alpha_i) + \varepsilon / H`. With
    ``contribution``, one backward pass at the new global model gives the effect of each client on
    the validation loss,

    .. math:: g_i = \frac{\partial L}{\partial 1_i}
        = \frac{n_i}{\sum_j n_j} \langle \nabla L(w^{t+1}), w_i - w^t \rangle, \qquad
        \alpha_i \leftarrow \alpha_i - \eta\, g_i \nabla \log p(Z_i).

    (With :math:`w_i` instead of :math:`w_i - w^t` the gradient would have the same mean, because
    :math:`w^t` does not depend on the choice, but a higher variance.) With ``reward`` all clients
    share the reward :math:`R`, a validation metric to maximize:
    :math:`\alpha_i \leftarrow \alpha_i + \eta\, (R - \bar R) \nabla \log p(Z_i)`.

    A client whose update was dropped as non-finite or too late gets the signal of its round that
    is largest in magnitude, as a rise of the loss, and with ``normalize`` at least three root mean
    squares. Clients that were dropped for another cause learn nothing from the round.

    The method is that of the notes "Policy Gradient based Approach", with several differences:

    - The policy of the notes is sequential: it decides for one client after another, and
      :math:`a_i` depends on the previous choices,
      :math:`p(\tau) = \prod_i p(a_i \mid a_1, \dots, a_{i-1})`. Here the choices of a round are
      independent, :math:`p(\tau) = \prod_i p_{\alpha_i}(a_i)`, as in the notes' section on the
      assignment of rewards. The policy therefore cannot learn interactions between the choices of
      different clients, even with ``reward``.
    - The notes use :math:`\alpha_i` both as probabilities and as free parameters. Here they are
      logits: :math:`\nabla \log p = \text{onehot}(Z_i) - \operatorname{softmax}(\alpha_i)`,
      times the share of the softmax in :math:`p(Z_i)` if ``floor`` is above 0.
    - The updates of the notes have no step size, baseline, normalization or floor. With ``step=1,
      baseline=False, normalize=False, floor=0`` only the difference :math:`w_i - w^t` explained
      above remains.
    - The notes sum over all clients. Here the sum is over the clients of the round with a used
      update.

    Args:
        candidates: Settings to choose from, as mappings with the same names, such as ``lr``,
            ``num_steps``, and numbers that the module declares, such as ``mu``.
        method: ``contribution``, or ``reward``, which is plain REINFORCE.
        step: Step size :math:`\eta`.
        floor: Exploration rate :math:`\varepsilon`, in [0, 1). Each candidate has a probability of
            at least :math:`\varepsilon / H`.
        baseline: Subtract the running mean of each client's contributions, or of the rewards.
        normalize: Divide contributions by the aggregation weight of the client, and contributions
            and rewards by their running root mean square, so that ``step`` does not depend on their
            scale.
        monitor: Name of the validation metric that is the reward.
        seed: Seed of the draws. None uses the seed of the run.
        phases: Phases of local training; see :class:`Schedule`.

    Raises:
        FederationError: If an option is out of range, or candidates have different names.

    Example:
        >>> policy = PersonalizedPolicyGradient([{"lr": 0.1}, {"lr": 0.2}], seed=0)
        >>> policy.sample(0, torch.arange(3))
        {'lr': tensor([0.1000, 0.1000, 0.2000], dtype=torch.float64)}
    """

    option: ClassVar[str] = "candidates"
    tables: ClassVar[Sequence[str]] = ("logits", "means")
    logits: Tensor
    means: Tensor
    square: Tensor

    def __init__(
        self,
        candidates: Sequence[Mapping[str, float]],
        method: Literal["contribution", "reward"] = "contribution",
        step: float = 0.1,
        floor: float = 0.05,
        baseline: bool = True,
        normalize: bool = True,
        monitor: str = "val_acc",
        seed: int | None = None,
        phases: Sequence[Phase] = (),
    ) -> None:
        super().__init__(seed, monitor, phases)
        self.candidates = [dict(each) for each in candidates]
        self.choices = _by_name(self.candidates)
        check_values("candidates", self.choices)
        self.method = check_choice("method", method, "contribution", "reward")
        self.step = check_number("step", step, min=0)
        self.floor = check_number("floor", floor, min=0, below=1)
        self.baseline = check_flag("baseline", baseline)
        self.normalize = check_flag("normalize", normalize)
        self.learns_from = frozenset(["contributions"] if method == "contribution" else [])
        size = (PLACES, len(self.candidates))
        #: Logits of each client, ``[places, H]``.
        self.register_buffer("logits", torch.zeros(size, dtype=torch.float64))
        #: Running mean of each client's contributions, and a flag that is 1 if it is set,
        #: ``[places, 2]``. The mean of the rewards is in the first row.
        self.register_buffer("means", torch.zeros(PLACES, 2, dtype=torch.float64))
        #: Running mean square, and a flag that is 1 if it is set.
        self.register_buffer("square", torch.zeros(2, dtype=torch.float64))

    def setup(self, federation: Federation) -> None:
        """Raise an error if client contributions cannot be measured in the run."""
        super().setup(federation)
        if "contributions" not in self.learns_from:
            return
        if federation.data is not None and federation.data.val is None:
            raise FederationError(
                f"{type(self).__name__} requires the gradient of the validation loss, and the"
                " server has no validation samples: set val_size"
            )
        check_losses(self, federation.module)

    def probabilities(self, clients: Tensor) -> Tensor:
        """Return the probability of each candidate, ``[k, H]``."""
        rows = self._rows(clients)
        chosen = self.logits[rows].softmax(1)
        return (1 - self.floor) * chosen + self.floor / len(self.candidates)

    def _draw(self, round: int, clients: Tensor) -> Tensor:
        """Return the candidate index of each client, ``[k]``, a function of round and client."""
        seed = self.random(RandomStream.POLICY, round).initial_seed()
        uniform = [
            torch.rand((), generator=torch.Generator().manual_seed(derive_seed(seed, client)))
            for client in clients.tolist()
        ]
        cumulated = self.probabilities(clients).cumsum(1)
        found = (torch.stack(uniform).double()[:, None] > cumulated).sum(1)
        return found.clamp(max=len(self.candidates) - 1)

    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the setting of each client."""
        chosen, values = self._draw(round, clients), {}
        for name, each in self.choices.items():
            value = torch.tensor(each, dtype=torch.float64)[chosen]
            values[name] = value.long() if name == "num_steps" else value
        return values

    def update(self, feedback: Feedback) -> None:
        """Learn from the effect of the sampled clients on the loss."""
        clients = feedback.plan.clients.cpu()
        rows = self._rows(clients)
        signal = self._signal(feedback, rows)
        if signal is None:
            return
        if feedback.dropped:
            # Without a penalty for non-finite updates the policy might prefer them.
            worst = signal.abs().max().clamp(min=DROPPED if self.normalize else 0)
            causes = [feedback.dropped.get(client) for client in clients.tolist()]
            signal = signal.where(torch.tensor([cause is None for cause in causes]), 0)
            signal = signal.where(torch.tensor([c not in PENALIZED for c in causes]), worst)
        took, chosen = self.logits[rows].softmax(1), self._draw(feedback.plan.round, clients)
        onehot = torch.nn.functional.one_hot(chosen, len(self.candidates)).double()
        at, p = torch.arange(len(rows)), self.probabilities(clients)
        share = (1 - self.floor) * took[at, chosen] / p[at, chosen]
        self.logits[rows] -= self.step * (signal * share)[:, None] * (onehot - took)

    def _signal(self, feedback: Feedback, rows: Tensor) -> Tensor | None:
        """Return the increase of the loss due to each client, ``[k]``; 0 if unknown."""
        if self.method == "reward":
            reward = feedback.metrics.get(self.monitor)
            if reward is None:
                raise FederationError(
                    f"{type(self).__name__} requires the metric {self.monitor!r} after every round,"
                    f" and round {feedback.plan.round + 1} has {sorted(feedback.metrics)}: set"
                    " monitor to one of these, and trainer.check_val_every_n_epoch=1"
                )
            if not math.isfinite(reward):
                return None
            raw = torch.tensor([-reward], dtype=torch.float64)
            return self._scaled(raw, torch.zeros(1, dtype=torch.int64)).expand(len(rows))
        assert feedback.contributions is not None
        assert feedback.weights is not None
        contributions = feedback.contributions().double().cpu()
        weights = feedback.weights.double().cpu()
        known = contributions.isfinite() & (weights > 0)
        if self.normalize:
            contributions = contributions / weights
        signal = torch.zeros_like(contributions)
        if known.any():
            signal[known] = self._scaled(contributions[known], rows[known])
        return signal

    def _scaled(self, raw: Tensor, rows: Tensor) -> Tensor:
        """Subtract running means, and divide by the running root mean square."""
        if self.baseline:
            mean, has_one = self.means[rows].unbind(1)
            mean = torch.where(has_one > 0, mean, raw)
            self.means[rows, 0] = KEPT * mean + (1 - KEPT) * raw
            self.means[rows, 1] = 1
            raw = raw - mean
        if self.normalize:
            now = raw.square().mean()
            if now > 0:  # 0 in a client's first round, which is its own baseline
                past = self.square[0] if self.square[1] else now
                self.square[0], self.square[1] = KEPT * past + (1 - KEPT) * now, 1
                raw = raw / self.square[0].sqrt()
        return raw

    def _rows(self, clients: Tensor) -> Tensor:
        """Return the table rows of clients, and grow the tables if necessary."""
        clients = clients.cpu()
        self.logits, self.means = (with_place(t, clients) for t in (self.logits, self.means))
        return clients

    def metrics(self) -> dict[str, float]:
        """Return the mean probability of each candidate over the clients with updated logits."""
        learned = (self.logits != 0).any(1).nonzero()[:, 0]
        if not len(learned):
            return {}
        p = self.probabilities(learned)
        found = {f"p_{i}": float(mean) for i, mean in enumerate(p.mean(0))}
        return found | {"policy_entropy": float(-(p * p.clamp(min=1e-300).log()).sum(1).mean())}


def _by_name(candidates: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the values of all candidates by name."""
    names = candidates[0].keys() if candidates else set()
    are_right = len(candidates) > 1 and names and all(c.keys() == names for c in candidates)
    wanted = "at least two settings with the same names"
    check_that("candidates", candidates, bool(are_right), wanted)
    return {name: [candidate[name] for candidate in candidates] for name in names}
