"""Commands that need torch and Lightning."""

from __future__ import annotations

import logging
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fl.cli import fail
from lightning_fl.cli.arguments import OF_TRAINER, named_runs, short_path
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.report import report


def run(asked: Namespace, options: Sequence[str]) -> None:
    """Run a command. Configuration errors print a message without a traceback.

    Args:
        asked: The command and its arguments.
        options: Arguments of ``LightningCLI``.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It says at the first compilation that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
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
