"""The loss scale of 16-bit mixed precision across clients and rounds."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer


def scaler_of(trainer: Trainer) -> Any:
    """Return the gradient scaler of the Trainer; None if its precision has none."""
    return getattr(trainer.precision_plugin, "scaler", None)


def without_scale(trainer: Trainer | None) -> AbstractContextManager[None]:
    """Return the context of a forward pass whose gradients are computed without the loss scale.

    With a gradient scaler, the pass is made in single precision, since small gradients would be
    zero in float16. Otherwise, the precision does not change.

    Args:
        trainer: The Trainer; None has no scaler.
    """
    if trainer is None or scaler_of(trainer) is None:
        return nullcontext()
    return torch.autocast(trainer.strategy.root_device.type, enabled=False)


class ScaleState(NamedTuple):
    """State of a gradient scaler.

    Args:
        scale: Factor of the loss.
        steps: Number of steps since the scale changed.
    """

    scale: float
    steps: int


class LossScale:
    """Manage the gradient scaler of ``precision="16-mixed"``.

    The scaler skips a step whose gradients are not finite, and then lowers the scale. Every client
    starts from the state at the start of the round, so that it does not depend on other clients.
    The next round starts from the state of the median client; see :func:`median_state`.

    Args:
        trainer: The Trainer of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        scaler = scaler_of(trainer)
        #: The gradient scaler; None if the precision has none.
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None

    def read(self) -> ScaleState | None:
        """Return the state of the scaler; None without a scaler."""
        if self._scaler is None:
            return None
        state = self._scaler.state_dict()
        return ScaleState(state["scale"], state["_growth_tracker"])

    def write(self, state: ScaleState | None) -> None:
        """Restore a state returned by :meth:`read`."""
        if self._scaler is None or state is None:
            return
        changed = {"scale": state.scale, "_growth_tracker": state.steps}
        self._scaler.load_state_dict(self._scaler.state_dict() | changed)

    def skipped_all(self, start: ScaleState | None, num_steps: int) -> bool:
        """Return whether the scaler has skipped all local steps of a client.

        Each skipped step multiplies the scale by the backoff factor. The exponent leaves room for
        rounding.

        Args:
            start: State at the first local step.
            num_steps: Number of local steps.
        """
        now = self.read()
        if now is None or start is None:
            return False
        lowest: float = start.scale * self._scaler.get_backoff_factor() ** (num_steps - 0.5)
        return now.scale <= lowest


def median_state(states: Iterable[ScaleState]) -> ScaleState | None:
    """Return the median of the states of clients, ordered by scale; None if there is none.

    The median does not depend on the order of clients, and a minority of clients with non-finite
    gradients cannot lower it. Of two middle states, the higher is returned: a scale that is too
    high costs a few skipped steps, and one that is too low loses small gradients.

    Example:
        >>> median_state([ScaleState(1024.0, 3), ScaleState(0.5, 0), ScaleState(1024.0, 9)])
        ScaleState(scale=1024.0, steps=3)
        >>> median_state([ScaleState(0.5, 0), ScaleState(1024.0, 3)])
        ScaleState(scale=1024.0, steps=3)
    """
    ordered = sorted(states)
    return ordered[len(ordered) // 2] if ordered else None
