"""Rounds in which a local step may differ from that of the first round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch  # noqa: F401  # of an example
from lightning.pytorch import LightningModule
from torch.overrides import TorchFunctionMode

from lightning_fl.hooks import properties_set

#: Attributes of every LightningModule.
OF_LIGHTNING = frozenset(vars(LightningModule()))
#: Number of changes of an attribute that are looked at. One that changes more often is a counter.
MOST_CHANGES = 3


class ReadsRound:
    """Note whether a module reads ``current_epoch``, the index of the round.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        #: Whether it was read while it was noted.
        self.is_read = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note within a ``with`` block whether it is read."""
        self.is_read = False
        trainer: Any = self._module.trainer
        epoch = type(trainer).current_epoch.fget

        def noted(trainer: Any) -> int:
            self.is_read = True
            return int(epoch(trainer))

        with properties_set(trainer, {"current_epoch": noted}):
            yield


class Operations(TorchFunctionMode):
    """Note the functions of torch that are called within a ``with`` block, with their flags.

    Example:
        >>> with Operations() as operations:
        ...     _ = torch.ones(2).sum().neg()
        >>> [name for name, *_ in operations.calls]
        ['ones', 'sum', 'neg']
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[Any, ...]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the function, and call it."""
        kwargs = kwargs or {}
        flags = [value for value in (*args, *kwargs.values()) if isinstance(value, bool)]
        self.calls.append((getattr(func, "__name__", ""), *flags))
        return func(*args, **kwargs)


class Switches:
    """Tell whether hooks or callbacks have set attributes of a module to other plain values.

    A step may then do something that it did not do when it was checked.

    Args:
        module: The module.

    Example:
        >>> module = LightningModule()
        >>> module.is_warm = False
        >>> switches = Switches(module)
        >>> module.is_warm = True
        >>> switches.have_changed(), switches.have_changed()
        (True, False)
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._changes = module, Counter[str]()
        self._before = self._values()

    def have_changed(self) -> bool:
        """Return whether an attribute has changed since the last call; each counts three times."""
        before, self._before = self._before, self._values()
        changed = [n for n, value in self._before.items() if before.get(n, self) != value]
        self._changes.update(changed)
        return any(self._changes[name] <= MOST_CHANGES for name in changed)

    def _values(self) -> dict[str, Any]:
        return {
            f"{part}.{name}": value
            for part, module in self._module.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and name not in OF_LIGHTNING
        }
