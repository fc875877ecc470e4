"""What every hyperparameter policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lightning_fl.federation.context import Federation
from lightning_fl.functional.randomness import RandomStream, generator, run_seed
from lightning_fl.types import FederationError, Feedback, full

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def local_steps(values: Mapping[str, Tensor], batches_per_epoch: Tensor) -> Tensor:
    """Return the local steps that hyperparameters ask for, ``[k]``.

    Args:
        values: ``num_steps`` or ``local_epochs``; without either it is one epoch.
        batches_per_epoch: Batches in one pass over each client's samples, ``[k]``.

    Example:
        >>> local_steps({"local_epochs": torch.tensor(1.5)}, torch.tensor([4, 5]))
        tensor([6, 8])
    """
    if (steps := values.get("num_steps")) is not None:
        return full(steps, batches_per_epoch)
    epochs = values.get("local_epochs", torch.ones(()))
    return (epochs * batches_per_epoch).round().clamp(min=1).long()


#: What a policy may learn from.
Signal = Literal["val_loss", "client_losses", "contributions"]


class HyperparameterPolicy(nn.Module, ABC):
    """Chooses the hyperparameters of each round and client; may learn from the outcome.

    What it learns lives in buffers, which the checkpoint keeps.
    """

    #: What of a round's :class:`~lightning_fl.types.Feedback` the policy learns from, besides the
    #: logged metrics. ``val_loss``: the validation loss, also of the model before the first round.
    #: ``client_losses``: the losses that clients report. ``contributions``: what each client has
    #: done to the validation loss, which takes a pass forward and back over the validation samples.
    learns_from: frozenset[Signal] = frozenset()

    def setup(self, federation: Federation) -> None:
        """Learn what the run is, at the start of a fit.

        A policy that does not fit the run raises a ``FederationError`` here. This is called before
        the module has an optimizer; ``federation.layout`` is None.

        Args:
            federation: The run.
        """

    @abstractmethod
    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return hyperparameters by name, each one value for all clients or one for each, ``[k]``.

        ``lr`` is the learning rate (absent: the module's own), ``lr_factor`` multiplies it. The
        work is ``num_steps`` local steps or ``local_epochs`` passes over the client's data.
        ``participates`` is False for clients that the round goes on without. Any other name is
        handed on in the plan. The answer must depend on the arguments and on saved
        state only: it may be asked for twice.
        """

    def max_local_steps(self, round: int, batches_per_epoch: Tensor) -> int:
        """Return an upper bound on the local steps of any client in a round.

        ``trainer.estimated_stepping_batches`` is the sum over all rounds of the run. A policy that
        learns its amount of work overrides this with the largest value that it can draw.

        Args:
            round: Counted from 0.
            batches_per_epoch: Batches in one pass over each client's samples, ``[num_clients]``.

        Raises:
            FederationError: If the policy learns its amount of work and does not override this.
        """
        clients = torch.arange(len(batches_per_epoch))
        values = {k: torch.as_tensor(v).cpu() for k, v in self.sample(round, clients).items()}
        if self.learns and values.keys() & {"num_steps", "local_epochs"}:
            name = type(self).__name__
            raise FederationError(
                f"trainer.estimated_stepping_batches is not known: {name} overrides update, so the"
                f" local steps of later rounds may change. Override {name}.max_local_steps(round,"
                " batches_per_epoch) with the largest number that it can draw"
            )
        return int(local_steps(values, batches_per_epoch).max())

    def update(self, feedback: Feedback) -> None:  # most policies do not learn
        """Learn from a round that ended."""

    @property
    def learns(self) -> bool:
        """Whether the policy overrides :meth:`update`."""
        return type(self).update is not HyperparameterPolicy.update

    def metrics(self) -> dict[str, float]:
        """Return what is worth knowing after a round: it is logged, and put into the table."""
        return {}

    def plot(self, rows: Sequence[Mapping[str, Any]]) -> Figure | None:
        """Draw what a picture shows best, of the table of rounds; None if nothing."""
        return None


class RandomPolicy(HyperparameterPolicy):
    """A policy that draws: what it draws in a round is a function of its seed and the round.

    Args:
        seed: Of the draws; None is the run's seed, which a ``FederatedLoop`` tells, else that of
            ``seed_everything``, else 0. A resumed run keeps it.

    Raises:
        FederationError: If the seed is negative.
    """

    drawn_from: Tensor

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        if seed is not None and seed < 0:
            raise FederationError(f"seed must be at least 0, got {seed}")
        self.seed = seed
        #: The run's seed, where it is known.
        self.run_seed: int | None = None
        #: The seed that the draws belong to, once there was one; -1 before.
        self.register_buffer("drawn_from", torch.tensor(-1))

    def setup(self, federation: Federation) -> None:
        """Take the seed of the run."""
        super().setup(federation)
        self.run_seed = federation.seed

    def random(self, purpose: RandomStream, round: int) -> torch.Generator:
        """Return the stream of a round."""
        if self.drawn_from < 0:
            own = self.run_seed if self.seed is None else self.seed
            self.drawn_from.fill_(run_seed(own))
        return generator(int(self.drawn_from), purpose, round)
