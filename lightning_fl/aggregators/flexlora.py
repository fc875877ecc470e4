"""Average the products of LoRA adapters, and factorize the average."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.aggregators.adapters import AdapterRule
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.low_rank import factorize
from lightning_fl.transforms.compression import Compression

#: What to do if clients train a second model.
REMEDY = "remove its term, or use FedAvg or ZeroPadding"


class FlexLoRA(AdapterRule):
    r"""Average the products of LoRA adapters of any rank, and factorize it (Bai et al., 2024).

    The adapter of a layer adds :math:`s B A x` to its output. With the weights :math:`p_k` of
    :class:`FedAvg`, each round computes the singular value decomposition of the average product,

    .. math:: \sum_{k \in S_t} p_k s B_k A_k = U S V^\top, \qquad
        A = V_r^\top, \quad B = U_r S_r / s,

    and a client of rank :math:`r_k` starts the next round from the first :math:`r_k` rows of
    :math:`A` and columns of :math:`B`, its best approximation of that rank. FedAvg averages
    :math:`A` and :math:`B` separately instead, and the product of the averages is not the average
    of the products.

    :math:`s` is the scaling of the module, :math:`\alpha / r` of the module's rank, and the same
    for all clients, so that it cancels: a client of a lower rank does *not* scale by
    :math:`\alpha / r_k`. The global model has rank :math:`r`; what the average has beyond it is
    lost, and ``lost_energy`` is its share of the squared norm, the maximum over layers. Where the
    average has a lower rank than :math:`r`, the missing columns of :math:`B` are 0, and the rows of
    :math:`A` are orthogonal directions of the former :math:`A`, which can be trained. Other trained
    parameters are averaged as in :class:`FedAvg`.

    The decomposition is that of the stacked factors of the clients: no matrix of the size of a
    weight is formed. It runs in float64 with fixed signs. The factors of the round's clients are
    kept until its end. The coordinates of factors change in each round, so clients cannot keep
    their optimizer state, errors of a compression (``error_feedback``), or a second model with
    adapters (:class:`~lightning_fl.objectives.Ditto`, :class:`~lightning_fl.objectives.APFL`).

    Args:
        ranks: Rank of the clients: one for all; a list with one per client; or the share of the
            clients by rank, such as ``{4: 0.5, 16: 0.5}``, which are then drawn with the run's
            seed. None is the rank of the module's adapters.
        weighting: ``samples`` weights a client by its number of training samples. ``uniform``
            gives all clients equal weight.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module has no
            adapters or unsupported ones, or clients keep what depends on coordinates.

    Example:
        >>> from lightning_fl.contracts.layout import VectorLayout
        >>> from lightning_fl.types import Cohort
        >>> shapes = {"lora_A.weight": torch.Size([1, 2]), "lora_B.weight": torch.Size([1, 1])}
        >>> rule = FlexLoRA()
        >>> rule.setup(Federation(2, Cohort(2, 2), VectorLayout(shapes, 3)))
        >>> rule.start(torch.tensor([0.6, 0.8, 0.0]))
        >>> rule.update(ClientUpdate(torch.arange(2), torch.tensor(
        ...     [[0.0, 0.0, 1.0], [0.0, 0.0, 3.0]]), torch.tensor([5, 5])))
        >>> rule.compute()  # A keeps its direction, and B is the mean of 1 and 3
        tensor([0.6000, 0.8000, 2.0000])
    """

    def setup(self, federation: Federation) -> None:
        """Refuse what clients keep in coordinates; see :meth:`AdapterRule.setup`."""
        super().setup(federation)
        kept = [
            f"errors that {type(each).__name__} feeds back: set its error_feedback to False"
            for each in federation.update_transforms
            if isinstance(each, Compression) and each.error_feedback
        ]
        if federation.optimizer_state == "keep":
            kept.append("optimizer states: set optimizer_state: reset")
        kept += [f"{name}, an adapter of a second model: {REMEDY}" for name in self._second()]
        for each in kept:
            raise FederationError(
                f"{type(self).__name__} changes the coordinates of the adapters in each round, so"
                f" clients cannot keep {each}"
            )

    def _second(self) -> list[str]:
        """Return the first adapter of a second model that clients train, such as Ditto's."""
        federation, factors = self.federation, {name for pair in self.pairs for name in pair}
        if federation is None or federation.module is None:
            return []
        params = dict(federation.module.named_parameters())
        local = (n for n in federation.local_parameters if n in params and params[n].requires_grad)
        # A LocalNetwork writes the dots of a name as slashes.
        return [n for n in local if any(n.replace("/", ".").endswith(f".{f}") for f in factors)][:1]

    def allocate(self, server: Tensor) -> None:
        """Declare the factors of the round's clients, too; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        self.add_lists("ids", "weights", "factors")

    def update(self, clients: ClientUpdate) -> None:
        """Keep the factors of clients; add the other parameters to their sum."""
        super().update(clients)
        if not self.pairs:
            return
        local = self.models_for(clients.clients) + clients.delta
        parts = []
        for factor, unused in self.unused(local, clients.clients):
            # What attacks and update transforms add beyond the rank is not sent.
            parts.append(factor.masked_fill(unused, 0).flatten(1))
        weights, factors = self._weights(clients), torch.cat(parts, 1)
        self.append(ids=clients.clients, weights=weights, factors=factors)

    def compute(self) -> Tensor:
        """Return the average of the other parameters, and the factors of the average product."""
        model: Tensor = super().compute()
        gathered = self.gather_by_client("ids", "weights", "factors")
        if not gathered:
            return model
        _, weights, factors = gathered
        weights = weights / weights.sum()
        layout = self.known_federation.known_layout
        ours, server = (layout.split(v[None]) for v in (model, self.server))
        lost, at = [], 0
        for names in self.pairs:
            views = []
            for name in names:
                size = ours[name].numel()
                rows = factors[:, at : at + size].double()
                views.append(rows.reshape(len(rows), ours[name].shape[1], -1))
                at += size
            a, b = views  # [k, r, n] and [k, m, r]
            b = b.reshape(len(b), -1, a.shape[1])
            left = (b * weights[:, None, None]).transpose(0, 1).flatten(1)
            basis = server[names[0]][0].double().flatten(1)
            new_b, new_a, share = factorize(left, a.flatten(0, 1), basis)
            ours[names[0]].copy_(new_a.reshape(ours[names[0]].shape))
            ours[names[1]].copy_(new_b.reshape(ours[names[1]].shape))
            lost.append(share)
        self.round_metrics = {"lost_energy": float(torch.stack(lost).max())}
        return model
