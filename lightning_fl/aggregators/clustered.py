"""Clusters of clients that split where the clients' updates point apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from scipy.cluster.hierarchy import cut_tree, linkage
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.functional.averaging import weighted_mean
from lightning_fl.functional.similarity import cosine_similarity
from lightning_fl.functional.tables import PLACES, with_place, with_rows_of
from lightning_fl.types import ClientUpdate, FederationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ClusteredFL(Aggregator):
    r"""Keep a model for each cluster of clients, and split clusters in two (Sattler et al., 2021).

    All clients begin in one cluster. In a round every client starts from the model of its cluster,
    and its update is :math:`\Delta_k`. Where the mean of a cluster is small though single updates
    are not,

    .. math:: \lVert \bar\Delta_c \rVert < \varepsilon_1 \quad\text{and}\quad
        \max_{k \in c} \lVert \Delta_k \rVert > \varepsilon_2, \qquad
        \bar\Delta_c = \sum_{k \in c} \frac{n_k}{\sum_{j \in c} n_j} \Delta_k,

    the cluster is split in two by agglomerative clustering of the cosine similarities of its
    clients' updates. Then each model moves by the mean of its own clients,
    :math:`W_c \leftarrow W_c + \bar\Delta_c`; after a split both parts start from the model of
    the cluster that was split. Norms and cosines are over parameters, without BatchNorm statistics,
    as in the authors' program (felisat/clustered-federated-learning).

    Only the clients of the round count. A cluster without one keeps its model; clients that were
    not in the round of a split stay in the first part. Cluster models, the tree and the cluster of
    each client are in the checkpoint.

    What the server validates is the mean of the clusters' models, each weighted by its clients;
    the accuracy of clients on their own data is what clusters are for.

    Args:
        eps1: :math:`\varepsilon_1`: the norm of the mean update below which a cluster may split.
        eps2: :math:`\varepsilon_2`: the largest norm of an update above which it may. Both belong
            to a network and its learning rate; the table of rounds shows the norms.
        warmup: Rounds before the first split.
        min_size: Minimum number of a cluster's clients in the round for it to be split, from 2 up.
        linkage: ``complete`` (the authors' programs) or ``single``, which is the optimum of the
            paper's criterion.
        weighting: ``samples`` weighs a client by its samples, ``uniform`` counts each once.
        split_update: How models move in the round of a split. ``parts`` moves each part by the mean
            of its own clients (the authors' program, which splits before it aggregates).
            ``cluster`` moves both parts by the mean of the whole cluster, so that they still are
            equal at the start of the next round (aggregation before the split).

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

    models: Tensor
    cluster_of: Tensor
    tree: Tensor
    round: Tensor
    ids: list[Tensor] | Tensor
    deltas: list[Tensor] | Tensor
    sizes: list[Tensor] | Tensor

    def __init__(
        self,
        eps1: float = 0.4,
        eps2: float = 1.6,
        warmup: int = 20,
        min_size: int = 3,
        linkage: Literal["complete", "single"] = "complete",
        weighting: Literal["samples", "uniform"] = "samples",
        split_update: Literal["parts", "cluster"] = "parts",
    ) -> None:
        super().__init__()
        if not (0 <= eps1 < float("inf") and 0 <= eps2 < float("inf")):
            raise FederationError(f"eps1 and eps2 must be at least 0, got {eps1} and {eps2}")
        if warmup < 0 or min_size < 2:
            raise FederationError(
                f"warmup must be at least 0 and min_size at least 2, got {warmup} and {min_size}"
            )
        if linkage not in ("complete", "single"):
            raise FederationError(f"linkage must be complete or single, got {linkage!r}")
        if weighting not in ("samples", "uniform"):
            raise FederationError(f"weighting must be samples or uniform, got {weighting!r}")
        if split_update not in ("parts", "cluster"):
            raise FederationError(f"split_update must be parts or cluster, got {split_update!r}")
        self.eps1, self.eps2, self.warmup, self.min_size = eps1, eps2, warmup, min_size
        self.linkage, self.weighting, self.split_update = linkage, weighting, split_update
        self._norms = {"mean_norm": 0.0, "max_norm": 0.0}

    def allocate(self, server: Tensor) -> None:
        """Declare the updates of the round, and what is known of the clusters."""
        for name in ("ids", "deltas", "sizes"):
            self.add_state(name, [], dist_reduce_fx="cat")
        #: The model of each cluster, ``[c, P]``.
        self.register_buffer("models", server[None].clone())
        #: The cluster of each client, ``[places]``; -1 of who has never returned.
        self.register_buffer("cluster_of", torch.full((PLACES,), -1, device=server.device))
        #: Of each cluster, which it was split from and in what round, ``[c, 2]``; -1 of the first.
        self.register_buffer("tree", torch.full((1, 2), -1, device=server.device))
        self.register_buffer("round", torch.zeros((), dtype=torch.int64))

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round: as long as there is one cluster, from the server's model."""
        super().start(server, trained)
        if len(self.models) == 1:
            self.models = server[None].clone()

    def models_for(self, clients: Tensor) -> Tensor:
        """Return each client's cluster's model, ``[k, P]``."""
        if len(self.models) == 1:
            return self.models.expand(len(clients), -1)
        return self.models[self._cluster(clients).clamp(min=0)]

    def update(self, clients: ClientUpdate) -> None:
        """Keep updates until all are there."""
        for state, value in (
            (self.ids, clients.clients),
            (self.deltas, clients.delta.clone()),
            (self.sizes, clients.num_samples),
        ):
            state.append(value.to(self.models.device))  # type: ignore[union-attr]

    def compute(self) -> Tensor:
        """Move each cluster's model, split clusters, and return the mean of the models."""
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
        """Let a round pass."""
        self.round = self.round + 1

    def _move(self, cluster: int, ids: Tensor, deltas: Tensor, weights: Tensor) -> None:
        """Split a cluster whose clients' updates point apart, and move its model or models."""
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
            moved = moved * 2
            if self.split_update == "parts":
                moved = [before + weighted_mean(wide[p], weights[p]) for p in (~apart, apart)]
            self.cluster_of[ids[apart]] = len(self.models)
            self.models = torch.cat([self.models, moved[1][None].to(self.models.dtype)])
            self.tree = torch.cat([self.tree, self.tree.new_tensor([[cluster, int(self.round)]])])
        self.models[cluster] = moved[0].to(self.models.dtype)

    def parts(self, deltas: Tensor) -> Tensor:
        """Return which updates are in the other part than the first one, ``[k]``.

        Args:
            deltas: Updates of the parameters, ``[k, P]``.
        """
        distance = (1 - cosine_similarity(deltas)).cpu().numpy()
        upper = torch.triu_indices(len(deltas), len(deltas), 1).numpy()
        joined = linkage(distance[upper[0], upper[1]].clip(min=0), method=self.linkage)
        # Not fcluster, which leaves one part where distances tie.
        parts = torch.from_numpy(cut_tree(joined, n_clusters=[2])[:, 0])
        return (parts != parts[0]).to(deltas.device)

    def clusters(self) -> list[list[int]]:
        """Return the clients of each cluster that have returned at least once."""
        each = range(len(self.models))
        return [(self.cluster_of == cluster).nonzero()[:, 0].tolist() for cluster in each]

    def metrics(self) -> dict[str, float]:
        """Return the number of clusters, and the norms of the one that moves most."""
        return {"clusters": len(self.models), **self._norms}

    def plot(self) -> Figure:
        """Draw the tree of clusters over rounds, with the number of clients in each."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(6, 1.5 + 0.4 * len(self.models)), layout="constrained")
        axes = figure.subplots()
        for cluster, (members, (parent, born)) in enumerate(
            zip(self.clusters(), self.tree.tolist(), strict=True)
        ):
            start = max(born, 0)
            axes.plot([start, int(self.round)], [cluster, cluster], color=f"C{cluster % 10}", lw=3)
            if parent >= 0:  # of several splits in a round, each has a line of its own
                at = start + 0.015 * cluster * max(int(self.round), 1) / len(self.models)
                axes.plot([at, at], [parent, cluster], color=f"C{cluster % 10}", lw=1)
            label = f" {len(members)} client{'s' * (len(members) != 1)}"
            axes.annotate(label, (int(self.round), cluster), va="center", fontsize=9)
        axes.set(xlabel="round", ylabel="cluster", yticks=range(len(self.models)))
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        return figure

    def _cluster(self, ids: Tensor) -> Tensor:
        """Return clients' clusters, -1 of who is new, with place for all."""
        ids = ids.to(self.cluster_of.device)
        self.cluster_of = with_place(self.cluster_of, ids, fill=-1)
        return self.cluster_of[ids]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make place for as many clusters and clients as a checkpoint has."""
        names = [prefix + name for name in ("models", "cluster_of", "tree")]
        if hasattr(self, "models") and all(name in state_dict for name in names):
            models, cluster_of, tree = (state_dict[name] for name in names)
            named = {*cluster_of.tolist(), *tree[:, 0].tolist()}
            if len(tree) != len(models) or named - {*range(-1, len(models))}:
                raise FederationError(
                    f"the checkpoint has models of {len(models)} clusters, and others in its tree"
                    " or as those of clients"
                )
            self.models = with_rows_of(self.models, models)
            self.cluster_of = with_rows_of(self.cluster_of, cluster_of)
            self.tree = with_rows_of(self.tree, tree)
        super()._load_from_state_dict(state_dict, prefix, *rest)
