"""Commands that need torch and Lightning."""

from __future__ import annotations

import logging
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import capture_parser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fl.cli import fail
from lightning_fl.cli.arguments import OF_TRAINER, command_parser, named_runs, short_path
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.extras import imported
from lightning_fl.report import report

#: Options that take a path.
PATHS = ("--config", "--ckpt_path", "--trainer.default_root_dir")


def run(asked: Namespace, options: Sequence[str]) -> None:
    """Run a command. Configuration errors print a message without a traceback.

    Args:
        asked: The command and its arguments.
        options: Arguments of ``LightningCLI``.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.formatwarning = _warning
    # Raised by Lightning with torch 2.14.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")
    try:
        _run(asked, options)
    except MisconfigurationException as error:
        # Notes give the round and the client.
        fail("\n".join([str(error), *getattr(error, "__notes__", ())]))


def _run(asked: Namespace, options: Sequence[str]) -> None:
    if asked.command in OF_TRAINER:
        start(FederatedCLI, [asked.command, *options]).run()
    elif asked.command == "report":
        runs = named_runs(asked.runs)
        table = (asked.latex, asked.columns, asked.percent)
        path = report(runs, asked.output, asked.title, asked.metric, asked.mode, *table)
        for each in filter(None, (path, asked.latex)):
            print(f"Written to {short_path(Path(each))}")
    elif asked.command == "completion":
        print_completion(asked.shell)
    else:
        # Imported here: the help of a fit would list the classes of remote clients.
        from lightning_fl.cli import parts

        words = ["fit", *options]
        if asked.command == "partition":
            parts.split(words, asked.output)
        elif asked.command == "check":
            parts.check(words, asked.rounds, asked.clients, asked.columns)
        else:
            parts.export(words, asked.output)


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Format a warning without the line of code."""
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    return f"lightning-fl: {kind}: {message}\n"


def print_completion(shell: str) -> None:
    """Print the script that completes commands and options.

    Args:
        shell: The shell.
    """
    shtab = imported("shtab", user="lightning-fl completion", extra="completion")
    top, commands = command_parser()
    lightning: Any = capture_parser(lambda: start(FederatedCLI, []))
    (subcommands,) = (each.choices for each in lightning._actions if each.dest == "subcommand")
    for name, parser in subcommands.items():
        for action in parser._actions:
            if action.option_strings and action.dest != "help":
                added: Any = commands[name].add_argument(*action.option_strings)
                if added.option_strings[-1] in PATHS:
                    added.complete = shtab.FILE
    print(shtab.complete(top, shell))
