"""Weights that look at how clients' losses move: FedCostWAvg, FedControl, FedPIDAvg."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.functional.tables import PLACES, with_place, with_rows_of
from lightning_fl.types import ClientUpdate, FederationError


class FedControl(Aggregator):
    r"""Weigh clients by size, by how their loss fell, and by the losses so far.

    Mächler et al. (2022, 2023). With :math:`\ell_k^t` the loss of client :math:`k`'s own model on
    all its samples after its training in round :math:`t`,

    .. math:: w^{t+1} = w^t + \sum_{k \in S_t} \left(\alpha \frac{s_k}{\sum_j s_j}
        + \beta \frac{d_k}{\sum_j d_j} + (1 - \alpha - \beta) \frac{i_k}{\sum_j i_j}\right)
        (w_k - w^t),

    where :math:`s` are numbers of samples, :math:`d_k = \ell_k^{t'} / \ell_k^t` compares with the
    last round that the client took part in, and
    :math:`i_k = \sum_{q \le t} \lambda^{t - q} \ell_k^q` sums those rounds. All sums over clients
    run over those of the round, so weights sum to 1; a client's first comparison is with the loss
    of the model that it started from. With :math:`\lambda = 0` the integral is the present loss.

    Args:
        alpha: :math:`\alpha`, the weight of size.
        beta: :math:`\beta`, the weight of the fall; the integral has the rest.
        decay: :math:`\lambda`, in [0, 1].
        least: Losses below count as this, so that no quotient explodes.

    Raises:
        FederationError: If weights are negative or sum to more than 1, or ``decay`` is out of
            range; in a round, if losses were not measured.

    Example:
        >>> rule = FedControl(alpha=0.0, beta=0.0)  # the integral alone
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor([[0.0], [4.0]]),
        ...     torch.tensor([5, 5]), torch.ones(2), torch.tensor([3.0, 1.0])))
        >>> rule.compute()
        tensor([1.])
    """

    needs_losses = True
    forgets = True
    total: Tensor
    weight: Tensor
    reports: list[Tensor] | Tensor
    #: What is remembered of a client, ``[places, columns]``: the last round's loss, the integral as
    #: of then, and that round, counted from 1; 0 is none.
    known: Tensor
    round: Tensor
    columns = 3

    def __init__(
        self,
        alpha: float = 1 / 3,
        beta: float = 1 / 3,
        decay: float = 1.0,
        least: float = 1e-8,
    ) -> None:
        super().__init__()
        if alpha < 0 or beta < 0 or not alpha + beta <= 1 + 1e-9:
            raise FederationError(
                f"alpha and beta must be at least 0 and sum to at most 1, got {alpha} and {beta}"
            )
        if not 0 <= decay <= 1:
            raise FederationError(f"decay must be in [0, 1], got {decay}")
        if not 0 < least < float("inf"):
            raise FederationError(f"least must be positive and finite, got {least}")
        self.alpha, self.beta, self.decay, self.least = alpha, beta, decay, least

    def allocate(self, server: Tensor) -> None:
        """Declare three weighted sums of updates, their weights, and what clients report."""
        zeros = torch.zeros(3, len(server), dtype=torch.float64, device=server.device)
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("weight", zeros.new_zeros(3), dist_reduce_fx="sum")
        self.add_state("reports", [], dist_reduce_fx="cat")
        self.register_buffer("known", zeros.new_zeros(PLACES, self.columns))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    def update(self, clients: ClientUpdate) -> None:
        """Add updates to the three sums."""
        if clients.loss_before is None or clients.loss_after is None:
            raise FederationError(
                f"{type(self).__name__} weighs clients by their losses, which were not measured:"
                " use a FederatedLoop and a module with a method losses(batch)"
            )
        after = clients.loss_after.to(self.total).clamp(min=self.least)
        before = clients.loss_before.to(self.total).clamp(min=self.least)
        known = self._rows(clients.clients)
        fall, integral, rows = self._terms(known, before, after)
        weights = torch.stack([clients.num_samples.to(self.total), fall, integral])
        self.total += weights @ clients.delta.to(self.total)
        self.weight += weights.sum(1)
        ids = clients.clients.to(rows)[:, None]
        self.reports.append(torch.cat([ids, rows], dim=1))  # type: ignore[union-attr]

    def _terms(self, known: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how losses fell, their integrals, and what to remember, ``[k, columns]``."""
        last, integral, when = known.unbind(1)
        now = self.round + 1
        integral = torch.where(when > 0, self.decay ** (now - when) * integral, 0.0) + after
        fall = torch.where(when > 0, last, before) / after
        return fall, integral, torch.stack([after, integral, now.expand_as(after)], dim=1)

    def compute(self) -> Tensor:
        """Return the server's new model, and remember what the clients have reported."""
        share = self.total.new_tensor([self.alpha, self.beta, 1 - self.alpha - self.beta])
        self._remember()
        if not self.weight[0]:
            return self.server
        # A sum of zeros, where no loss fell: size decides for that term, too.
        none = self.weight == 0
        total = torch.where(none[:, None], self.total[0], self.total)
        move = (share / torch.where(none, self.weight[0], self.weight)) @ total
        return (self.server + move).to(self.server.dtype)

    def skip(self) -> None:
        """Let a round pass: the integrals of all decay."""
        self.round = self.round + 1

    def _rows(self, ids: Tensor) -> Tensor:
        """Return what is known of clients, with place for all."""
        self.known = with_place(self.known, ids)
        return self.known[ids.to(self.known.device)]

    def _remember(self) -> None:
        reports = self.reports
        if isinstance(reports, list):
            reports = torch.cat(reports) if reports else self.known.new_zeros(0, self.columns + 1)
        if len(reports):
            ids = reports[:, 0].long()
            self._rows(ids)
            self.known[ids] = reports[:, 1:]
        self.round = self.round + 1

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make place for as many clients as a checkpoint has."""
        if (saved := state_dict.get(prefix + "known")) is not None and hasattr(self, "known"):
            if saved.shape[1] != self.columns:
                raise FederationError(
                    f"{type(self).__name__} cannot go on from the checkpoint, which remembers"
                    f" {saved.shape[1] - 1} losses of a client: set window to that, or leave out"
                    " ckpt_path"
                )
            self.known = with_rows_of(self.known, saved)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FedCostWAvg(FedControl):
    r"""Weigh clients by size and by how their loss fell (Mächler et al., 2022).

    :math:`\alpha s_k / \sum_j s_j + (1 - \alpha) d_k / \sum_j d_j`: :class:`FedControl` without the
    integral.

    Args:
        alpha: :math:`\alpha`, in [0, 1].
        least: Losses below count as this, so that no quotient explodes.

    Example:
        >>> rule = FedCostWAvg(0.5)
        >>> rule.alpha, rule.beta
        (0.5, 0.5)
    """

    def __init__(self, alpha: float = 0.5, least: float = 1e-8) -> None:
        if not 0 <= alpha <= 1:
            raise FederationError(f"alpha must be in [0, 1], got {alpha}")
        super().__init__(alpha, 1 - alpha, least=least)


class FedPIDAvg(FedControl):
    r"""Weigh clients by size, by how much their loss fell, and by their last losses.

    Mächler et al. (2023): :class:`FedControl` with the difference
    :math:`d_k = \max(0, \ell_k^{t'} - \ell_k^t)` in place of the quotient, and for :math:`i_k` the
    sum of the client's last losses. Where no loss fell, size decides for that term, too.

    Args:
        alpha: The weight of size.
        beta: The weight of the fall; the last losses have the rest.
        window: How many losses are summed, from 1 up.

    Raises:
        FederationError: If weights are negative or sum to more than 1, or the window is none.

    Example:
        >>> FedPIDAvg().window
        5
    """

    def __init__(self, alpha: float = 0.45, beta: float = 0.45, window: int = 5) -> None:
        super().__init__(alpha, beta)
        if window < 1 or int(window) != window:
            raise FederationError(f"window must be a whole number from 1 up, got {window}")
        self.window = window
        #: The last losses, oldest first, and in the end whether there was one.
        self.columns = window + 1

    def _terms(self, known: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last, has_one = known[:, -2], known[:, -1] > 0
        losses = torch.cat([known[:, 1:-1], after[:, None]], dim=1)
        fall = (torch.where(has_one, last, before) - after).clamp(min=0)
        rows = torch.cat([losses, torch.ones_like(after)[:, None]], dim=1)
        return fall, losses.sum(1), rows
