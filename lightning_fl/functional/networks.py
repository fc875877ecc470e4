r"""Networks matched layer by layer (Yurochkin et al., 2019, "PFNM"; Wang et al., 2020, "FedMA").

A network is a list of layers. Each layer is a pair of a weight, ``[out, in, ...]``, and a bias,
``[out]``. The last layer is the softmax layer. A neuron is a unit of a linear layer, ``[out, in]``,
or a filter of a convolution, ``[out, in, height, width]``. If a linear layer follows a convolution,
its weight is ``[out, in, pixels]``, with all pixels of the map of each filter.

:func:`match_networks` matches layers from the top down. A neuron is the vector of its bias and its
outgoing weights, in the order of the atoms of the layer above. In the lowest hidden layer the
vector also contains the incoming weights. :func:`match_upwards` matches layers from the input up. A
neuron is the vector of its bias and its incoming weights, in the order of the atoms of the layer
below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fl.functional.neuron_matching import Matching, Posterior, Process, match
from lightning_fl.options import check_integer, check_number

Layers = Sequence[tuple[Tensor, Tensor]]
#: Orders of clients, for the greedy pass and then for each sweep.
Orders = Sequence[Sequence[int]]


@dataclass(frozen=True)
class NetworkPosterior:
    """Posterior of a network after the steps of a stream; empty by default.

    Args:
        layers: Posterior of each hidden layer, the lowest first.
        bias: Sums and precisions of the bias of the softmax layer, ``[classes]`` each.
    """

    layers: list[Posterior] = field(default_factory=list)
    bias: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class MatchedNetwork:
    """Result of merging networks.

    Args:
        layers: Merged network.
        matchings: Matching of each hidden layer, the lowest first.
        posterior: Posterior after this step, for the next step of a stream.
    """

    layers: list[tuple[Tensor, Tensor]]
    matchings: list[Matching]
    posterior: NetworkPosterior

    @property
    def widths(self) -> list[int]:
        """Number of neurons of each hidden layer."""
        return [len(bias) for _, bias in self.layers[:-1]]

    def of_client(self, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return the atoms of a client's neurons as a network, in the order of its neurons."""
        return part_of(self.layers, [m.assignments[client] for m in self.matchings])


