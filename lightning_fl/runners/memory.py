"""Memory that was freed and is needed again a step later."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

#: glibc's names for its options (``man mallopt``).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the process, instead of giving it back to the system.

    Stacked tensors are made anew in every step. Beyond 128 KiB glibc takes their memory from the
    system each time, which has to fill it with zeros, page by page: that takes longer than the
    arithmetic of a small model. From here on it keeps up to 1 GiB, and blocks up to 32 MiB.

    Returns:
        Whether it does: elsewhere than on Linux with glibc nothing happens.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):  # musl
        return False
    return bool(libc.mallopt(M_MMAP_THRESHOLD, 2**25) and libc.mallopt(M_TRIM_THRESHOLD, 2**30))
