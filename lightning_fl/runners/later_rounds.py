"""Rounds in which a local step may differ from that of the first round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch  # noqa: F401  # of an example
from lightning.pytorch import LightningModule
from torch.overrides import TorchFunctionMode

from lightning_fl.hooks import attributes_set, properties_set

#: Numbers by which a count is moved: to the next value, and beyond thresholds.
LATER = (1, 10**6)
#: Attributes of every LightningModule.
OF_LIGHTNING = frozenset(vars(LightningModule()))
#: Number of changes of an attribute that are looked at. One that changes more often is a counter.
MOST_CHANGES = 3


class Count:
    """Note whether a module reads a count of its Trainer, and give it later values.

    Args:
        module: The module.
        name: Name of the count: ``global_step``, or ``current_epoch``, the index of the round.
    """

    def __init__(self, module: LightningModule, name: str) -> None:
        self._module, self._name = module, name
        #: Whether it was read while it was noted.
        self.is_read = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note within a ``with`` block whether it is read."""
        self.is_read = False

        def noted(count: int) -> int:
            self.is_read = True
            return count

        with self._changed(noted):
            yield

    @contextmanager
    def moved_by(self, steps: int) -> Iterator[None]:
        """Increase its value within a ``with`` block, in which the fit cannot be told to stop."""
        trainer = self._module.trainer
        stop = attributes_set(trainer, {"should_stop": trainer.should_stop})
        with self._changed(lambda count: count + steps), stop:
            yield

    def _changed(self, change: Callable[[int], int]) -> AbstractContextManager[None]:
        """Return a context in which the Trainer returns another value."""
        trainer: Any = self._module.trainer
        count = getattr(type(trainer), self._name).fget
        return properties_set(trainer, {self._name: lambda trainer: change(count(trainer))})


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
