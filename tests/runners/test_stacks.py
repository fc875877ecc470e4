"""Freed memory stays with the process."""

import inspect
import sys

import pytest

from child import python
from lightning_fl.runners.stacks import keep_freed_memory

#: Prints MiB that a process still holds of the 16 that it has freed.
SCRIPT = """
import ctypes, sys
from functools import cache
{function}
{call}
def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before, block = held(), libc.malloc(2**24)
ctypes.memset(block, 1, 2**24)
libc.free(block)
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc, the C library of Linux")
@pytest.mark.parametrize(("call", "least", "most"), [("keep_freed_memory()", 15, 20), ("", -1, 1)])
def test_freed_memory_is_kept(call, least, most):
    script = SCRIPT.format(function=inspect.getsource(keep_freed_memory), call=call)
    assert least <= float(python("-c", script).stdout) <= most
