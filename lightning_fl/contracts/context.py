"""Description of a run for aggregators, policies and samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.contracts.phases import Phase
from lightning_fl.contracts.plan import Cohort
from lightning_fl.errors import FederationError


@dataclass(frozen=True)
class Federation:
    """Description of a run, passed to ``setup`` of aggregators, policies and samplers.

    Outside of a fit, only ``num_clients`` and ``sampling`` are required.

    Args:
        num_clients: Number of clients.
        sampling: Number of clients sampled per round, and the sampling scheme.
        layout: Layout of the exchanged tensors. None means that all entries are parameters.
        seed: Seed of the run.
        shares_samples: Whether several processes train the same client on different samples.
        num_samples: Number of training samples per client at the start of the fit,
            ``[num_clients]``.
        module: The user's LightningModule.
        trainer: The Trainer of the fit.
        data: The data module.
        aggregator: The aggregator of the run (the outermost one if aggregators are nested).
        policy: The hyperparameter policy of the run.
        sampler: The client sampler of the run.
        traffic: Bytes that a client sends and receives in a round, for the parameters that are
            trained at the start of the fit; None before the layout is known.
        min_clients: Minimum number of usable updates that change the global model.
        buffers: How buffers are combined: ``average``, ``server`` or ``local``.
        optimizer_state: Whether clients keep their optimizer state: ``reset``, ``keep`` or
            ``local``.
        local_parameters: Names of the parameters and buffers that stay with each client.
        phases: Phases of local training, in which some of the parameters are trained.
        update_transforms: Transforms of the clients' updates.
        configuration: Text that differs between runs with other options; empty outside of a fit.

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
    sampler: Any = None
    traffic: tuple[int, int] | None = None
    min_clients: int = 1
    buffers: str = "average"
    optimizer_state: str = "reset"
    local_parameters: Sequence[str] = ()
    phases: Sequence[Phase] = ()
    update_transforms: Sequence[Any] = ()
    configuration: str = ""

    @property
    def num_parameters(self) -> int | None:
        """Number of entries of the vector that are parameters; None means all."""
        return None if self.layout is None else self.layout.num_parameters

    @property
    def known_layout(self) -> VectorLayout:
        """Layout of the exchanged tensors, from the start of a fit on."""
        assert self.layout is not None
        return self.layout

    def refuse_stage(self, aggregator: object, why: str) -> None:
        """Raise an error if an aggregator is nested in another one.

        Args:
            aggregator: The aggregator.
            why: Why it must be the aggregator of the run.
        """
        if self.aggregator is not None and self.aggregator is not aggregator:
            name, outer = type(aggregator).__name__, type(self.aggregator).__name__
            raise FederationError(
                f"{name} cannot be a stage of {outer}: {why}. Use {name} as the only aggregator"
            )

    @property
    def class_counts(self) -> Tensor | None:
        """Number of training samples per client and class, ``[clients, classes]``; None if unknown.

        Only samples that are available so far are counted.
        """
        counts: Tensor | None = None if self.data is None else self.data.class_counts
        return counts
