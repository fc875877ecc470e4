"""Clustered federated learning by recursive bipartitioning of client updates."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.averaging import weighted_mean
from lightning_fl.functional.similarity import cosine_similarity
from lightning_fl.functional.tables import PLACES, with_place
from lightning_fl.options import check_choice, check_integer, check_number


class ClusteredFL(Aggregator):
    r"""Clustered federated learning (Sattler et al., 2021): one model per cluster of clients.

    All clients begin in one cluster. In each round every client starts from the model of its
    cluster, and its update is :math:`\Delta_k`. If the mean update of a cluster is small but
    individual updates are large,

    .. math:: \lVert \bar\Delta_c \rVert < \varepsilon_1 \quad\text{and}\quad
        \max_{k \in c} \lVert \Delta_k \rVert > \varepsilon_2, \qquad
        \bar\Delta_c = \sum_{k \in c} \frac{n_k}{\sum_{j \in c} n_j} \Delta_k,

    the cluster is split in two by agglomerative clustering of the cosine similarities between
    client updates. Each model is then updated with the mean of its clients,
    :math:`W_c \leftarrow W_c + \bar\Delta_c`; both parts of a split start from the model of the
    parent cluster, and move by the means of their own clients. Norms and cosines are computed over
    parameters, without BatchNorm statistics. All this is as in the authors' program
    (felisat/clustered-federated-learning).

    Only clients of the current round are considered. A cluster without sampled clients keeps its
    model. Clients that are not sampled in the round of a split stay in the first part. Cluster
    models, the cluster tree and the cluster of each client are saved in the checkpoint.

    The global model for validation is the mean of the cluster models, weighted by their number of
    clients. To evaluate the clusters, use the accuracy of clients on their local data.

    Args:
        eps1: Threshold :math:`\varepsilon_1`. A cluster may split if the norm of its mean update is
            smaller.
        eps2: Threshold :math:`\varepsilon_2`. A cluster may split if its largest update norm is
            larger. Both thresholds depend on the network and the learning rate; the table of
            rounds shows the norms.
        warmup: Number of rounds before the first split.
        min_size: Minimum number of sampled clients in a cluster to split it, at least 2.
        linkage: ``complete`` (the authors' programs) or ``single``, which is the optimum of the
            paper's criterion.
        weighting: ``samples`` weights a client by its number of samples. ``uniform`` gives all
            clients equal weight.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> rule = ClusteredFL(eps1=0.1, eps2=0.5, warmup=0)
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(torch.arange(4), torch.tensor(
        ...     [[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]), torch.ones(4)))
        >>> rule.compute()
        tensor([0., 0.])
        >>> rule.clusters(), rule.models.tolist()
        ([[0, 1], [2, 3]], [[1.0, 0.0], [-1.0, 0.0]])
    """

    grown: ClassVar[tuple[str, ...]] = ("models", "cluster_of", "tree")
    models: Tensor
    cluster_of: Tensor
    tree: Tensor
    round: Tensor

    def __init__(
        self,
        eps1: float = 0.4,
        eps2: float = 1.6,
        warmup: int = 20,
        min_size: int = 3,
        linkage: Literal["complete", "single"] = "complete",
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__()
        self.eps1 = check_number("eps1", eps1, min=0)
        self.eps2 = check_number("eps2", eps2, min=0)
        self.warmup = check_integer("warmup", warmup, min=0)
        self.min_size = check_integer("min_size", min_size, min=2)
        self.linkage = check_choice("linkage", linkage, "complete", "single")
        self.weighting = check_choice("weighting", weighting, "samples", "uniform")
        self._norms: dict[str, float] = {}

    def allocate(self, server: Tensor) -> None:
        """Declare the updates of the round, and the cluster models and members."""
        self.add_lists("ids", "deltas", "sizes")
        #: The model of each cluster, ``[c, P]``.
        self.register_buffer("models", server[None].clone())
        #: The cluster of each client, ``[places]``; -1 before its first update.
        self.register_buffer("cluster_of", torch.full((PLACES,), -1, device=server.device))
        #: Parent and split round of each cluster, ``[c, 2]``; -1 for the first cluster.
        self.register_buffer("tree", torch.full((1, 2), -1, device=server.device))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round. With a single cluster, its model is the global model."""
        super().start(server, trained)
        self._norms = {}
        if len(self.models) == 1:
            self.models = server[None].clone()

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the cluster model of each client, ``[k, P]``."""
        if len(self.models) == 1:
            return self.models.expand(len(clients), -1)
        return self.models[self._cluster(clients).clamp(min=0)]

    def update(self, clients: ClientUpdate) -> None:
        """Store updates until the end of the round."""
        self.append(ids=clients.clients, deltas=clients.delta, sizes=clients.num_samples)

    def compute(self) -> Tensor:
        """Update and split the clusters, and return the mean of the cluster models."""
        self.round = self.round + 1
        if not (returned := self.gather_by_client("ids", "deltas", "sizes")):
            return self.server
        ids, deltas, sizes = returned
        weights = torch.ones_like(sizes) if self.weighting == "uniform" else sizes
        found = self._cluster(ids).clamp(min=0)
        self.cluster_of[ids] = found
        self._norms = {"mean_norm": 0.0, "max_norm": 0.0}
        for cluster in found.unique().tolist():
            inside = found == cluster
            self._move(cluster, ids[inside], deltas[inside], weights[inside])
        members = torch.bincount(self.cluster_of[self.cluster_of >= 0], minlength=len(self.models))
        mean = weighted_mean(self.models.double(), members)
        return mean.to(self.server.dtype) if len(self.models) > 1 else self.models[0].clone()

    def on_round_skipped(self) -> None:
        """Count the round."""
        self.round = self.round + 1

    def _move(self, cluster: int, ids: Tensor, deltas: Tensor, weights: Tensor) -> None:
        """Split a cluster if its client updates diverge, and update its models."""
        before, wide = self.models[cluster].double(), deltas.double()
        mean, parameters = weighted_mean(wide, weights), wide[:, : self.num_parameters]
        mean_norm = float(mean[: self.num_parameters].norm())
        max_norm = float(parameters.norm(dim=1).max())
        if max_norm > self._norms["max_norm"]:
            self._norms = {"mean_norm": mean_norm, "max_norm": max_norm}
        moved = [before + mean]
        stands_still = mean_norm < self.eps1 and max_norm > self.eps2
        if stands_still and self.round > self.warmup and len(ids) >= self.min_size:
            apart = self.parts(parameters)
            moved = [before + weighted_mean(wide[p], weights[p]) for p in (~apart, apart)]
            self.cluster_of[ids[apart]] = len(self.models)
            self.models = torch.cat([self.models, moved[1][None].to(self.models.dtype)])
            self.tree = torch.cat([self.tree, self.tree.new_tensor([[cluster, int(self.round)]])])
        self.models[cluster] = moved[0].to(self.models.dtype)

    def parts(self, deltas: Tensor) -> Tensor:
        """Return a mask of the updates in the second part of a split, ``[k]``.

        Args:
            deltas: Updates of the parameters, ``[k, P]``.
        """
        distance = (1 - cosine_similarity(deltas)).cpu().numpy()
        upper = torch.triu_indices(len(deltas), len(deltas), 1).numpy()
        joined = linkage(distance[upper[0], upper[1]].clip(min=0), method=self.linkage)
        # cut_tree, because fcluster returns one part if distances tie.
        parts = torch.from_numpy(cut_tree(joined, n_clusters=[2])[:, 0])
        return (parts != parts[0]).to(deltas.device)

    def clusters(self) -> list[list[int]]:
        """Return the clients of each cluster, without clients that never returned an update."""
        each = range(len(self.models))
        return [(self.cluster_of == cluster).nonzero()[:, 0].tolist() for cluster in each]

    def metrics(self) -> dict[str, float]:
        """Return the number of clusters, and the norms of the one with the largest update."""
        return {"clusters": len(self.models), **self._norms}

    def _cluster(self, ids: Tensor) -> Tensor:
        """Return client clusters, -1 for new clients, and grow the table if necessary."""
        ids = ids.to(self.cluster_of.device)
        self.cluster_of = with_place(self.cluster_of, ids, fill=-1)
        return self.cluster_of[ids]
