"""IFCA: each client chooses the cluster whose model fits its samples best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.base import Aggregator
from lightning_fl.contracts.client_part import ClientContext, ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.initial import draw_parameters
from lightning_fl.functional.randomness import RandomStream, derive_seed
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_choice, check_integer
from lightning_fl.runners.module_copy import copied_module
from lightning_fl.runners.tensors import flat


class IFCA(Aggregator):
    r"""Train several models; each client trains the one with its lowest loss (Ghosh et al., 2020).

    Algorithm 1 with model averaging. All clients :math:`k` of a round receive the models
    :math:`\theta_1, \dots, \theta_c`, and

    .. math:: j_k = \arg\min_j F_k(\theta_j), \qquad
        \theta_j \leftarrow \theta_j + \operatorname*{mean}_{k : j_k = j} (y_k - \theta_j),

    where :math:`F_k` is the mean loss over all training samples of the client, in evaluation mode,
    and :math:`y_k` its local model, trained from :math:`\theta_{j_k}`. Of equal losses, the first
    model is chosen. A cluster without clients keeps its model. One cluster is :class:`FedAvg`.

    The first model is that of the module. The others are drawn anew, by ``reset_parameters`` of its
    layers. On real data all clients may choose the same one: the table of rounds has the number of
    ``clusters`` that clients chose when their update last returned. Other seeds, or a loss that
    tells clients apart from the start, help.

    The global model for validation is the mean of the models, weighted by their numbers of clients.
    To evaluate the clusters, use :class:`~lightning_fl.callbacks.PersonalizedEvaluation`, in the
    column ``server``. The choice takes :math:`c` passes over the samples of a client and round.
    ``bytes_down`` counts the :math:`c` models, and that of the client's last cluster.

    Args:
        clusters: Number of models :math:`c`.
        weighting: ``uniform`` as in the authors' program, or ``samples``.
        seed: Seed of the initial models. None uses the seed of the run.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module returns
            no losses of samples, or its layers cannot be drawn anew.

    Example:
        >>> from lightning_fl.types import Cohort
        >>> rule = IFCA(clusters=2)
        >>> rule.setup(Federation(num_clients=3, sampling=Cohort(size=3, clients=3)))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.arange(3), torch.tensor([[1.0], [3.0], [8.0]]),
        ...     torch.ones(3), extras={"cluster": torch.tensor([0.0, 0.0, 1.0])}))
        >>> rule.compute(), rule.models[:, 0]
        (tensor([4.]), tensor([2., 8.]))
    """

    needs = ("losses",)
    models: Tensor
    cluster_of: Tensor
    begun: Tensor
    weight: VectorSum

    def __init__(
        self,
        clusters: int = 2,
        weighting: Literal["samples", "uniform"] = "uniform",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.clusters = check_integer("clusters", clusters, min=1)
        self.weighting = check_choice("weighting", weighting, "samples", "uniform")
        self.seed = check_integer("seed", seed, min=0, optional=True)

    def setup(self, federation: Federation) -> None:
        """Refuse update transforms."""
        super().setup(federation)
        if federation.update_transforms:
            raise FederationError(
                "IFCA lets clients start from another model than the one that updates refer to, so"
                " update transforms would move it towards that one: remove update_transforms"
            )

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients choose their cluster."""
        return [_Choice()]

    def allocate(self, server: Tensor) -> None:
        """Declare a sum for each cluster, and the models."""
        for cluster in range(self.clusters):
            self.add_sum(f"total_{cluster}", len(server))
        self.add_sum("weight", self.clusters)
        self.add_lists("ids", "choices")
        #: The model of each cluster, ``[c, P]``.
        self.register_buffer("models", server.repeat(self.clusters, 1))
        #: The last choice of each client, ``[N]``; -1 before.
        count = self.known_federation.num_clients
        self.register_buffer("cluster_of", torch.full((count,), -1))
        #: True after the first round.
        self.register_buffer("begun", torch.tensor(False))

    def _drawn(self, server: Tensor) -> Tensor:
        """Return the initial models, ``[c, P]``; without a module, all are the same."""
        models, federation = server.repeat(self.clusters, 1), self.known_federation
        if federation.module is None:
            return models
        for cluster in range(1, self.clusters):
            module = copied_module(federation.module, ())
            seed = derive_seed(self.seed_of(self.seed), RandomStream.STARTS, cluster)
            draw_parameters(module, seed)
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            shapes = federation.known_layout.shapes
            drawn = torch.cat([flat(tensors[name]).to(server) for name in shapes])
            models[cluster, : self.num_parameters] = drawn[: self.num_parameters]
            if torch.equal(models[cluster], server):
                raise FederationError(
                    f"IFCA draws the parameters of {type(module).__name__} anew for each cluster,"
                    " and they are equal: implement reset_parameters() in its network"
                )
        return models

    def start(self, server: Tensor, trained: Tensor | None = None) -> None:
        """Begin a round. In the first round, draw the models; the first is the global model."""
        super().start(server, trained)
        if not self.begun:
            self.models = self._drawn(server)

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the model of the last cluster of each client, ``[k, P]``."""
        return self.models[self.cluster_of[clients.to(self.models.device)].clamp(min=0)]

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Send all models."""
        return {"models": self.models}

    def update(self, clients: ClientUpdate) -> None:
        """Add the moves from the models of the clusters."""
        self.require_extras(clients, cluster=())
        chosen = clients.extras["cluster"].long()
        if not (clients.extras["cluster"] == chosen.clamp(0, self.clusters - 1)).all():
            what = f"clients chose the clusters {chosen.tolist()} of {self.clusters}"
            raise FederationError(f"{what}: use the same rule on both sides")
        received = self.models_for(clients.clients).double()
        moves = clients.delta.double() + (received - self.models[chosen].double())
        weights = clients.num_samples.to(moves)
        weights = weights if self.weighting == "samples" else torch.ones_like(weights)
        is_member = chosen[:, None] == torch.arange(self.clusters, device=chosen.device)
        add_rows(self.weight, is_member.double(), weights)
        for cluster, rows in enumerate(is_member.T):
            if rows.any():
                add_rows(self.sum_of(f"total_{cluster}"), moves[rows], weights[rows])
        self.append(ids=clients.clients, choices=chosen)

    def compute(self) -> Tensor:
        """Move the models of the clusters, and return their mean."""
        if not (returned := self.gather_by_client("ids", "choices")):
            return self.server
        ids, chosen = returned
        self.begun = torch.ones_like(self.begun)
        self.cluster_of = self.cluster_of.index_copy(0, ids, chosen)
        divisors, models = sum_value(self.weight).clamp(min=1), self.models.clone()
        for cluster, divisor in enumerate(divisors):
            models[cluster] = self.sum_of(f"total_{cluster}").mean_plus(models[cluster], divisor)
        self.models = models
        members = torch.bincount(self.cluster_of + 1, minlength=self.clusters + 1)[1:].double()
        self.round_metrics["clusters"] = float((members > 0).sum())
        away = members / members.sum() @ (models.double() - models[0])
        return (models[0] + away).to(self.server.dtype)


class _Choice(ClientPart):
    """Start from the model with the lowest loss, and send its index."""

    def __init__(self) -> None:
        self._chosen = torch.empty(0)

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Evaluate all models on the training samples of the clients."""
        models, count = broadcast["models"], len(client.clients)
        losses = torch.stack([client.mean_losses(model.expand(count, -1)) for model in models])
        # Sorted, so that the first one of equal losses is chosen, and NaN is the largest.
        chosen = losses.sort(dim=0, stable=True).indices[0].to(models.device)
        client.start_from(models[chosen])
        self._chosen = chosen.double()

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send the cluster."""
        return {"cluster": self._chosen}
