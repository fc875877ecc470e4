"""Average the factors of LoRA adapters, padded with zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.adapters import AdapterRule, Ranks
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.low_rank import product_norms
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_choice


class ZeroPadding(AdapterRule):
    r"""Average LoRA factors of different ranks, padded with zeros (as in Cho et al., 2024).

    The factors :math:`A_k` and :math:`B_k` of a client of rank :math:`r_k` are padded with zeros to
    the rank of the module, and both are averaged separately:

    .. math:: A = \sum_{k \in S_t} p_k \operatorname{pad}(A_k), \qquad
        B = \sum_{k \in S_t} p_k \operatorname{pad}(B_k).

    A client starts the next round from the first :math:`r_k` rows and columns. Ranks that few
    clients train are averaged with zeros, and the product of the averages is not the average of
    the products: this is the baseline of :class:`FlexLoRA`. Equal ranks are :class:`FedAvg`. Other
    trained parameters are averaged as in :class:`FedAvg`.

    HetLoRA also prunes ranks in training, which is not implemented.

    Args:
        ranks: Rank of the clients: one for all; a list with one per client; or the share of the
            clients by rank, such as ``{4: 0.5, 16: 0.5}``, which are then drawn with the run's
            seed. None is the rank of the module's adapters.
        weighting: ``samples`` and ``uniform`` are those of :class:`FedAvg`. ``norm`` is HetLoRA's:
            the weight of a client's adapters is :math:`\lVert B_k A_k \rVert_F`, over all adapted
            layers; other parameters are weighted by samples.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module has no
            adapters, or adapters that the rule does not support.

    Example:
        >>> rule = ZeroPadding()
        >>> rule.start(torch.zeros(2))  # outside of a fit there are no adapters
        >>> rule.update(ClientUpdate(torch.tensor([0]), torch.ones(1, 2), torch.tensor([5])))
        >>> rule.compute()
        tensor([1., 1.])
    """

    factors: VectorSum
    norms: VectorSum

    def __init__(
        self, ranks: Ranks = None, weighting: Literal["samples", "uniform", "norm"] = "samples"
    ) -> None:
        check_choice("weighting", weighting, "samples", "uniform", "norm")
        super().__init__(ranks, "uniform" if weighting == "uniform" else "samples")
        self.by_norm = weighting == "norm"

    def allocate(self, server: Tensor) -> None:
        """Declare sums with weights of adapters, too; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        if self.by_norm:
            self.add_sum("factors", len(server))
            self.add_sum("norms", 1)

    def update(self, clients: ClientUpdate) -> None:
        """Add padded factors and other parameters to their sums."""
        if not self.pairs:
            super().update(clients)
            return
        # A client starts from factors that are cut, but the sum is of moves from the global model.
        local = self.models_for(clients.clients) + clients.delta
        views = self.unused(local, clients.clients)
        for factor, unused in views:
            factor.masked_fill_(unused, 0)
        moved = replace(clients, delta=local - self.server)
        super().update(moved)
        if self.by_norm:
            factors = [factor.double().flatten(2) for factor, _ in views]
            pairs = zip(factors[::2], factors[1::2], strict=True)
            squares = [product_norms(b.flatten(2), a).square() for a, b in pairs]
            norms = torch.stack(squares).sum(0).sqrt()
            add_rows(self.factors, moved.delta, norms)
            add_rows(self.norms, norms[:, None])

    def compute(self) -> Tensor:
        """Return the average model."""
        model: Tensor = super().compute()
        if self.by_norm and self.pairs:
            norm = sum_value(self.norms)
            mean = sum_value(self.factors) / torch.where(norm > 0, norm, 1.0)
            by_norm = (self.server + mean).to(model.dtype)
            layout = self.known_federation.known_layout
            ours, others = (layout.split(v[None]) for v in (model, by_norm))
            for name in (name for pair in self.pairs for name in pair):
                # Before training all products are 0: then the weights are those of samples.
                ours[name].copy_(torch.where(norm > 0, others[name], ours[name]))
        return model
