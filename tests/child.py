"""Python in another process."""

import subprocess
import sys


def python(*words, expect=0, **options):
    """Run Python until it ends with the expected exit code; return what it left, as text."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done
