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
#: Exit code after an interruption (128 + SIGINT), as in a shell.
INTERRUPTED = 130
#: Exit code after SIGTERM (128 + SIGTERM), as in a shell.
TERMINATED = 143


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Mistakes of the user print a message without a traceback.

    Modules in the working directory can be imported, as with ``python -m``.

    Args:
        args: Arguments. None takes those of the process.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        _run(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has left, as in lightning-fl configs | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        fail(f"{error.filename}: {error.strerror}: choose another folder")
    except KeyboardInterrupt:  # outside of the Trainer, which handles interruptions itself
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(INTERRUPTED) from None


def _run(words: Sequence[str]) -> None:
    from lightning_fl.cli.arguments import OF_CONFIG, OF_TRAINER, command_parser

    parser = command_parser()
    asked, options = parser.parse_known_args(words or ["--help"])
    if options and asked.command not in (*OF_CONFIG, *OF_TRAINER):
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if asked.command in ("init", "configs", "methods"):
        from lightning_fl.cli import quick

        if asked.command == "init":
            quick.init(asked.name)
        elif asked.command == "configs":
            quick.configs()
        else:
            quick.methods(asked.word)
    else:
        from lightning_fl.errors import FederationError

        try:
            from lightning_fl.cli.run import run
        except FederationError as error:  # without the extra that draws figures
            fail(str(error))
        run(asked, options)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message and exit with a code."""
    sys.stderr.write(f"lightning-fl: error: {message}\n")
    raise SystemExit(code)
