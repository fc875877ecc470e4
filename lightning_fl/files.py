"""Files that may come from anyone."""

from __future__ import annotations

import errno
import reprlib
from pathlib import Path
from typing import Any

#: Bytes of a manifest or a trace that is read: a split of some 8 million samples, or 4 million
#: faults. Python's objects take up to 25 times as much, so this is about 2 GB of memory.
MOST_BYTES = 2**26

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # the standard six levels are up to 400,000 characters


def shown(value: Any) -> str:
    """Return a value as it can be part of a message: short, and without control characters.

    Example:
        >>> shown("x" * 1000)
        "'xxxxxxxxxxxx...xxxxxxxxxxxxx'"
    """
    return _SHORT.repr(value)


def read_text(path: str | Path) -> str:
    """Read a text in UTF-8 that has no more than `MOST_BYTES`.

    Raises:
        OSError: If it cannot be read, or is larger.
        UnicodeDecodeError: If it is no UTF-8.

    Example:
        >>> "split" in read_text(__file__)
        True
    """
    with open(path, "rb") as file:  # its size may be a lie, as that of a device
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(
            errno.EFBIG,
            f"more than the {MOST_BYTES} bytes that lightning_fl.files.MOST_BYTES allows",
        )
    return content.decode("utf-8")
