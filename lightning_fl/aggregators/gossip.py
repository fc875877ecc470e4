"""Decentralized averaging between neighbors (gossip)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from lightning_fl.aggregators.client_models import ClientModels
from lightning_fl.errors import FederationError
from lightning_fl.functional.mixing import Graph, adjacency, check_mixing, metropolis
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_choice, check_integer, check_number

#: Number of parameters per client that are mixed at once in float64, to limit memory.
PIECE = 2**14


class Gossip(ClientModels):
    r"""Decentralized averaging: every client averages its model with those of its neighbors.

    After local training, :math:`x_i \leftarrow \sum_j W_{ij} (x_j + \Delta_j)`, with
    :math:`\Delta_j = 0` for clients outside the round. If :math:`W` is symmetric with row sums 1,
    the mean of all models follows :class:`FedAvg` with equal weights, and the models converge to
    consensus. There is no server: validation uses the mean of the client models. One model per
    client is kept in memory and saved in the checkpoint.

    Args:
        graph: Communication graph, with Metropolis weights and self-loops: ``ring``, ``grid``,
            ``erdos_renyi`` or ``complete``.
        mixing_matrix: Mixing matrix :math:`W` to use instead of a graph, ``[clients, clients]``:
            symmetric, with row sums 1, and connected.
        probability: Edge probability of ``erdos_renyi``.
        seed: Seed of the random graph. None uses the seed of the run.

    Raises:
        FederationError: If an option is out of range, or the matrix does not connect all clients.

    Example:
        >>> from lightning_fl.contracts.context import Federation
        >>> from lightning_fl.types import ClientUpdate, Cohort
        >>> rule = Gossip("ring")
        >>> rule.setup(Federation(num_clients=4, sampling=Cohort(size=1, clients=4)))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.tensor([0]), torch.tensor([[3.0]]), torch.tensor([9])))
        >>> rule.compute(), rule.models[:, 0]
        (tensor([0.7500]), tensor([1., 1., 0., 1.]))
    """

    weights: Tensor

    def __init__(
        self,
        graph: Graph = "ring",
        mixing_matrix: Sequence[Sequence[float]] | None = None,
        probability: float = 0.5,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.graph = check_choice("graph", graph, *get_args(Graph))
        self.probability = check_number("probability", probability, above=0, max=1)
        self.seed = check_integer("seed", seed, min=0, optional=True)
        given = None
        if mixing_matrix is not None:
            try:
                given = torch.tensor(mixing_matrix, dtype=torch.float64)
            except (TypeError, ValueError) as error:
                raise FederationError(f"mixing_matrix must be rows of numbers: {error}") from error
            check_mixing(given)
        self.mixing_matrix, self._given = mixing_matrix, given

    def allocate(self, server: Tensor) -> None:
        """Declare the mixing matrix, too."""
        super().allocate(server)
        self.register_buffer("weights", self._mixing().to(server.device), persistent=False)

    def _mixing(self) -> Tensor:
        n, given = self.known_federation.num_clients, self._given
        if given is None:
            random = generator(self.seed_of(self.seed), RandomStream.GRAPH)
            return metropolis(adjacency(self.graph, n, self.probability, random))
        if n != len(given):
            raise FederationError(f"mixing_matrix has {len(given)} clients, the federation has {n}")
        return given

    def compute(self) -> Tensor:
        """Mix the client models, and return their mean."""
        if not (found := self.gather_by_client("ids", "deltas")):
            return self.server
        ids, deltas = found
        mixed = torch.empty_like(self.models)
        pieces = (self.models.split(PIECE, 1), deltas.split(PIECE, 1), mixed.split(PIECE, 1))
        for own, delta, out in zip(*pieces, strict=True):
            out.copy_(self.weights @ own.double().index_add_(0, ids, delta.double()))
        self.models, self.begun = mixed, torch.ones_like(self.begun)
        return mixed.double().mean(0).to(self.server.dtype)

    def metrics(self) -> dict[str, float]:
        r"""Return the distance to consensus.

        .. math:: \sqrt{\frac1n \sum_i \lVert x_i - \bar x \rVert^2}
        """
        away = self.models - self.models.mean(0)
        return {"consensus_distance": float(away.norm(dim=1).square().mean().sqrt())}
