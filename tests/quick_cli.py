"""The command line as tests call it: without what they do not look at.

Of 0.35 s, it parses the options of four commands for 0.27 s; two pictures take 0.5 s.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from lightning.pytorch.cli import LightningCLI
from matplotlib.figure import Figure

from lightning_fl.cli import main

COMMANDS = LightningCLI.subcommands()


def call(*words):
    """Run a command; options of the other commands are unknown, unless none is named."""
    asked = {name: COMMANDS[name] for name in words[:1] if name in COMMANDS} or COMMANDS
    only = mock.patch.object(LightningCLI, "subcommands", staticmethod(lambda: asked))
    with only, mock.patch.object(sys, "argv", ["lightning-fl", *map(str, words)]):
        main()


@contextmanager
def no_pictures():
    """Draw nothing in the ``with`` block; files that pictures would be in are empty."""

    def touch(figure, file, **options):
        if isinstance(file, Path):
            file.touch()

    with mock.patch.object(Figure, "savefig", touch):
        yield
