"""Loss-based aggregation weights: FedCostWAvg, FedControl and FedPIDAvg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.client_part import ClientPart, MeanLosses
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.functional.tables import PLACES, with_place
from lightning_fl.options import check_number

#: Names of the sums of updates, each weighted by one term.
TERMS = ("total_of_sizes", "total_of_falls", "total_of_integrals")
#: Lower bound on the losses of FedControl, which prevents division by values near 0.
LEAST = 1e-8


class FedControl(Aggregator):
    r"""Weight clients by dataset size, loss decrease and accumulated loss.

    FedControl (Ben Mansour et al., 2022), which extends :class:`FedCostWAvg`. Let
    :math:`\ell_k^t` be the loss of the local model of client :math:`k` on all its samples after
    local training in round :math:`t`. Then

    .. math:: w^{t+1} = w^t + \sum_{k \in S_t} \left(\alpha \frac{s_k}{\sum_j s_j}
        + \beta \frac{d_k}{\sum_j d_j} + (1 - \alpha - \beta) \frac{i_k}{\sum_j i_j}\right)
        (w_k - w^t),

    where :math:`s_k` is the number of samples, :math:`d_k = \ell_k^{t'} / \ell_k^t` is the loss
    ratio between the client's previous round :math:`t'` and this round, and the integral
    :math:`i_k = \sum_{q \le t} \lambda^{t - q} \ell_k^q` runs over all rounds of the client. Sums
    over clients run over the clients of the round, so the weights sum to 1. In the first round of a
    client, the loss of its initial model takes the place of :math:`\ell_k^{t'}`. With
    :math:`\lambda = 0` the integral is the current loss. Losses below 1e-8, also negative ones,
    count as 1e-8.

    Args:
        alpha: Weight :math:`\alpha` of the dataset size.
        beta: Weight :math:`\beta` of the loss decrease. The integral has weight
            :math:`1 - \alpha - \beta`.
        decay: Decay :math:`\lambda` of past losses, in [0, 1].

    Raises:
        FederationError: If weights are negative or sum to more than 1, if ``decay`` is out of
            range, or if an update has no losses.

    Example:
        >>> rule = FedControl(alpha=0.0, beta=0.0)  # the integral alone
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor([[0.0], [4.0]]),
        ...     torch.tensor([5, 5]), extras={"loss_before": torch.ones(2),
        ...     "loss_after": torch.tensor([3.0, 1.0])}))
        >>> rule.compute()
        tensor([1.])
    """

    #: Minimum ratio between the absolute sum of a term and the sum of its absolute values. Below it
    #: the term is dominated by cancellation. Without negative values only a sum of 0 is too small.
    cancellation = 0.0
    needs = ("losses",)
    weight: VectorSum
    absolute: VectorSum
    #: State of each client, ``[places, columns]``: the loss of its last round, the integral up to
    #: that round, and the round number, counted from 1. Round 0 means no record.
    grown: ClassVar[tuple[str, ...]] = ("known",)
    known: Tensor
    round: Tensor
    columns = 3

    def __init__(self, alpha: float = 1 / 3, beta: float = 1 / 3, decay: float = 1.0) -> None:
        super().__init__()
        self.alpha = check_number("alpha", alpha, min=0)
        self.beta = check_number("beta", beta, min=0)
        if alpha + beta > 1 + 1e-9:
            raise FederationError(f"alpha and beta must sum to at most 1, got {alpha} and {beta}")
        self.decay = check_number("decay", decay, min=0, max=1)

    def allocate(self, server: Tensor) -> None:
        """Declare the weighted sums of the three terms, their weights, and client reports."""
        device = server.device
        for term in TERMS:
            self.add_sum(term, len(server))
        self.add_sum("weight", 3)
        self.add_sum("absolute", 3)
        self.add_lists("ids", "reports")
        known = torch.zeros(PLACES, self.columns, dtype=torch.float64, device=device)
        self.register_buffer("known", known)
        self.register_buffer("round", torch.zeros((), dtype=torch.int64, device=device))

    def client_parts(self) -> Sequence[ClientPart]:
        """Measure the loss on all samples of a client before and after local training."""
        return [MeanLosses()]

    def update(self, clients: ClientUpdate) -> None:
        """Add updates to the three sums."""
        self.require_extras(clients, loss_before=(), loss_after=())
        names = ("loss_before", "loss_after")
        before, after = (clients.extras[name].to(self.known) for name in names)
        known = self._rows(clients.clients)
        fall, integral, rows = self._terms(known, before, after)
        weights = torch.stack([clients.num_samples.to(self.known), fall, integral])
        for term, row in zip(TERMS, weights, strict=True):
            add_rows(self.sum_of(term), clients.delta, row)
        add_rows(self.weight, weights.T)
        add_rows(self.absolute, weights.T.abs())
        self.append(ids=clients.clients, reports=rows)

    def _terms(self, known: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss decreases, the integrals and the new client states, ``[k, columns]``."""
        before, after = before.clamp(min=LEAST), after.clamp(min=LEAST)
        last, integral, when = known.unbind(1)
        now = self.round + 1
        integral = torch.where(when > 0, self.decay ** (now - when) * integral, 0.0) + after
        fall = torch.where(when > 0, last, before) / after
        return fall, integral, torch.stack([after, integral, now.expand_as(after)], dim=1)

    def compute(self) -> Tensor:
        """Return the new global model, and store the client reports."""
        total = torch.stack([sum_value(self.sum_of(term)) for term in TERMS])
        weight, absolute = sum_value(self.weight), sum_value(self.absolute)
        share = total.new_tensor([self.alpha, self.beta, 1 - self.alpha - self.beta])
        self._remember()
        if not weight[0]:
            return self.server
        # A term with a vanishing sum cannot be normalized: use the dataset sizes instead.
        none = weight.abs() <= self.cancellation * absolute
        total = torch.where(none[:, None], total[0], total)
        weight = torch.where(none, weight[0], weight)
        absolute = torch.where(none, absolute[0], absolute)
        self.round_metrics = {"weight_l1": float(share @ (absolute / weight.abs()))}
        move = (share / weight) @ total
        return (self.server + move).to(self.server.dtype)

    def on_round_skipped(self) -> None:
        """Count the round, so that all integrals decay."""
        self.round = self.round + 1

    def _rows(self, ids: Tensor) -> Tensor:
        """Return the stored client states, and grow the table if necessary."""
        self.known = with_place(self.known, ids)
        return self.known[ids.to(self.known.device)]

    def _remember(self) -> None:
        if returned := self.gather_by_client("ids", "reports"):
            ids, reports = returned
            self.known = with_place(self.known, ids)
            self.known[ids] = reports
        self.round = self.round + 1


