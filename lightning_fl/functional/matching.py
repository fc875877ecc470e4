r"""Matching of neurons of networks that were trained apart (Yurochkin et al., 2019, "PFNM").

A neuron is a vector of the weights that belong to it. Each is a noisy copy of a global one, an atom
:math:`\theta_i \sim N(\mu_0, \sigma_0^2)`; which neurons are copies of the same atom, and how many
atoms there are, is inferred under a Beta-Bernoulli process. All is in float64.

Atom :math:`i` with clients :math:`j` has the natural parameters

.. math:: S_i = \mu_0 p_0 + \sum_{(j, l) \to i} p_j v_{jl}, \qquad
    P_i = p_0 + \sum_{(j, l) \to i} p_j

for each coordinate, where :math:`p_0 = 1 / \sigma_0^2` and :math:`p_j = 1 / \sigma_j^2`, and its
best value is :math:`S_i / P_i` (proposition 1).

In a stream, where data arrive in steps, the posterior of a step is the prior of the next: an atom
begins a step with what :math:`S_i` and :math:`P_i` were after the last, and stays even if nobody
has it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lightning_fl.types import FederationError

#: Numbers that are worked on at once: few enough to stay in a processor's cache.
PIECE = 2**18


@dataclass(frozen=True)
class Process:
    r"""What is believed of neurons before any is seen.

    Args:
        mean: :math:`\mu_0` of each coordinate, ``[D]``.
        precision: :math:`p_0 = 1 / \sigma_0^2` of each, ``[D]``, positive.
        clients: :math:`J`.
        gamma: :math:`\gamma_0`: the larger, the more atoms.
        popularity: :math:`\kappa`: how much it counts who else has an atom. 2 follows from the
            paper's equations 6 and 8; 1 is its proposition 2 as printed, and its authors' program.
        cap: Counts above it count as this; 10 in the authors' program, None is no limit.
        most: Atoms from which on a client may add only one of its own (supplement 4.2: 700), or as
            many as it has neurons more than there are atoms. So the limit is soft: it can grow by
            one with each client that is placed. None is no limit.
    """

    mean: Tensor
    precision: Tensor
    clients: int
    gamma: float = 1.0
    popularity: float = 2.0
    cap: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class Posterior:
    """What the steps of a stream have taught.

    Args:
        sums: :math:`S`, ``[L, D]``.
        precisions: :math:`P`, ``[L, D]``.
        uses: Steps in which each client had each atom, ``[J, L]``.
        steps: How many there were.
    """

    sums: Tensor
    precisions: Tensor
    uses: Tensor
    steps: int

    @classmethod
    def before(cls, clients: int, size: int) -> Posterior:
        """Return that of no step: no atoms, of ``size`` coordinates."""
        none = torch.zeros(0, size, dtype=torch.float64)
        return cls(none, none, torch.zeros(clients, 0, dtype=torch.float64), 0)


@dataclass(frozen=True)
class Matching:
    """Which neurons are copies of which atoms.

    Args:
        assignments: Of each client, the atom of each of its neurons, ``[L_j]``.
        sums: :math:`S`, ``[L, D]``.
        precisions: :math:`P`, ``[L, D]``.
        counts: Clients of each atom, ``[L]``; none has some of a stream's.
        objective: Its values, after the greedy pass and after each sweep.
        posterior: What is known after it, if another step follows.
    """

    assignments: list[Tensor]
    sums: Tensor
    precisions: Tensor
    counts: Tensor
    objective: list[float]
    posterior: Posterior

    @property
    def atoms(self) -> Tensor:
        """The best values of the atoms, ``[L, D]``."""
        return self.sums / self.precisions


def gains(
    prior: Process,
    sums: Tensor,
    precisions: Tensor,
    counts: Tensor,
    values: Tensor,
    own: Tensor,
    step: int | None = None,
) -> Tensor:
    r"""Say what a client's neurons add to the objective, by the atom that each may become.

    Neuron :math:`l` as a copy of atom :math:`i`, which :math:`m_i` others have, gains

    .. math:: \sum_d \frac{(S_i + p v_l)^2}{P_i + p} - \frac{S_i^2}{P_i}
        + \kappa \log \frac{m_i}{J - m_i},

    and as the :math:`q`-th atom of its own

    .. math:: \sum_d \frac{(\mu_0 p_0 + p v_l)^2}{p_0 + p} - \mu_0^2 p_0
        + 2 \log \frac{\gamma_0}{J} - 2 \log q,

    with :math:`\kappa` = ``popularity`` (propositions 1 and 2). In step :math:`s` of a stream
    :math:`m_i` is in how many steps before this client had the atom, the fraction is
    :math:`\frac{1 + m_i}{s - m_i}`, and :math:`\frac{\gamma_0}{J}` is :math:`\frac{\gamma_0}{s J}`
    (supplement, equation 11). Squares are expanded: it takes two matrix products.

    Args:
        prior: What is believed before.
        sums: :math:`S` of the others, ``[L, D]``.
        precisions: :math:`P` of the others, ``[L, D]``.
        counts: :math:`m`, ``[L]``.
        values: :math:`v`, ``[L_j, D]``.
        own: :math:`p`, ``[D]``.
        step: :math:`s`, from 1; None where there is no stream.

    Returns:
        ``[L_j, L + N]``, where :math:`N` is how many atoms there may be beside.

    Example:
        >>> prior = Process(torch.zeros(1), torch.ones(1), clients=2)
        >>> one = torch.ones(1, 1)  # an atom of one other client, S = 1, P = 2
        >>> gains(prior, one, 2 * one, torch.ones(1), one, torch.ones(1))
        tensor([[ 0.8333, -0.8863]])
    """
    rows = max(PIECE // len(own), 1)
    pieces = zip(sums.split(rows), precisions.split(rows), strict=True)
    known = torch.cat([_fit(s, p, values, own) for s, p in pieces] or [values[:, :0]], 1)
    known = known + prior.popularity * _odds(prior, counts, step)
    shift = prior.mean * prior.precision
    new = ((shift + own * values).square() / (prior.precision + own)).sum(1)
    new = new - (shift * prior.mean).sum()
    q = torch.arange(1, _places(prior, len(sums), len(values)) + 1).to(values)
    share = torch.full_like(q, _rate(prior, step)).log() - q.log()
    return torch.cat([known, new[:, None] + 2 * share], 1)


def _fit(sums: Tensor, precisions: Tensor, values: Tensor, own: Tensor) -> Tensor:
    """Return what values add to the terms of atoms, ``[L_j, L]``."""
    part = own / (precisions + own)
    alone = (part * sums.square() / precisions).sum(1)
    return 2 * values @ (part * sums).mT + values.square() @ (part * own).mT - alone


def _odds(prior: Process, counts: Tensor, step: int | None) -> Tensor:
    """Return the logarithm of the odds that a client has an atom."""
    m = counts if prior.cap is None else counts.clamp(max=prior.cap)
    return (m / (prior.clients - m) if step is None else (1 + m) / (step - m)).log()


def _rate(prior: Process, step: int | None) -> float:
    """Return how many atoms of its own a client is expected to have."""
    return prior.gamma / (prior.clients * (step or 1))


def _places(prior: Process, atoms: int, neurons: int) -> int:
    """Return how many atoms a client may add: one for each neuron, at the limit one for all."""
    if prior.most is None:
        return neurons
    return min(neurons, max(prior.most - atoms, neurons - atoms, 1))


def best_assignment(gain: Tensor) -> Tensor:
    """Give each neuron an atom of its own such that the gains' sum is largest (Hungarian method).

    Args:
        gain: ``[L_j, N]`` with at least as many columns as rows.

    Returns:
        The column of each row, ``[L_j]``.

    Example:
        >>> best_assignment(torch.tensor([[3.0, 2.0], [3.0, 0.0]]))
        tensor([1, 0])
    """
    _, columns = linear_sum_assignment(gain.cpu().numpy(), maximize=True)
    return torch.as_tensor(columns, dtype=torch.int64)


def objective(prior: Process, terms: Tensor, counts: Tensor, alone: Tensor) -> float:
    r"""Return twice the logarithm of the posterior of assignments, up to a constant (eq. 6).

    .. math:: \sum_i \Bigl(\sum_d \frac{S_i^2}{P_i} - \mu_0^2 p_0 + 2 \log \frac{\gamma_0}{J}
        + \kappa \log \frac{(m_i - 1)!\, (J - m_i)!}{(J - 1)!}\Bigr) - 2 \sum_j \log K_j!

    without a ``cap``; with one the odds of which it is the product have it, too. A client's own
    :func:`gains` are differences of it, but for :math:`K_j!` of other clients: who joins an atom
    that another had alone makes that one's factorial smaller.

    Args:
        prior: What is believed before.
        terms: :math:`\sum_d S_i^2 / P_i` of each atom, ``[L]``.
        counts: :math:`m`, ``[L]``, from 1 up.
        alone: :math:`K`: how many atoms each client has alone, ``[J]``.
    """
    data = terms.sum() - len(terms) * (prior.mean.square() * prior.precision).sum()
    others = torch.arange(1, prior.clients, dtype=torch.float64)
    odds = torch.cat([others.new_zeros(1), _odds(prior, others, None).cumsum(0)])
    shared = odds[counts.long() - 1].sum()
    return float(data + prior.popularity * shared + _process(prior, len(terms), alone, None))


def _process(prior: Process, atoms: int, alone: Tensor, step: int | None) -> Tensor:
    """Return the part of the objective that new atoms and those of one client have."""
    rate = torch.tensor(_rate(prior, step), dtype=torch.float64)
    return 2 * (atoms * rate.log() - (alone.double() + 1).lgamma().sum())


class _State:
    """Assignments, and what they add up to."""

    def __init__(
        self,
        prior: Process,
        values: Sequence[Tensor],
        own: Sequence[Tensor],
        past: Posterior | None,
    ) -> None:
        self.prior = prior
        self.values = [v.double() for v in values]
        self.own = [p.double() for p in own]
        #: Of each client, ``[L_j]``; those that are out have none.
        self.assignments: list[Tensor | None] = [None] * len(values)
        #: The number of a stream's step, None where there is none.
        self.step = None if past is None else past.steps + 1
        self.past = Posterior.before(len(values), len(prior.mean)) if past is None else past
        self.sums = self.past.sums.double().clone()
        self.precisions = self.past.precisions.double().clone()
        self.counts = torch.zeros(len(self.sums), dtype=torch.float64)
        #: Each atom's sum of S^2 / P: few change at a time.
        self.terms = (self.sums.square() / self.precisions).sum(1)

    def add(self, client: int, atoms: Tensor) -> None:
        """Assign a client's neurons; atoms beyond those that there are begin with the prior."""
        more = max(int(atoms.max()) + 1 - len(self.counts), 0)
        begin = (self.prior.mean * self.prior.precision).double().expand(more, -1)
        self.sums = torch.cat([self.sums, begin])
        self.precisions = torch.cat(
            [self.precisions, self.prior.precision.double().expand(more, -1)]
        )
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more)])
        self.terms = torch.cat([self.terms, self.terms.new_zeros(more)])
        self.assignments = [atoms if i == client else a for i, a in enumerate(self.assignments)]
        self._count(client, atoms, 1)

    def remove(self, client: int) -> None:
        """Take a client out, and the atoms that nobody else has."""
        atoms = self.assignments[client]
        assert atoms is not None
        self._count(client, atoms, -1)
        self.assignments = [None if i == client else a for i, a in enumerate(self.assignments)]
        self.drop_empty()

    def drop_empty(self) -> None:
        """Forget atoms that nobody has."""
        kept = self.counts > 0
        kept[: len(self.past.sums)] = True
        if kept.all():
            return
        place = kept.cumsum(0) - 1
        self.sums, self.precisions = self.sums[kept], self.precisions[kept]
        self.counts, self.terms = self.counts[kept], self.terms[kept]
        self.assignments = [None if a is None else place[a] for a in self.assignments]

    def _count(self, client: int, atoms: Tensor, sign: int) -> None:
        own = self.own[client]
        self.sums.index_add_(0, atoms, own * self.values[client], alpha=sign)
        self.precisions.index_add_(0, atoms, own.expand(len(atoms), -1), alpha=sign)
        self.counts.index_add_(0, atoms, torch.ones(len(atoms)).double(), alpha=sign)
        self.terms[atoms] = (self.sums[atoms].square() / self.precisions[atoms]).sum(1)

    def objective(self) -> float:
        """Return the present value; in a stream what the step has added, by the gains alike."""
        old, assigned = len(self.past.sums), [a for a in self.assignments if a is not None]
        alone = torch.stack([((self.counts[a] == 1) & (a >= old)).sum() for a in assigned])
        if self.step is None:
            return objective(self.prior, self.terms, self.counts, alone)
        data = self.terms.sum() - (self.past.sums.square() / self.past.precisions).sum()
        new = self.counts[old:]
        data = data - len(new) * (self.prior.mean.square() * self.prior.precision).sum()
        shared = _odds(self.prior, torch.zeros(()).double(), self.step) * (new - 1).sum()
        for client, atoms in enumerate(self.assignments):
            if atoms is not None:
                odds = _odds(self.prior, self.past.uses[client], self.step)
                shared = shared + odds[atoms[atoms < old]].sum()
        process = _process(self.prior, len(new), alone, self.step)
        return float(data + self.prior.popularity * shared + process)

    def uses(self) -> Tensor:
        """Return in how many steps each client had each atom, with this one, ``[J, L]``."""
        uses = self._earlier()
        for client, atoms in enumerate(self.assignments):
            if atoms is not None:
                uses[client, atoms] += 1
        return uses

    def _earlier(self) -> Tensor:
        """Return in how many steps before each client had each atom, ``[J, L]``."""
        uses = self.counts.new_zeros(len(self.values), len(self.counts))
        uses[:, : self.past.uses.shape[1]] = self.past.uses
        return uses

    def begin(self, start: Sequence[Tensor | None], order: Sequence[int]) -> None:
        """Assign the clients that have a start, and place the others in this order."""
        for client, (atoms, values) in enumerate(zip(start, self.values, strict=True)):
            if atoms is not None:
                _check_start(client, atoms, len(values))
                self.add(client, atoms)
        self.drop_empty()
        for client in order:
            if self.assignments[client] is None:
                self.place(client)

    def place(self, client: int) -> None:
        """Match a client that is out to the atoms of the others."""
        own, values = self.own[client], self.values[client]
        counts = self.counts if self.step is None else self._earlier()[client]
        gain = gains(self.prior, self.sums, self.precisions, counts, values, own, self.step)
        found = best_assignment(gain)
        fresh = found >= len(self.counts)
        # Those of its own in the order of its neurons: which is the q-th is of no account.
        found[fresh] = len(self.counts) + torch.arange(int(fresh.sum()))
        self.add(client, found)

    def replace(self, client: int) -> None:
        """Take a client out, and match it anew."""
        self.remove(client)
        self.place(client)

    def improve(self, client: int) -> None:
        """Match a client anew, if that raises the objective.

        By more than rounding does: else the atoms' order would depend on it.
        """
        before, value = dict(vars(self)), self.objective()
        for name in ("sums", "precisions", "counts", "terms"):  # they are changed in place
            before[name] = before[name].clone()
        self.replace(client)
        if self.objective() <= value + 1e-9 * abs(value):
            vars(self).update(before)