def part_of(layers: Layers, chosen: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the sub-network of the given hidden neurons, in the given order.

    Args:
        layers: Layers of the network.
        chosen: Indices of the neurons of each hidden layer.

    Example:
        >>> net = [(torch.eye(3), torch.arange(3.0)), (torch.ones(1, 3), torch.zeros(1))]
        >>> part_of(net, [torch.tensor([2, 0])])[0][1]
        tensor([2., 0.])
    """
    inputs: list[Tensor | slice] = [slice(None), *chosen]
    outputs: list[Tensor | slice] = [*chosen, slice(None)]
    return [
        (weight[out][:, into], bias[out])
        for (weight, bias), into, out in zip(layers, inputs, outputs, strict=True)
    ]


@dataclass(frozen=True)
class MatchingOptions:
    r"""Options of :func:`match_networks` and :func:`match_upwards`.

    Args:
        client_variance: Variance :math:`\sigma^2` of client weights around the atom.
        prior_variance: Variance :math:`\sigma_0^2` of atoms around the prior mean.
        gamma: Concentration :math:`\gamma_0`. Larger values give wider networks.
        bias_mean: Prior mean of biases. The prior mean of weights is 0.
        popularity: See :class:`~lightning_fl.functional.neuron_matching.Process`.
        cap: See :class:`~lightning_fl.functional.neuron_matching.Process`.
        max_width: Width of a hidden layer from which a client may add only one neuron (``most`` of
            :class:`~lightning_fl.functional.neuron_matching.Process`).
        sweeps: See :func:`~lightning_fl.functional.neuron_matching.match`.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> MatchingOptions(gamma=7.0).client_variance
        1.0
    """

    client_variance: float = 1.0
    prior_variance: float = 1.0
    gamma: float = 1.0
    bias_mean: float = 0.1
    popularity: float = 2.0
    cap: int | None = None
    max_width: int | None = None
    sweeps: int = 5

    def __post_init__(self) -> None:
        check_number("client_variance", self.client_variance, above=0)
        check_number("prior_variance", self.prior_variance, above=0)
        check_number("gamma", self.gamma, above=0)
        check_number("bias_mean", self.bias_mean)
        check_number("popularity", self.popularity, min=0)
        check_integer("cap", self.cap, min=1, optional=True)
        check_integer("max_width", self.max_width, min=1, optional=True)
        check_integer("sweeps", self.sweeps, min=0)

    def prior(self, clients: int, size: int) -> Process:
        """Return the prior over neurons with the bias as the first coordinate.

        Args:
            clients: Number of clients.
            size: Number of coordinates.
        """
        mean = torch.zeros(size, dtype=torch.float64)
        mean[0] = self.bias_mean
        precision = torch.full_like(mean, 1 / self.prior_variance)
        return Process(
            mean, precision, clients, self.gamma, self.popularity, self.cap, self.max_width
        )


#: Options of the authors' programs of PFNM and FedMA.
DOWNWARDS, UPWARDS = MatchingOptions(), MatchingOptions(gamma=7.0)


def match_networks(
    networks: Sequence[Layers],
    class_counts: Tensor | None = None,
    options: MatchingOptions = DOWNWARDS,
    *,
    orders: Orders | None = None,
    start: Sequence[Sequence[Tensor | None]] | None = None,
    generator: torch.Generator | None = None,
    past: NetworkPosterior | None = None,
) -> MatchedNetwork:
    r"""Merge independently trained networks of any widths, and infer the merged widths.

    In the softmax layer, client :math:`j` with :math:`n_{jk}` samples of class :math:`k` has the
    precision :math:`\frac{1}{\sigma^2} \frac{n_{jk}}{\sum_i n_{ik}}`; the precisions of all clients
    sum to :math:`1 / \sigma^2`. In other layers each client has the precision :math:`1 / \sigma^2`.

    Args:
        networks: Network of each client, from input to classes.
        class_counts: Samples per client and class, ``[J, K]``; None weights clients equally, as for
            a class without samples (except in a stream).
        options: Options of the matching.
        orders: Orders of clients in each hidden layer; None draws separate orders for each. For
            this and the next two, see :func:`~lightning_fl.functional.neuron_matching.match`.
        start: Initial assignments of each hidden layer and client, the lowest layer first.
        generator: Generator of the orders.
        past: Posterior after the last step of a stream, ``NetworkPosterior()`` before the first.

    Example:
        >>> def one(*neurons):  # of one input and one output: weights in, bias, weights out
        ...     w, b, v = torch.tensor(neurons).unbind(1)
        ...     return [(w[:, None], b), (v[None], torch.zeros(1))]
        >>> nets = [one((5.0, 0.0, 3.0)), one((-4.0, 0.0, 2.0), (5.2, 0.0, 3.2))]
        >>> merged = match_networks(nets, None, MatchingOptions(0.1, 10.0), orders=[[0, 1]] * 6)
        >>> merged.widths, merged.matchings[0].assignments
        ([2], [tensor([0]), tensor([1, 0])])
    """
    nets = _in_float64(networks)
    share = _shares(class_counts, nets, past is not None)
    top, total = _softmax_bias(nets, share, options, None if past is None else past.bias)
    layers = [(torch.empty(0), top / total)]
    matchings: list[Matching] = []
    for layer in reversed(range(len(nets[0]) - 1)):
        width, kernel = len(layers[0][1]), nets[0][layer + 1][0].shape[2:]
        end = 1 + width * kernel.numel()  # end of bias and outgoing weights
        values, trust = _outgoing(nets, layer, width, share, matchings)
        prior = options.prior(len(nets), values[0].shape[1])
        before = None if past is None else _before(past, layer, prior, end)
        own = [t / options.client_variance for t in trust]
        begun = None if start is None else start[layer]
        matching = match(prior, values, own, options.sweeps, orders, begun, generator, before)
        matchings.insert(0, matching)
        atoms = matching.atoms
        above = atoms[:, 1:end].unflatten(1, (width, *kernel)).movedim(0, 1)
        layers = [(atoms[:, end:], atoms[:, 0]), (above, layers[0][1]), *layers[1:]]
    layers[0] = (layers[0][0].unflatten(1, nets[0][0][0].shape[1:]), layers[0][1])
    posteriors = [matching.posterior for matching in matchings]
    return MatchedNetwork(layers, matchings, NetworkPosterior(posteriors, (top, total)))


def match_upwards(
    networks: Sequence[Layers],
    class_counts: Tensor | None = None,
    options: MatchingOptions = UPWARDS,
    *,
    orders: Orders | None = None,
    generator: torch.Generator | None = None,
    known: Sequence[Sequence[Tensor]] = (),
) -> MatchedNetwork:
    r"""Merge networks from the input up, as in FedMA (Wang et al., 2020, algorithm 1).

    A hidden neuron is the vector of its bias and its incoming weights, in the order of the atoms of
    the layer below. Softmax layer weights, in the same order, are averaged by class counts:

    .. math:: w_k = \sum_j \frac{n_{jk}}{\sum_i n_{ik}} w_{jk}.

    Args:
        networks: See :func:`match_networks`.
        class_counts: See :func:`match_networks`.
        options: Options of the matching.
        orders: See :func:`match_networks`.
        generator: See :func:`~lightning_fl.functional.neuron_matching.match`.
        known: Fixed assignments of the lowest hidden layers for each client. These are layers that
            the clients received and did not change.
    """
    nets = _in_float64(networks)
    share = _shares(class_counts, nets, False)
    layers: list[tuple[Tensor, Tensor]] = []
    matchings: list[Matching] = []
    for layer in range(len(nets[0]) - 1):
        kernel = nets[0][layer][0].shape[2:]
        incoming = _incoming(nets, layer, matchings)
        values = [
            torch.cat([net[layer][1][:, None], weight.flatten(1)], 1)
            for net, weight in zip(nets, incoming, strict=True)
        ]
        prior = options.prior(len(nets), values[0].shape[1])
        own = [torch.full_like(prior.mean, 1 / options.client_variance)] * len(nets)
        begun = known[layer] if layer < len(known) else None
        sweeps = 0 if begun else options.sweeps
        matching = match(prior, values, own, sweeps, orders, begun, generator)
        matchings.append(matching)
        atoms = matching.atoms if begun is None else _given(values, matching)
        layers.append((atoms[:, 1:].unflatten(1, (-1, *kernel)), atoms[:, 0]))
    weights = _incoming(nets, len(nets[0]) - 1, matchings)
    last = sum(n.view(-1, *[1] * (w.ndim - 1)) * w for n, w in zip(share, weights, strict=True))
    bias = sum(n * net[-1][1] for n, net in zip(share, nets, strict=True))
    return MatchedNetwork([*layers, (last, bias)], matchings, NetworkPosterior())


def _softmax_bias(
    nets: Sequence[Layers],
    share: Tensor,
    options: MatchingOptions,
    past: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return sums and precisions of the softmax layer's bias, which needs no matching."""
    variance, prior = options.client_variance, 1 / options.prior_variance
    sums, precisions = past or (options.bias_mean / options.prior_variance, prior)
    added = sum(n * net[-1][1] / variance for n, net in zip(share, nets, strict=True))
    return sums + added, precisions + share.sum(0) / variance


def _outgoing(
    nets: Sequence[Layers], layer: int, width: int, share: Tensor, matchings: Sequence[Matching]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the neuron vectors of a layer for each client, and the weights of their coordinates.

    A vector contains the bias, the outgoing weights in the order of the atoms of the layer above
    and, in the lowest layer, the incoming weights.
    """
    values, trusts, pixels = [], [], nets[0][layer + 1][0].shape[2:].numel()
    for client, net in enumerate(nets):
        outgoing, trust = net[layer + 1][0].movedim(1, 0), share[client]
        if matchings:  # otherwise the layer above is the softmax layer
            outgoing = _ordered(outgoing, matchings[0].assignments[client], width)
            trust = torch.ones(width).double()
        incoming = net[0][0].flatten(1) if layer == 0 else outgoing.new_zeros(len(outgoing), 0)
        values.append(torch.cat([net[layer][1][:, None], outgoing.flatten(1), incoming], 1))
        each, other = trust.repeat_interleave(pixels), trust.new_ones(1)
        trusts.append(torch.cat([other, each, other.expand(incoming.shape[1])]))
    return values, trusts


def _ordered(weight: Tensor, atoms: Tensor, width: int) -> Tensor:
    """Reorder the second dimension of weights, ``[neurons, others, ...]``, by its atoms."""
    ordered = weight.new_zeros(len(weight), width, *weight.shape[2:])
    ordered[:, atoms] = weight
    return ordered


def _incoming(nets: Sequence[Layers], layer: int, matchings: Sequence[Matching]) -> list[Tensor]:
    """Return the incoming weights of a layer per client, in the order of the atoms below."""
    if not matchings:
        return [net[layer][0] for net in nets]
    below = matchings[-1]
    return [
        _ordered(net[layer][0], atoms, len(below.atoms))
        for net, atoms in zip(nets, below.assignments, strict=True)
    ]


def _given(values: Sequence[Tensor], matching: Matching) -> Tensor:
    """Return atoms of a fixed assignment, with values copied from the clients.

    A client has the weights from its own neurons below only, and zeros for those of others.
    """
    atoms = torch.zeros_like(matching.atoms)
    for value, own in zip(values, matching.assignments, strict=True):
        atoms[own] = torch.where(value != 0, value, atoms[own])
    return atoms


def _before(past: NetworkPosterior, layer: int, prior: Process, end: int) -> Posterior:
    """Return the posterior of a layer, with the prior of new coordinates.

    These are before ``end``, and belong to new atoms of the layer above.
    """
    if not past.layers:
        return Posterior.before(prior.clients, len(prior.mean))
    known = past.layers[layer]
    at = end - (len(prior.mean) - known.sums.shape[1])

    def grown(tensor: Tensor, begin: Tensor) -> Tensor:
        new = begin[at:end].expand(len(tensor), -1)
        return torch.cat([tensor[:, :at], new, tensor[:, at:]], 1)

    sums = grown(known.sums, prior.mean * prior.precision)
    return replace(known, sums=sums, precisions=grown(known.precisions, prior.precision))


def _in_float64(networks: Sequence[Layers]) -> list[list[tuple[Tensor, Tensor]]]:
    return [[(w.double(), b.double()) for w, b in layers] for layers in networks]


def _shares(class_counts: Tensor | None, nets: Sequence[Layers], is_stream: bool) -> Tensor:
    """Return the fraction of samples per client for each class, ``[J, K]``.

    For a class without samples they are equal, or 0 in a stream, whose prior has its weights.
    """
    counts = torch.ones(len(nets), len(nets[0][-1][1])) if class_counts is None else class_counts
    counts, total = counts.double(), counts.double().sum(0)
    if is_stream:
        return counts / total.where(total > 0, 1)
    counts = counts.where(total > 0, 1)
    return counts / counts.sum(0)
