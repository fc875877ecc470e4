r"""Multilayer perceptrons matched layer by layer (Yurochkin et al., 2019, "PFNM").

A network is a list of layers, each a weight, ``[out, in]``, and a bias, ``[out]``; the last is the
softmax layer. Hidden layers are matched from the top down: a neuron is the vector of its bias and
its outgoing weights, in the order of the atoms above, which is known by then; in the lowest hidden
layer, of its incoming weights too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fl.functional.matching import Matching, Process, match
from lightning_fl.types import FederationError

Layers = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MatchedNetwork:
    """What networks have been merged to.

    Args:
        layers: The network.
        matchings: Of each hidden layer, the lowest first.
    """

    layers: list[tuple[Tensor, Tensor]]
    matchings: list[Matching]

    @property
    def widths(self) -> list[int]:
        """Neurons of each hidden layer."""
        return [len(bias) for _, bias in self.layers[:-1]]

    def of_client(self, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return the part of the network that a client's neurons were matched to, in its order."""
        chosen = [matching.assignments[client] for matching in self.matchings]
        inputs: list[Tensor | slice] = [slice(None), *chosen]
        outputs: list[Tensor | slice] = [*chosen, slice(None)]
        return [
            (weight[out][:, into], bias[out])
            for (weight, bias), into, out in zip(self.layers, inputs, outputs, strict=True)
        ]


def match_networks(
    networks: Sequence[Layers],
    class_counts: Tensor | None = None,
    sigma2: float = 1.0,
    sigma02: float = 1.0,
    gamma: float = 1.0,
    *,
    bias_mean: float = 0.1,
    popularity: float = 2.0,
    cap: int | None = None,
    max_width: int | None = None,
    sweeps: int = 5,
    orders: Sequence[Sequence[int]] | None = None,
    start: Sequence[Sequence[Tensor]] | None = None,
    generator: torch.Generator | None = None,
) -> MatchedNetwork:
    r"""Merge networks that were trained apart, of any widths, into one whose widths are inferred.

    Weights of the softmax layer count by what a client has seen: with :math:`n_{jk}` samples of
    class :math:`k` client :math:`j` has the precision
    :math:`\frac{1}{\sigma^2} \frac{n_{jk}}{\sum_i n_{ik}}` there, hence together
    :math:`1 / \sigma^2`; elsewhere each client has :math:`1 / \sigma^2`.

    Args:
        networks: Of each client, from input to classes.
        class_counts: :math:`n`, ``[J, K]``; None gives each client the same share.
        sigma2: :math:`\sigma^2`, the variance of a client's weights around the atom's.
        sigma02: :math:`\sigma_0^2`, the variance of atoms around the prior's mean.
        gamma: :math:`\gamma_0`: the larger, the wider.
        bias_mean: Mean of biases before; that of weights is 0.
        popularity: See :class:`Process`.
        cap: See :class:`Process`.
        max_width: Neurons of a hidden layer at most, but where a client alone has more.
        sweeps: See :func:`match`.
        orders: See :func:`match`; the same in all layers.
        start: Assignments to start with, of each hidden layer and client, the lowest layer first.
        generator: See :func:`match`.

    Raises:
        FederationError: If networks differ in depth, inputs or classes, hold numbers that are not
            finite, a variance is not positive, or nobody has a sample of a class.

    Example:
        >>> def one(*neurons):  # of one input and one output: weights in, bias, weights out
        ...     w, b, v = torch.tensor(neurons).unbind(1)
        ...     return [(w[:, None], b), (v[None], torch.zeros(1))]
        >>> found = match_networks([one((5.0, 0.0, 3.0)), one((-4.0, 0.0, 2.0), (5.2, 0.0, 3.2))],
        ...                        sigma2=0.1, sigma02=10.0)
        >>> found.widths, found.matchings[0].assignments
        ([2], [tensor([0]), tensor([1, 0])])
    """
    nets = [[(w.double(), b.double()) for w, b in layers] for layers in networks]
    for name, value in (("sigma2", sigma2), ("sigma02", sigma02), ("gamma", gamma)):
        if not 0 < value < float("inf"):
            raise FederationError(f"{name} must be positive and finite, got {value}")
    _check_networks(nets)
    share = _shares(class_counts, len(nets), len(nets[0][-1][1]))
    # The softmax bias: of one coordinate each, nothing to be matched.
    bias = bias_mean / sigma02 + sum(
        n * net[-1][1] / sigma2 for n, net in zip(share, nets, strict=True)
    )
    layers = [(torch.empty(0), bias / (1 / sigma02 + share.sum(0) / sigma2))]
    matchings: list[Matching] = []
    for layer in reversed(range(len(nets[0]) - 1)):
        next_width = len(layers[0][1])
        values, own = [], []
        for client, net in enumerate(nets):
            outgoing = net[layer + 1][0].mT
            trust = share[client]
            if matchings:  # in the order of the atoms above
                ordered = outgoing.new_zeros(len(outgoing), next_width)
                ordered[:, matchings[0].assignments[client]] = outgoing
                outgoing, trust = ordered, torch.ones(next_width).double()
            incoming = net[0][0] if layer == 0 else outgoing[:, :0]
            values.append(torch.cat([net[layer][1][:, None], outgoing, incoming], 1))
            other = trust.new_ones(incoming.shape[1])
            own.append(torch.cat([trust.new_ones(1), trust, other]) / sigma2)
        mean = torch.zeros_like(own[0])
        mean[0] = bias_mean
        precision = torch.full_like(mean, 1 / sigma02)
        prior = Process(mean, precision, len(nets), gamma, popularity, cap, max_width)
        begun = None if start is None else start[layer]
        matchings.insert(0, match(prior, values, own, sweeps, orders, begun, generator))
        atoms = matchings[0].atoms
        layers[0] = (atoms[:, 1 : next_width + 1].mT, layers[0][1])
        layers.insert(0, (atoms[:, next_width + 1 :], atoms[:, 0]))
    return MatchedNetwork(layers, matchings)