def match(
    prior: Process,
    values: Sequence[Tensor],
    own: Sequence[Tensor],
    sweeps: int = 5,
    orders: Sequence[Sequence[int]] | None = None,
    start: Sequence[Tensor | None] | None = None,
    generator: torch.Generator | None = None,
    past: Posterior | None = None,
    accept: Literal["always", "improvement"] = "always",
) -> Matching:
    """Match the neurons of several clients (Yurochkin et al., 2019, section 3.1).

    The clients are placed one after another, the widest first, each by the Hungarian method. Then
    in each sweep every client is taken out and placed anew. A client's own best assignment can
    lower the objective of all a little, since its gains leave out how many atoms others have alone:
    see :func:`objective`.

    Args:
        prior: What is believed before.
        values: Neurons of each client, ``[L_j, D]``.
        own: Precisions of each client's coordinates, ``[D]``, from 0 up.
        sweeps: How often.
        orders: Of the clients: the first is that of the greedy pass, then one a sweep; None draws
            those of the sweeps.
        start: Atoms to start with, of each client, ``[L_j]``, all different, in place of the greedy
            pass (the authors' program in rounds after the first). Clients with None are placed
            after the others, in the order of the greedy pass.
        generator: Where orders come from; None is torch's.
        past: What the steps of a stream before this one have taught; that of none is
            :meth:`Posterior.before`, None is no stream.
        accept: ``always`` keeps every new assignment (the paper, and its authors' program).
            ``improvement`` keeps it only where it raises the objective, which then never falls.

    Returns:
        The matching.

    Raises:
        FederationError: If ``accept`` is neither, ``orders`` are not of all clients, or ``start``
            has not one atom for each neuron.

    Example:
        >>> prior = Process(torch.zeros(1), torch.full((1,), 0.1), clients=2)
        >>> values = [torch.tensor([[5.0], [-5.0]]), torch.tensor([[-5.2], [5.2], [0.5]])]
        >>> found = match(prior, values, [torch.ones(1)] * 2)
        >>> found.assignments, len(found.atoms)
        ([tensor([1, 0]), tensor([0, 1, 2])], 3)
    """
    if accept not in ("always", "improvement"):
        raise FederationError(f"accept must be always or improvement, got {accept!r}")
    _check_orders(orders, len(values), sweeps)
    state, clients = _State(prior, values, own, past), range(len(values))
    widest = sorted(clients, key=lambda client: -len(values[client]))
    state.begin(start or [None] * len(values), widest if orders is None else orders[0])
    history = [state.objective()]
    for sweep in range(sweeps):
        if orders is None:
            order = torch.randperm(len(values), generator=generator).tolist()
        else:
            order = list(orders[sweep + 1])
        for client in order:
            (state.replace if accept == "always" else state.improve)(client)
        history.append(state.objective())
    assigned = [atoms for atoms in state.assignments if atoms is not None]
    after = Posterior(state.sums, state.precisions, state.uses(), state.past.steps + 1)
    return Matching(assigned, state.sums, state.precisions, state.counts, history, after)


def _check_orders(orders: Sequence[Sequence[int]] | None, clients: int, sweeps: int) -> None:
    """Refuse orders that are not of all clients, or too few."""
    if orders is not None and (
        len(orders) <= sweeps or any(sorted(order) != list(range(clients)) for order in orders)
    ):
        raise FederationError(
            f"orders must hold one of the {clients} clients, numbered from 0, for the greedy pass"
            f" and one for each of {sweeps} sweeps, got {orders}"
        )


def _check_start(client: int, atoms: Tensor, neurons: int) -> None:
    """Refuse a start that is no assignment."""
    if atoms.shape != (neurons,) or len(atoms.unique()) < neurons or int(atoms.min()) < 0:
        raise FederationError(
            f"start must give each of the {neurons} neurons of client {client} an atom of its own,"
            f" numbered from 0, got {atoms.tolist()}"
        )
