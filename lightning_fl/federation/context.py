"""What a run is: handed to every rule, policy and sampler at the start of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_fl.federation.layout import VectorLayout
from lightning_fl.types import Cohort


@dataclass(frozen=True)
class Federation:
    """What a run is. Rules, policies and samplers get it in ``setup`` and refuse what does not fit.

    Outside a fit only ``num_clients`` and ``sampling`` are needed.

    Args:
        num_clients: Number of clients.
        sampling: How the clients of a round are drawn.
        layout: The exchanged tensors. None: every entry of a vector belongs to a parameter.
        seed: Seed of the run.
        shares_samples: Whether several processes train the same client on different samples.
        num_samples: Training samples of each client at the start of the fit, ``[num_clients]``.
        module: The user's LightningModule.
        trainer: The Trainer of the fit.
        data: The data module.
        aggregator: The rule of the run; not a stage of it.
        policy: The hyperparameter policy of the run.
        min_clients: Minimum number of usable updates that change the global model.
        on_client_error: What happens to an unusable update: ``skip`` or ``raise``.
        buffers: What becomes of a client's buffers: ``average``, ``server`` or ``local``.
        optimizer_state: Whether clients keep their optimizer's state: ``reset`` or ``keep``.
        configuration: Further objects and options that the run is a function of.

    Example:
        >>> Federation(num_clients=20, sampling=Cohort(size=5, clients=20)).num_parameters is None
        True
    """

    num_clients: int
    sampling: Cohort
    layout: VectorLayout | None = None
    seed: int = 0
    shares_samples: bool = False
    num_samples: Tensor | None = None
    module: Any = None
    trainer: Any = None
    data: Any = None
    aggregator: Any = None
    policy: Any = None
    min_clients: int = 1
    on_client_error: str = "skip"
    buffers: str = "average"
    optimizer_state: str = "reset"
    configuration: Sequence[Any] = ()

    @property
    def num_parameters(self) -> int | None:
        """Length of the vector's part that parameters take; None is all of it."""
        return None if self.layout is None else self.layout.num_parameters

    def is_rule(self, aggregator: object) -> bool:
        """Whether an aggregation rule is that of the run, and not a stage of it."""
        return self.aggregator is None or self.aggregator is aggregator

    @property
    def class_counts(self) -> Tensor | None:
        """Training samples of each client and class, ``[clients, classes]``; None if unknown.

        Of the samples that have arrived so far.
        """
        counts: Tensor | None = getattr(self.data, "class_counts", None)
        return counts