def _shares(class_counts: Tensor | None, clients: int, classes: int) -> Tensor:
    """Return what part of each class's samples a client has, ``[J, K]``."""
    counts = class_counts
    if counts is None:
        counts = torch.ones(clients, classes)
    if counts.shape != (clients, classes):
        raise FederationError(
            f"class_counts must be one number for each of {clients} clients and {classes} classes,"
            f" got the shape {tuple(counts.shape)}"
        )
    total = counts.double().sum(0)
    if not (total > 0).all():
        absent = (total <= 0).nonzero()[:, 0].tolist()
        raise FederationError(
            f"no client has a sample of class {absent[0]}: nobody knows its weights. Leave the"
            " class out of the network, or leave class_counts out"
        )
    return counts.double() / total


def _check_networks(nets: Sequence[Layers]) -> None:
    """Refuse networks that cannot be matched with each other."""
    if not nets or len(nets[0]) < 2:
        raise FederationError("matching needs networks with a hidden layer or more")
    first = nets[0]
    for client, net in enumerate(nets):
        if len(net) != len(first):
            raise FederationError(
                f"client {client} has a network of {len(net)} layers, client 0 of {len(first)}:"
                " networks to be matched have one depth"
            )
        for what, own, other in (
            ("inputs", net[0][0].shape[1], first[0][0].shape[1]),
            ("classes", len(net[-1][1]), len(first[-1][1])),
        ):
            if own != other:
                raise FederationError(
                    f"client {client} has a network of {own} {what}, client 0 of {other}: networks"
                    " to be matched have the same inputs and classes"
                )
        for layer, (weight, bias) in enumerate(net):
            if not (weight.isfinite().all() and bias.isfinite().all()):
                raise FederationError(
                    f"layer {layer} of client {client} has weights that are not finite: train it"
                    " with a lower learning rate, or leave the client out"
                )
