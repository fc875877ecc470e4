r"""Matching of neurons of independently trained networks (Yurochkin et al., 2019, "PFNM").

A neuron is the vector of its weights. Each neuron is a noisy copy of a global neuron, an atom
:math:`\theta_i \sim N(\mu_0, \sigma_0^2)`. The assignment of neurons to atoms and the number of
atoms are inferred under a Beta-Bernoulli process. Tensors are on the CPU, and all computations in
float64.

Atom :math:`i` with clients :math:`j` has the natural parameters

.. math:: S_i = \mu_0 p_0 + \sum_{(j, l) \to i} p_j v_{jl}, \qquad
    P_i = p_0 + \sum_{(j, l) \to i} p_j

for each coordinate, where :math:`p_0 = 1 / \sigma_0^2` and :math:`p_j = 1 / \sigma_j^2`. Its
optimal value is :math:`S_i / P_i` (proposition 1).

In a stream, where data arrive in steps, the posterior of a step is the prior of the next. An atom
starts a step with :math:`S_i` and :math:`P_i` of the previous step, and is kept even if no client
has it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

#: Number of elements to process at once, limited by the CPU cache.
PIECE = 2**18


@dataclass(frozen=True)
class Process:
    r"""Prior over neurons.

    Args:
        mean: Mean :math:`\mu_0` of each coordinate, ``[D]``.
        precision: Precision :math:`p_0 = 1 / \sigma_0^2` of each coordinate, ``[D]``, positive.
        clients: Number :math:`J` of clients.
        gamma: Concentration :math:`\gamma_0`. Larger values give more atoms.
        popularity: Weight :math:`\kappa` of the number of other clients with an atom. 2 follows
            from the paper's equations 6 and 8. 1 is proposition 2 as printed, and the authors'
            program.
        cap: Upper bound on the counts of an atom; 10 in the authors' program. None means no bound.
        most: Number of atoms from which a client may add only one atom (supplement 4.2: 700), or as
            many as it has more neurons than there are atoms. The limit is soft: each client can add
            one atom. None means no limit.
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
    """Posterior after the steps of a stream.

    Args:
        sums: Sums :math:`S`, ``[L, D]``.
        precisions: Precisions :math:`P`, ``[L, D]``.
        uses: Number of steps in which each client had each atom, ``[J, L]``.
        steps: Number of steps.
    """

    sums: Tensor
    precisions: Tensor
    uses: Tensor
    steps: int

    @classmethod
    def before(cls, clients: int, size: int) -> Posterior:
        """Return the posterior before the first step, with no atoms of ``size`` coordinates."""
        none = torch.zeros(0, size, dtype=torch.float64)
        return cls(none, none, torch.zeros(clients, 0, dtype=torch.float64), 0)


