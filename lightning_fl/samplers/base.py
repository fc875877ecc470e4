"""Base class of client samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_fl.contracts.context import Federation


class ClientSampler(ABC):
    """Base class of client samplers."""

    #: Whether clients may start from earlier versions of the global model.
    is_asynchronous = False

    def setup(self, federation: Federation) -> None:  # noqa: B027  # most fit every run
        """Check that the sampler supports a run, at the start of a fit.

        Args:
            federation: Description of the run; ``federation.layout`` is None.

        Raises:
            FederationError: If the sampler does not support the run.
        """

    def begin(self, federation: Federation) -> None:  # noqa: B027  # most need no preparation
        """Prepare for the rounds of a fit, once the model and the seed of the run are known.

        Args:
            federation: Description of the run, with ``layout`` and ``traffic``.

        Raises:
            FederationError: If the sampler does not support the run.
        """

    @abstractmethod
    def sample(
        self, round: int, count: int, num_samples: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the ids of the sampled clients, without duplicates.

        Args:
            round: Index of the round, from 0.
            count: Number of clients to sample. A sampler may return a different number, as
                :class:`PoissonSampler` does.
            num_samples: Number of training samples per client, ``[num_clients]``.
            generator: Random generator of the round.
        """

    def metrics(self, round: int) -> dict[str, float]:
        """Return metrics of a round. They are logged and written to the table of rounds.

        Args:
            round: Index of the round, from 0.
        """
        return {}
