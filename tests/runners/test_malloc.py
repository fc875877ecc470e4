"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

from lightning_fl.runners import malloc

#: Prints MiB that a process still holds of the 16 that it has freed. The module is run by its path:
#: to import the package takes nine seconds.
SCRIPT = """
import ctypes, runpy
keep_freed_memory = runpy.run_path({path!r})["keep_freed_memory"]
{keep}
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
@pytest.mark.parametrize(
    ("keep", "least", "most"), [("assert keep_freed_memory()", 15, 20), ("", -1, 1)]
)
def test_freed_memory_is_kept(keep, least, most):
    command = [sys.executable, "-c", SCRIPT.format(path=malloc.__file__, keep=keep)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert least <= float(out) <= most


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(malloc.sys, "platform", "darwin")
    assert malloc.keep_freed_memory.__wrapped__() is False