@dataclass(frozen=True)
class Matching:
    """Assignment of neurons to atoms.

    Args:
        assignments: Atom of each neuron, ``[L_j]``, for each client.
        sums: Sums :math:`S`, ``[L, D]``.
        precisions: Precisions :math:`P`, ``[L, D]``.
        counts: Number of clients of each atom, ``[L]``; may be 0 in a stream.
        posterior: Posterior after this step, for the next step of a stream.
    """

    assignments: list[Tensor]
    sums: Tensor
    precisions: Tensor
    counts: Tensor
    posterior: Posterior

    @property
    def atoms(self) -> Tensor:
        """Optimal values of the atoms, ``[L, D]``."""
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
    r"""Return the gain in the objective for each assignment of a client's neurons to atoms.

    The objective is twice the logarithm of the posterior of assignments (equation 6). Assigning
    neuron :math:`l` to atom :math:`i`, with :math:`m_i` other clients, gains

    .. math:: \sum_d \frac{(S_i + p v_l)^2}{P_i + p} - \frac{S_i^2}{P_i}
        + \kappa \log \frac{m_i}{J - m_i},

    and assigning it to the :math:`q`-th new atom gains

    .. math:: \sum_d \frac{(\mu_0 p_0 + p v_l)^2}{p_0 + p} - \mu_0^2 p_0
        + 2 \log \frac{\gamma_0}{J} - 2 \log q,

    with :math:`\kappa` = ``popularity`` (propositions 1 and 2). In step :math:`s` of a stream
    :math:`m_i` is the number of earlier steps in which this client had the atom, the fraction is
    :math:`\frac{1 + m_i}{s - m_i}`, and :math:`\frac{\gamma_0}{J}` is :math:`\frac{\gamma_0}{s J}`
    (supplement, equation 11). Squares are expanded to use two matrix products.

    Args:
        prior: Prior over neurons.
        sums: Sums :math:`S` of the other clients, ``[L, D]``.
        precisions: Precisions :math:`P` of the other clients, ``[L, D]``.
        counts: Counts :math:`m`, ``[L]``.
        values: Neurons :math:`v` of the client, ``[L_j, D]``.
        own: Precisions :math:`p` of the client, ``[D]``.
        step: Step :math:`s` of a stream, from 1. None without a stream.

    Returns:
        Gains, ``[L_j, L + N]``, where :math:`N` is the number of possible new atoms.

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
    rate = prior.gamma / (prior.clients * (step or 1))  # expected number of new atoms
    share = torch.full_like(q, rate).log() - q.log()
    return torch.cat([known, new[:, None] + 2 * share], 1)


def _fit(sums: Tensor, precisions: Tensor, values: Tensor, own: Tensor) -> Tensor:
    """Return the gain in the data terms of existing atoms, ``[L_j, L]``."""
    part = own / (precisions + own)
    alone = (part * sums.square() / precisions).sum(1)
    return 2 * values @ (part * sums).mT + values.square() @ (part * own).mT - alone


def _odds(prior: Process, counts: Tensor, step: int | None) -> Tensor:
    """Return the log-odds that a client has an atom."""
    m = counts if prior.cap is None else counts.clamp(max=prior.cap)
    return (m / (prior.clients - m) if step is None else (1 + m) / (step - m)).log()


def _places(prior: Process, atoms: int, neurons: int) -> int:
    """Return the number of atoms that a client may add; at the limit only one."""
    if prior.most is None:
        return neurons
    return min(neurons, max(prior.most - atoms, neurons - atoms, 1))


def best_assignment(gain: Tensor) -> Tensor:
    """Assign neurons to distinct atoms with the maximum total gain (Hungarian method).

    Args:
        gain: Gains, ``[L_j, N]``, with at least as many columns as rows.

    Returns:
        The column of each row, ``[L_j]``.

    Example:
        >>> best_assignment(torch.tensor([[3.0, 2.0], [3.0, 0.0]]))
        tensor([1, 0])
    """
    _, columns = linear_sum_assignment(gain.cpu().numpy(), maximize=True)
    return torch.as_tensor(columns, dtype=torch.int64)


class _State:
    """Assignments and their sufficient statistics."""

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
        #: Atoms of each assigned client, ``[L_j]``.
        self.assignments: dict[int, Tensor] = {}
        #: Step of the stream; None without a stream.
        self.step = None if past is None else past.steps + 1
        self.past = Posterior.before(len(values), len(prior.mean)) if past is None else past
        self.sums = self.past.sums.double().clone()
        self.precisions = self.past.precisions.double().clone()
        self.counts = torch.zeros(len(self.sums), dtype=torch.float64)

    def add(self, client: int, atoms: Tensor) -> None:
        """Assign the neurons of a client. New atoms start from the prior."""
        more = max(int(atoms.max()) + 1 - len(self.counts), 0)
        begin = (self.prior.mean * self.prior.precision).double().expand(more, -1)
        self.sums = torch.cat([self.sums, begin])
        new = self.prior.precision.double().expand(more, -1)
        self.precisions = torch.cat([self.precisions, new])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more)])
        self.assignments[client] = atoms
        self._count(client, atoms, 1)

    def remove(self, client: int) -> None:
        """Remove a client, and the atoms that only it had."""
        self._count(client, self.assignments.pop(client), -1)
        self.drop_empty()

    def drop_empty(self) -> None:
        """Remove atoms without clients."""
        kept = self.counts > 0
        kept[: len(self.past.sums)] = True
        place = kept.cumsum(0) - 1
        self.sums, self.precisions = self.sums[kept], self.precisions[kept]
        self.counts = self.counts[kept]
        self.assignments = {i: place[atoms] for i, atoms in self.assignments.items()}

    def _count(self, client: int, atoms: Tensor, sign: int) -> None:
        own = self.own[client]
        self.sums.index_add_(0, atoms, own * self.values[client], alpha=sign)
        self.precisions.index_add_(0, atoms, own.expand(len(atoms), -1), alpha=sign)
        self.counts.index_add_(0, atoms, torch.ones(len(atoms)).double(), alpha=sign)

    def uses(self) -> Tensor:
        """Return the number of steps in which each client had each atom, ``[J, L]``."""
        uses = self.counts.new_zeros(len(self.values), len(self.counts))
        uses[:, : self.past.uses.shape[1]] = self.past.uses
        for client, atoms in self.assignments.items():
            uses[client, atoms] += 1
        return uses

    def begin(self, start: Sequence[Tensor | None], order: Sequence[int]) -> None:
        """Assign clients with a start, and place the others in the given order."""
        for client, atoms in enumerate(start):
            if atoms is not None:
                self.add(client, atoms)
        self.drop_empty()
        for client in order:
            if client not in self.assignments:
                self.place(client)

    def place(self, client: int) -> None:
        """Match an unassigned client to the atoms of the others."""
        own, values = self.own[client], self.values[client]
        counts = self.counts if self.step is None else self.uses()[client]
        gain = gains(self.prior, self.sums, self.precisions, counts, values, own, self.step)
        atoms = best_assignment(gain)
        fresh = atoms >= len(self.counts)
        # Number new atoms in the order of the neurons: the value of q does not matter.
        atoms[fresh] = len(self.counts) + torch.arange(int(fresh.sum()))
        self.add(client, atoms)


def match(
    prior: Process,
    values: Sequence[Tensor],
    own: Sequence[Tensor],
    sweeps: int = 5,
    orders: Sequence[Sequence[int]] | None = None,
    start: Sequence[Tensor | None] | None = None,
    generator: torch.Generator | None = None,
    past: Posterior | None = None,
) -> Matching:
    """Match the neurons of several clients (Yurochkin et al., 2019, section 3.1).

    A greedy pass places the clients one after another, from the widest, each by the Hungarian
    method. Then each sweep removes every client in turn and places it again. The best assignment of
    a single client can slightly decrease the total objective, because its gains ignore the number
    of atoms that only other clients have.

    Args:
        prior: Prior over neurons.
        values: Neurons of each client, ``[L_j, D]``.
        own: Precisions of the coordinates of each client, ``[D]``, at least 0.
        sweeps: Number of sweeps.
        orders: Orders of the clients: one for the greedy pass, then one per sweep. None draws the
            orders of the sweeps.
        start: Initial atoms of each client, ``[L_j]``, all distinct, instead of the greedy pass
            (the authors' program in rounds after the first). Clients with None are placed after the
            others, in the order of the greedy pass.
        generator: Generator of the orders. None uses the default generator of torch.
        past: Posterior after the previous steps of a stream, :meth:`Posterior.before` in the first
            step. None without a stream.

    Returns:
        The matching.

    Example:
        >>> prior = Process(torch.zeros(1), torch.full((1,), 0.1), clients=2)
        >>> values = [torch.tensor([[5.0], [-5.0]]), torch.tensor([[-5.2], [5.2], [0.5]])]
        >>> matching = match(prior, values, [torch.ones(1)] * 2)
        >>> matching.assignments, len(matching.atoms)
        ([tensor([1, 0]), tensor([0, 1, 2])], 3)
    """
    state, clients = _State(prior, values, own, past), range(len(values))
    widest = sorted(clients, key=lambda client: -len(values[client]))
    state.begin(start or [None] * len(values), widest if orders is None else orders[0])
    for sweep in range(sweeps):
        if orders is None:
            order = torch.randperm(len(values), generator=generator).tolist()
        else:
            order = list(orders[sweep + 1])
        for client in order:
            state.remove(client)
            state.place(client)
    after = Posterior(state.sums, state.precisions, state.uses(), state.past.steps + 1)
    assignments = [state.assignments[client] for client in clients]
    return Matching(assignments, state.sums, state.precisions, state.counts, after)
