"""What every hyper-parameter policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from lightning_fl.types import Feedback


class HyperParameterPolicy(nn.Module, ABC):
    """Chooses the hyper-parameters of each round and client; may learn from the outcome.

    What it learns lives in buffers, which the checkpoint keeps.
    """

    #: Whether the server's validation loss is wanted before the first round too.
    needs_val_loss = False

    @abstractmethod
    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return hyper-parameters by name, each one value for all clients or one for each, ``[k]``.

        ``lr`` is the learning rate (absent: the module's own), ``lr_factor`` multiplies it. The
        work is ``num_steps`` local steps or ``local_epochs`` passes over the client's data. Any
        other name is handed on in the plan. The answer must depend on the arguments and on saved
        state only: it may be asked for twice.
        """

    def update(self, feedback: Feedback) -> None:  # most policies do not learn
        """Learn from a round that ended."""

    def figures(self) -> dict[str, float]:
        """Return what is worth knowing after a round: it is logged, and put into the table."""
        return {}
