"""``lightning-fl completion``."""

from __future__ import annotations

from typing import Any

from jsonargparse import capture_parser

from lightning_fl.cli.arguments import command_parser
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.extras import imported

#: Options that take a path.
PATHS = ("--config", "--ckpt_path", "--trainer.default_root_dir")


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