class FedCostWAvg(FedControl):
    r"""Weight clients by dataset size and loss decrease (Mächler et al., 2022).

    The weights are :math:`\alpha s_k / \sum_j s_j + (1 - \alpha) d_k / \sum_j d_j`, as in
    :class:`FedControl` without the integral.

    Args:
        alpha: Weight :math:`\alpha` of the dataset size, in [0, 1].

    Example:
        >>> rule = FedCostWAvg(0.5)
        >>> rule.alpha, rule.beta
        (0.5, 0.5)
    """

    def __init__(self, alpha: float = 0.5) -> None:
        super().__init__(check_number("alpha", alpha, min=0, max=1), 1 - alpha)


class FedPIDAvg(FedControl):
    r"""Weight clients by dataset size, loss difference and recent losses.

    Mächler et al. (2023, "FedPIDAvg", section 2). Let :math:`\ell_k^0` be the loss of the initial
    model on the samples of client :math:`k`, and :math:`\ell_k^i` the loss of its local model after
    its :math:`i`-th round of training. Then

    .. math:: w_k = \alpha \frac{s_k}{\sum_j s_j} + \beta \frac{d_k}{\sum_j d_j}
        + (1 - \alpha - \beta) \frac{m_k}{\sum_j m_j}, \qquad
        d_k = \ell_k^{i - 1} - \ell_k^i, \quad m_k = \sum_{l = 0}^{5} \ell_k^{i - l},

    where :math:`m_k` has fewer terms if the client has fewer losses. The initial model of a client
    is the model at the start of its first round. Sums over clients run over the clients of the
    round, so the weights sum to 1.

    If a loss rises, :math:`d_k` is negative, and the weight of the client may be negative. The
    quotient is undefined if :math:`\sum_j d_j` is 0, and if rising and falling losses nearly cancel
    it gives weights far above 1 and below 0. Therefore this term uses the dataset sizes instead if
    :math:`\lvert \sum_j d_j \rvert` is at most ``cancellation`` times
    :math:`\sum_j \lvert d_j \rvert`. The same holds for the last term, if losses are negative. The
    metric ``weight_l1`` is the sum of the absolute values of the weights. It is 1 if no weight of a
    term is negative.

    Args:
        alpha: Weight of the dataset size.
        beta: Weight of the loss difference. The recent losses have weight
            :math:`1 - \alpha - \beta`.
        cancellation: Threshold for the fallback to dataset sizes, in [0, 1). With 0 only a sum of
            exactly 0 is replaced.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> rule = FedPIDAvg()
        >>> rule.start(torch.zeros(1))
        >>> before, after = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 2.5])
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor([[4.0], [0.0]]),
        ...     torch.tensor([5, 5]),  # d = 1, -0.5 and m = 3, 4.5
        ...     extras={"loss_before": before, "loss_after": after}))
        >>> rule.compute()  # 4 (0.45 / 2 + 0.45 * 2 + 0.1 * 0.4)
        tensor([4.6600])
    """

    #: The last six losses, oldest first, then a flag: 1 if the client has a record.
    columns = 7

    def __init__(self, alpha: float = 0.45, beta: float = 0.45, cancellation: float = 1e-3) -> None:
        super().__init__(alpha, beta)
        self.cancellation = check_number("cancellation", cancellation, min=0, below=1)

    def _terms(self, known: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        has_one = known[:, -1] > 0
        last = torch.where(has_one, known[:, -2], before)
        earlier = torch.where(has_one[:, None], known[:, :-1], 0.0)
        losses = torch.cat([earlier[:, :-1], last[:, None], after[:, None]], dim=1)
        losses = losses[:, 1 - self.columns :]
        fall = last - after
        rows = torch.cat([losses, torch.ones_like(after)[:, None]], dim=1)
        return fall, losses.sum(1), rows
