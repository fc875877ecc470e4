"""``lightning-fl completion``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from lightning_fl.cli import COMMANDS
from lightning_fl.cli.federated import FederatedCLI
from lightning_fl.extras import imported

#: Options that take a path.
PATHS = ("--config", "--ckpt_path", "--output", "--trainer.default_root_dir")


class CompletionCLI(FederatedCLI):
    """Print the script that completes commands and options, and exit.

    Args:
        shell: The shell.
        options: Arguments of :class:`~lightning_fl.cli.federated.FederatedCLI`.
    """

    def __init__(self, *args: Any, shell: str, **options: Any) -> None:
        self.shell = shell
        super().__init__(*args, **options)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Print the script."""
        shtab = imported("shtab", user="lightning-fl completion", extra="completion")
        plain = ArgumentParser("lightning-fl")
        commands = plain.add_subparsers()
        for name, description in COMMANDS.items():
            command = commands.add_parser(name, help=description)
            own = self._subcommand_parsers.get(name)
            for action in own._actions if own is not None else ():
                if action.option_strings and action.dest != "help":
                    added: Any = command.add_argument(*action.option_strings)
                    if added.option_strings[-1] in PATHS:
                        added.complete = shtab.FILE
        print(shtab.complete(plain, self.shell))
        raise SystemExit(0)
