"""Commands that need torch and Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fl.cli.arguments import OF_TRAINER, named_runs, short_path
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.report import report


def run(command: str, own: dict[str, Any], options: Sequence[str]) -> None:
    """Run a command.

    Args:
        command: Its name.
        own: Values of its own arguments.
        options: Arguments of ``LightningCLI``.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It says at the first compilation that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.formatwarning = _warning
    # Raised by Lightning with torch 2.14.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")
    if command in OF_TRAINER:
        start(FederatedCLI, [command, *options]).run()
    elif command == "report":
        path = report(named_runs(own.pop("runs")), **own)
        for each in filter(None, (path, own["latex"])):
            print(f"Written to {short_path(Path(each))}")
    else:
        # Imported here: the help of a fit would list the classes of remote clients.
        from lightning_fl.cli import parts

        vars(parts)[command](["fit", *options], **own)


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Format a warning without the line of code."""
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    return f"lightning-fl: {kind}: {message}\n"
