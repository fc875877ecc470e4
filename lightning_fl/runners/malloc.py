"""Setting of the C library that keeps freed memory for the next step."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

#: glibc's names for its options (``man mallopt``).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@cache
def keep_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the system (glibc only).

    Stacked tensors are allocated anew in every step. Above 128 KiB, glibc requests their memory
    from the system each time, which fills it with zeros page by page. For a small model this takes
    longer than the arithmetic. After this call, glibc keeps up to 1 GiB, in blocks of up to 32 MiB.

    Returns:
        Whether the setting was changed; always False without Linux and glibc.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):  # musl
        return False
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**25) and libc.mallopt(M_TRIM_THRESHOLD, 2**30))
