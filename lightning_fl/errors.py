"""``FederationError``, and helpers of messages."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException


class FederationError(MisconfigurationException, ValueError):
    """Error in the configuration, the data or a checkpoint of a federation."""


def check_package(value: Any, kind: type) -> None:
    """Check that an object does not come from the package ``pytorch_lightning``.

    The classes of ``pytorch_lightning`` are not compatible with those of ``lightning``.

    Args:
        value: The object.
        kind: The expected base class.

    Raises:
        FederationError: If the object comes from ``pytorch_lightning``.
    """
    old = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    if not isinstance(value, kind) and "pytorch_lightning" in old:
        raise FederationError(
            f"{type(value).__name__} comes from the package pytorch_lightning, which is not"
            " compatible with lightning: use `import lightning as L` instead of"
            " `import pytorch_lightning as pl` for the module, the Trainer and its callbacks, or"
            " `import lightning_fl.compat` before a package that does the latter"
        )


def first_line(error: BaseException) -> str:
    r"""Return the class of an error and the first line of its message.

    Example:
        >>> first_line(ValueError("wrong\nin many words")), first_line(KeyboardInterrupt())
        ('ValueError: wrong', 'KeyboardInterrupt')
    """
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
