"""Base class of rules for LoRA adapters of different ranks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.low_rank import draw_ranks
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.options import check_integer, check_number, is_list

#: Rank of every client, of each client, or the share of the clients that have a rank.
Ranks = int | Sequence[int] | Mapping[int, float] | None
_FACTOR_A = re.compile(r"\blora_A\b")
#: Parameters of peft that are no factors of a product, or of one with another shape.
_OTHER = re.compile(r"\b(lora_embedding_[AB]|lora_magnitude_vector)\b")


class AdapterRule(FedAvg, ABC):
    r"""Base class of rules for clients with LoRA adapters of different ranks.

    The module has adapters of the maximum rank :math:`r`, factors :math:`A`, ``[r, n]``, and
    :math:`B`, ``[m, r]``. A client of rank :math:`r_k` starts from the global factors with rows of
    :math:`A` and columns of :math:`B` from :math:`r_k` on set to 0, and neither receives nor sends
    them. They stay 0 in training, since the gradient of each is a multiple of the other; what an
    optimizer or a hook writes there is cut off.

    Args:
        ranks: Rank of the clients: one for all; a list with one per client; or the share of the
            clients by rank, such as ``{4: 0.5, 16: 0.5}``, which are then drawn with the run's
            seed. None is the rank of the module's adapters.
        weighting: ``samples`` weights a client by its number of training samples. ``uniform``
            gives all clients equal weight.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module has no
            adapters, or adapters that the rule does not support.
    """

    def __init__(
        self, ranks: Ranks = None, weighting: Literal["samples", "uniform"] = "samples"
    ) -> None:
        super().__init__(weighting)
        self.ranks = ranks
        if is_list(ranks) or isinstance(ranks, Mapping):
            check_integer("the number of ranks", len(cast("Collection[int]", ranks)), min=1)
            for rank in cast("Iterable[int]", ranks):
                check_integer("a rank in ranks", rank, min=1)
            for share in ranks.values() if isinstance(ranks, Mapping) else ():
                check_number("a share in ranks", share, above=0)
        else:
            check_integer("ranks", ranks, min=1, optional=True)
        #: Names of the factors :math:`A` and :math:`B` of each adapter; known in a fit.
        self.pairs: list[tuple[str, str]] = []
        #: Rank of each client, ``[num_clients]``; known in a fit.
        self.client_ranks = torch.empty(0, dtype=torch.int64)
        #: Maximum rank of the module's adapters.
        self.max_rank = 0

    # --- the run ----------------------------------------------------------------------------------

    def setup(self, federation: Federation) -> None:
        """Find the adapters, and determine the rank of each client."""
        super().setup(federation)
        if federation.layout is None:
            return
        self.pairs = adapter_pairs(type(self).__name__, federation.layout)
        self._check_trained(federation)
        shapes = federation.layout.shapes
        self.max_rank = max(shapes[a][0] for a, _ in self.pairs)
        self.client_ranks = self._drawn(federation)
        if (largest := int(self.client_ranks.max())) > self.max_rank:
            raise FederationError(
                f"ranks has rank {largest}, but the module's adapters have rank {self.max_rank}:"
                f" build the module with rank {largest}, or lower the ranks of the clients"
            )

    def _check_trained(self, federation: Federation) -> None:
        """Refuse adapters of which one factor is frozen, such as those of FFA-LoRA."""
        name = type(self).__name__
        if federation.module is not None:
            for path, parameter in federation.module.named_parameters():
                is_factor = any(path in pair for pair in self.pairs)
                if is_factor and not parameter.requires_grad:
                    raise FederationError(
                        f"{name} trains both factors of an adapter, but {path} is frozen: set"
                        " freeze_a: false, or use FedAvg, which averages the other factor exactly"
                    )

    def _drawn(self, federation: Federation) -> Tensor:
        """Return the rank of each client, ``[num_clients]``."""
        ranks, n = self.ranks, federation.num_clients
        if isinstance(ranks, Mapping):
            return draw_ranks(ranks, n, generator(federation.seed, RandomStream.RANKS))
        if isinstance(ranks, Sequence):
            if len(ranks) != n:
                raise FederationError(
                    f"ranks has {len(ranks)} entries, but there are {n} clients: give one rank per"
                    " client, or shares by rank such as {4: 0.5, 16: 0.5}"
                )
            return torch.tensor(ranks)
        return torch.full((n,), self.max_rank if ranks is None else ranks)

    # --- clients ----------------------------------------------------------------------------------

    @abstractmethod
    def update(self, clients: ClientUpdate) -> None:
        """Add the updates of clients to an average; rules add what they need of the adapters."""
        super().update(clients)

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the global model, with the factors cut to the rank of each client, ``[k, P]``."""
        if not self._cuts(clients):
            return super().models_for(clients)
        models = self.server.repeat(len(clients), 1)
        for factor, unused in self.unused(models, clients):
            factor.masked_fill_(unused, 0)
        return models

    def unused(self, rows: Tensor, clients: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each factor in rows of vectors, and the mask of what is beyond a client's rank.

        Args:
            rows: Vectors of all tensors or of the parameters only, ``[k, P]``.
            clients: Client indices, ``[k]``.

        Returns:
            Views of the rows, ``[k, *shape]``, each with a mask that broadcasts to its shape.
        """
        parts = self.known_federation.known_layout.split(rows)
        ranks = self.client_ranks[clients.cpu()].to(rows.device)
        found = []
        for name_a, name_b in self.pairs:
            a, b = parts[name_a], parts[name_b]
            beyond = torch.arange(a.shape[1], device=rows.device) >= ranks[:, None]
            found.append((a, beyond.reshape(len(rows), -1, *[1] * (a.ndim - 2))))
            found.append((b, beyond.reshape(len(rows), 1, -1, *[1] * (b.ndim - 3))))
        return found

    def unused_entries(self, clients: Tensor) -> Tensor:
        """Return the number of entries beyond the rank of each client, ``[k]``."""
        if not self.pairs:
            return super().unused_entries(clients)
        shapes = self.known_federation.known_layout.shapes
        count = torch.zeros(len(clients), dtype=torch.int64)
        for a, b in self.pairs:
            rank = shapes[a][0]
            width = (shapes[a].numel() + shapes[b].numel()) // rank
            count += (rank - self.client_ranks[clients.cpu()]).clamp(min=0) * width
        return count

    def _cuts(self, clients: Tensor) -> bool:
        """Return whether a client has a lower rank than the module's adapters."""
        return bool(self.unused_entries(clients).any())


def adapter_pairs(rule: str, layout: VectorLayout) -> list[tuple[str, str]]:
    """Return the names of the two factors of each LoRA adapter.

    Args:
        rule: Name of the rule for error messages.
        layout: Layout of the exchanged tensors.

    Raises:
        FederationError: If there are no adapters, or adapters that are not the product of two
            exchanged matrices.

    Example:
        >>> shapes = {"q.lora_A.x.weight": torch.Size([2, 5]),
        ...           "q.lora_B.x.weight": torch.Size([3, 2])}
        >>> adapter_pairs("FlexLoRA", VectorLayout(shapes, num_parameters=16))
        [('q.lora_A.x.weight', 'q.lora_B.x.weight')]
    """
    shapes = layout.shapes
    found = []
    for name, size in shapes.items():
        other = _FACTOR_A.sub("lora_B", name)
        is_factor = other != name and size.numel() and len(size) > 1
        is_product = other in shapes and shapes[other][1:2] == size[:1]
        if _OTHER.search(name) or (is_factor and not is_product):
            raise FederationError(
                f"{rule} averages products of two factors that clients send, of linear layers or"
                f" convolutions without groups, and {name} is not one of them: train both factors,"
                " leave its layer out of target_modules, or use FedAvg"
            )
        if is_factor:
            found.append((name, other))
    if not found:
        raise FederationError(
            f"{rule} aggregates LoRA adapters, and the module has none that are trained: build the"
            " network with lightning_fl.models.LoRA, or use FedAvg"
        )
    return found
