"""The command ``lightning-fl``.

This module, ``arguments`` and ``quick`` import neither torch nor Lightning, which take seconds:
help, lists and mistyped commands are answered at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

#: Exit code after a fit in which no round had a usable update.
NOT_TRAINED = 3
#: Exit codes after an interruption (128 + SIGINT) and after SIGTERM (128 + SIGTERM), as in a shell.
INTERRUPTED, TERMINATED = 130, 143


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Mistakes of the user print a message without a traceback.

    Modules in the working directory can be imported, as with ``python -m``.

    Args:
        args: Arguments. None takes those of the process.
    """
    from lightning_fl.cli import quick
    from lightning_fl.cli.arguments import parse

    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        command, own, options = parse(sys.argv[1:] if args is None else args)
        if command in ("init", "configs", "methods"):
            vars(quick)[command](**own)
        else:
            _train(command, own, options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has left, as in lightning-fl configs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        fail(f"{error.filename}: {error.strerror}: choose another folder")
    except KeyboardInterrupt:  # outside of the Trainer, which handles interruptions itself
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(INTERRUPTED) from None


def _train(command: str, own: dict[str, object], options: Sequence[str]) -> None:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        from lightning_fl.cli.run import run  # an error without the extra that draws figures

        run(command, own, options)
    except MisconfigurationException as error:
        # Notes give the round and the client.
        fail("\n".join([str(error), *vars(error).get("__notes__", ())]))


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message and exit with a code."""
    sys.stderr.write(f"lightning-fl: error: {message}\n")
    raise SystemExit(code)
