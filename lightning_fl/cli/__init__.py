"""The command ``lightning-fl``.

This module and those of the commands ``init``, ``configs`` and ``methods`` import neither torch nor
Lightning, which take seconds: help, lists and mistyped commands are answered at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

from lightning_fl.cli.messages import did_you_mean

#: Commands with their descriptions.
COMMANDS = {
    "init": "Write a minimal project: a module, a configuration and a README.",
    "configs": "List the configurations that come with the package.",
    "methods": "List the methods, with name, paper and configuration.",
    "fit": "Train a federation.",
    "check": "Check that results do not depend on order, interruptions, vectorization, processes.",
    "validate": "Evaluate a checkpoint on the validation samples.",
    "test": "Evaluate a checkpoint on the test samples, and write test.json.",
    "predict": "Write the predictions of a checkpoint for the test samples.",
    "report": "Write an HTML report of one run, or a comparison of several runs.",
    "partition": "Show how the data of a configuration is split, without training.",
    "export": "Write an app that runs a configuration on the machines of a deployment.",
    "completion": "Print a script that completes commands and options in a shell.",
}
#: Errors of a folder that is full, read-only, not yours, or a file, or whose name is too long.
STORAGE = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM"),
        *("ENOTDIR", "EEXIST", "ENAMETOOLONG"),
    )
}
#: Exit code after an interruption (128 + SIGINT), as in a shell.
INTERRUPTED = 130
#: Exit code after SIGTERM (128 + SIGTERM), as in a shell.
TERMINATED = 143


def usage() -> str:
    """Return the help of the command without arguments."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {description}" for name, description in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightning-fl COMMAND [OPTION ...]",
            "",
            "Federated learning with the Lightning Trainer.",
            "",
            "commands:",
            *lines,
            "",
            "lightning-fl COMMAND --help describes the options of a command. A first run:",
            "",
            "  lightning-fl fit --config digits.yaml",
        ]
    )


def main(args: Any = None) -> None:
    """Run the command line. Mistakes of the user print a message without a traceback.

    Modules in the working directory can be imported, as with ``python -m``.

    Args:
        args: Arguments, or a configuration as ``LightningCLI`` takes it. None takes the arguments
            of the process.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    words = sys.argv[1:] if args is None else args
    try:
        if isinstance(words, list) and _answered(words):
            return
        with _interrupted_at_once():
            from lightning_fl.cli.run import run

        run(args)
    except OSError as error:
        if error.errno not in STORAGE:
            raise
        place = "" if error.filename is None else f"{error.filename}: "
        fail(f"{place}{error.strerror}: choose another folder, or free space")
    except KeyboardInterrupt:  # outside of the Trainer, which handles interruptions itself
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(INTERRUPTED) from None


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """End the process at an interruption within a ``with`` block that imports packages.

    A package may make an error of its own of a ``KeyboardInterrupt`` in its import. Where
    interruptions are ignored or handled otherwise, they still are.
    """
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(*_: Any) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def printing() -> Iterator[None]:
    """Print until the reader of a pipe closes it, as in ``lightning-fl configs | head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answered(words: Sequence[str]) -> bool:
    with printing():
        return _answer(words)
    return True  # the reader has left


def _answer(words: Sequence[str]) -> bool:
    """Run a command that needs neither torch nor Lightning; return whether it was one."""
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(f"lightning-fl {version('lightning_fl')}")
    elif name == "init":
        from lightning_fl.cli.project import init

        init(rest)
    elif name in ("configs", "methods"):
        from lightning_fl.cli import listing

        (listing.configs if name == "configs" else listing.methods)(rest)
    elif name in ("report", "partition", "export", "completion", "check"):
        from lightning_fl.cli import arguments

        # Help and mistakes, before torch is imported.
        checks: dict[str, Callable[[Sequence[str]], object]] = {
            "report": arguments.report_parser().parse_args,
            "partition": arguments.partition_words,
            "export": arguments.export_words,
            "completion": arguments.completion_parser().parse_args,
            "check": arguments.check_parser().parse_known_args,
        }
        checks[name](rest)
        return False
    elif name not in COMMANDS and not name.startswith("-"):
        fail(f"unknown command {name}{did_you_mean(name, COMMANDS)}", usage())
    else:
        return False
    return True


def fail(message: str, more: str = "") -> NoReturn:
    """Print an error message and exit with code 2.

    Args:
        message: What is wrong, and the remedy.
        more: Printed before the message.
    """
    sys.stderr.write(f"{more}\n\n" * bool(more) + f"lightning-fl: error: {message}\n")
    raise SystemExit(2)
