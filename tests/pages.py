"""Code blocks of Markdown pages, run from top to bottom.

- ``python`` blocks run here, in one namespace a page; ``bash`` blocks in a shell.
- A ``text`` block after one is what it prints; ``...`` stands for anything.

After the language there may be

- ``file=NAME``: the block is the content of a file;
- ``not-run``: it only shows something;
- ``slow``: it runs where asked for;
- ``needs=PACKAGE``: it runs where the package is installed;
- ``in-process``: a command of this package runs here, without five seconds of imports.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import quick_cli

BLOCK = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page, language):
    """Return the code of a page's blocks in a language."""
    return [code for kind, _, code in BLOCK.findall(page.read_text()) if kind == language]


def run(page, but=("not-run", "slow")):
    """Run a page in the working directory, but for some languages or marks; return its names."""
    names, text, printed = {}, page.read_text(), None
    for found in BLOCK.finditer(text):
        kind, option, code = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        if kind == "text" and printed is not None:
            same = doctest.OutputChecker().check_output(code, printed, SAME)
            assert same, f"{page}:{line} promises\n{code}and there is\n{printed}"
        printed = None
        needed = option.removeprefix("needs=") if option.startswith("needs=") else None
        if option in but or kind in but or (needed and find_spec(needed) is None):
            continue
        if option.startswith("file="):
            Path(option.removeprefix("file=")).write_text(code)
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * line + code, str(page), "exec"), names)
            printed = out.getvalue()
        elif option == "in-process":
            _, *args = shlex.split(code.partition("lightning")[2].replace("\\\n", " "))
            with contextlib.redirect_stdout(io.StringIO()) as out:
                quick_cli.call(*args)
            printed = out.getvalue()
        elif kind == "bash":
            printed = shell(code, f"{page}:{line}")
    return names


def shell(code, where):
    """Run commands, and return what they print."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
    return done.stdout
