"""Dynamic regularization on clients and server."""

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
from lightning_fl.functional.drift import dynamic_term, next_gradient
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_choice, check_number


class FedDyn(Aggregator):
    r"""Regularize clients so that their optima agree with the global one (Acar et al., 2021).

    FedDyn, Algorithm 1. Each client has a vector :math:`g_k`, the server a vector :math:`h`, all 0
    at first. A sampled client starts from :math:`y = x` and trains on

    .. math:: f_k(y) - \langle g_k, y \rangle + \frac{\alpha}{2} \lVert y - x \rVert^2, \qquad
        g_k \leftarrow g_k - \alpha (y_k - x),

    so :math:`g_k` estimates :math:`\nabla f_k(y_k)`. With the clients :math:`S` that returned and
    the number :math:`N` of all clients, the server computes

    .. math:: h \leftarrow h - \frac{\alpha}{N} \sum_{k \in S} (y_k - x), \qquad
        x \leftarrow \frac{1}{|S|} \sum_{k \in S} y_k - \frac{1}{\alpha} h.

    :math:`h` is the mean of all :math:`g_k`, also of clients that were not sampled (with
    ``weighting="samples"``, the mean weighted by samples). It changes in a round that keeps the
    model, too. A client whose update is dropped keeps its :math:`g_k`. Only
    trained parameters have entries in :math:`g_k` and :math:`h`; floating-point buffers are
    averaged. Traffic is that of FedAvg; with ``weighting="samples"`` a client also receives its
    strength, a number. Each client stores a vector of the size of the model, which is saved in
    checkpoints.

    The evaluated model is :math:`x`, with which the next round starts. In the first round
    :math:`x` is the mean model plus the mean update times :math:`|S| / N`. For
    :math:`\alpha \to 0` the rule is not FedAvg, because :math:`h / \alpha` does not vanish.

    The regularizer is added to the gradients of any optimizer, before momentum and adaptive steps
    and after gradient clipping, so only the gradient of the loss is clipped. Weight decay in the
    gradient (SGD, Adam) is a part of :math:`f_k`. Decoupled weight decay (AdamW) is not a gradient:
    :math:`g_k` then estimates :math:`\nabla f_k` plus this decay. Attacks and update transforms
    change the :math:`y_k - x` of the server, and not :math:`g_k`; a lossy transform therefore
    separates :math:`h` from the mean of :math:`g_k`.

    Args:
        alpha: Strength :math:`\alpha`. The paper uses 0.1, 0.01 and 0.001.
        weighting: ``uniform`` minimizes the mean of :math:`f_k` over all clients. ``samples``
            minimizes the mean weighted by the numbers of samples :math:`n_k`: clients use
            :math:`\alpha_k = \alpha \bar n / n_k` with the mean :math:`\bar n` over all clients, as
            in the authors' program (alpemreacar/FedDyn).

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if ``samples`` meets
            clients whose numbers of samples change.

    Example:
        >>> from lightning_fl.types import Cohort
        >>> rule = FedDyn(alpha=0.5)
        >>> rule.setup(Federation(num_clients=4, sampling=Cohort(size=1, clients=4)))
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(torch.tensor([3]), torch.tensor([[1.0, -2.0]]),
        ...     torch.tensor([8])))
        >>> rule.compute(), rule.h.tolist()
        (tensor([ 1.2500, -2.5000]), [-0.125, 0.25])
    """

    needs = ("constant_sizes",)
    needs_trained_mask = True
    h: Tensor
    total: VectorSum
    count: Tensor

    def __init__(
        self, alpha: float = 0.01, weighting: Literal["uniform", "samples"] = "uniform"
    ) -> None:
        super().__init__()
        self.alpha = check_number("alpha", alpha, above=0)
        self.weighting = check_choice("weighting", weighting, "uniform", "samples")

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients add the regularizer to their gradients."""
        return [DynamicRegularizer(self.alpha, self.weighting)]

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Return the mean number of samples of all clients if clients are weighted by theirs."""
        if self.weighting == "uniform":
            return {}
        num_samples = self.known_federation.num_samples
        assert num_samples is not None
        return {"mean_samples": num_samples.double().mean()}

    def allocate(self, server: Tensor) -> None:
        """Declare the sums of a round, and the vector of the server."""
        self.add_sum("total", len(server))
        self.add_counts("count")
        #: :math:`h`, in float64.
        self.register_buffer("h", torch.zeros_like(server[: self.num_parameters]).double())

    def update(self, clients: ClientUpdate) -> None:
        """Add updates to their sum."""
        add_rows(self.total, clients.delta)
        self.count += len(clients.delta)

    def compute(self) -> Tensor:
        """Return the next model, and change the vector of the server."""
        num_clients = self.known_federation.num_clients
        if not self.count:
            return self.server
        total, n = sum_value(self.total), len(self.h)
        self.h = self.h - self.alpha / num_clients * total[:n]
        correction = self.h / self.alpha
        if self.trained is not None:  # h of a parameter may be left from rounds that trained it
            correction = correction.where(self.trained, 0)
        move = total / self.count
        move[:n] -= correction
        return (self.server + move).to(self.server.dtype)

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round: the vector of the server changes even if the model is kept."""
        model: Tensor = self.compute()
        return model if returned >= min_clients else None

    def metrics(self) -> dict[str, float]:
        """Return the norm of the vector of the server, an estimate of the gradient."""
        return {"h_norm": float(self.h.norm())} if self.server.numel() else {}


class DynamicRegularizer(ClientPart):
    """Add the gradient of the dynamic regularizer, whose linear term the client stores.

    Args:
        alpha: Strength.
        weighting: See :class:`FedDyn`.
    """

    def __init__(self, alpha: float, weighting: Literal["uniform", "samples"]) -> None:
        self.alpha, self.weighting = alpha, weighting
        self._alphas = torch.empty(0)

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        """Return a linear term of 0."""
        layout = federation.known_layout
        return {"gradient": torch.zeros(layout.num_parameters, dtype=layout.dtype)}

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Add the gradient of the regularizer in all local steps."""
        layout, gradient = client.federation.known_layout, memory["gradient"]
        alphas = torch.full((len(gradient),), self.alpha, dtype=torch.float64)
        if self.weighting == "samples":
            alphas *= broadcast["mean_samples"].cpu() / client.num_samples
        self._alphas = alphas = alphas.to(gradient.device)
        linear = layout.split(gradient)
        start = layout.split(client.received[:, : gradient.shape[1]])
        client.add_to_gradients(
            lambda params, gradients: {
                name: dynamic_term(param, start[name], linear[name], alphas)
                for name, param in params.items()
            }
        )

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Change the linear term; send nothing in addition to the update."""
        before = memory["gradient"]
        after = next_gradient(before, client.delta[:, : before.shape[1]], self._alphas)
        memory["gradient"] = after
        return {}
