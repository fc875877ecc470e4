"""Numbers of a local step that a policy may set: ``federated_hyperparameters`` of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fl.contracts.step_module import StepModule
from lightning_fl.errors import FederationError
from lightning_fl.options import check_number

#: Optional attribute of a module: the numbers that a policy may set, with their own values by name.
HYPERPARAMETERS = "federated_hyperparameters"
#: Name of the client's number of training samples per class, which the loop sets.
CLASS_COUNTS = "class_counts"


class Declared:
    """Numbers of a module that a policy may set for each round and client.

    A module declares them in the attribute ``federated_hyperparameters``, a dictionary of values by
    name. While a client trains, the dictionary has the numbers of the policy instead, as tensors
    without dimensions. The ranges of the numbers of terms are known.

    Args:
        module: The user's module; None outside of a fit, which declares nothing.

    Raises:
        FederationError: If the attribute is not a dictionary with names.

    Example:
        >>> module = LightningModule()
        >>> module.federated_hyperparameters = {"mu": 0.1}
        >>> Declared(module).check("policy", "mu", [0.5, float("nan")])
        Traceback (most recent call last):
        lightning_fl.errors.FederationError: mu of policy must be a finite number, got nan
    """

    def __init__(self, module: LightningModule | None) -> None:
        self.module = module
        values = getattr(module, HYPERPARAMETERS, None) or {}
        is_fixed = isinstance(getattr(type(module), HYPERPARAMETERS, None), property)
        if is_fixed or not isinstance(values, dict) or not all(type(n) is str for n in values):
            raise FederationError(
                f"{type(module).__name__}.{HYPERPARAMETERS} must be an attribute with a dictionary"
                f" of numbers by name, got {'a property' if is_fixed else values!r:.200}"
            )
        #: Values of the module itself, by name.
        self.values: dict[str, Any] = dict(values)
        limits = module._hyperparameter_limits if isinstance(module, StepModule) else {}
        self._limits: Mapping[str, Mapping[str, Any]] = limits

    def check(self, source: str, name: str, values: Iterable[float]) -> None:
        """Check values for a number of the module. Other names are ignored.

        Args:
            source: Where the values come from, for the error message.
            name: Name of the number.
            values: The values.

        Raises:
            FederationError: If a value is not finite or out of range.
        """
        if name in self.values:
            for value in values:
                check_number(f"{name} of {source}", value, **self._limits.get(name, {}))

    def placed(
        self, values: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Return the values of declared numbers in the dtype and on the device of training."""
        return {
            name: value.to(dtype).to(device, non_blocking=True)
            for name, value in values.items()
            if name in self.values
        }

    def reset(self) -> None:
        """Restore the values of the module itself."""
        if self.values:
            vars(self.module)[HYPERPARAMETERS] = dict(self.values)
