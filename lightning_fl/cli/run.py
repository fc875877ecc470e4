"""Commands that need torch and Lightning."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning.pytorch.cli import ArgsType
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fl.cli.arguments import (
    check_parser,
    completion_parser,
    export_words,
    named_runs,
    partition_words,
    report_parser,
    short_path,
    with_shipped_configs,
)
from lightning_fl.cli.completion import CompletionCLI
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.cli.messages import show_warning, with_notes
from lightning_fl.report import report
from lightning_fl.types import FederationError


def run(args: ArgsType = None) -> None:
    """Run a command. Configuration errors print a message without a traceback.

    Args:
        args: Arguments of ``LightningCLI``; None takes those of the process.
    """
    if args is None:
        sys.argv[1:] = with_shipped_configs(sys.argv[1:])
    elif isinstance(args, list):
        args = with_shipped_configs(args)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.formatwarning = show_warning
    # Raised by Lightning with torch 2.14.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")
    try:
        _run(args)
    except MisconfigurationException as error:
        message = with_notes(error)
    except ValueError as error:
        message = with_notes(error)
        # jsonargparse wraps errors of a constructor; the others are of the Trainer's.
        if "Union subtypes" not in message and not message.startswith("You selected an invalid"):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FederationError):
            cause = cause.__cause__
        message = with_notes(cause or error)
    except RuntimeError as error:
        message = str(error)
        if not message.startswith(
            ("Early stopping conditioned on metric", "Found more than one stateful callback")
        ):
            raise
    else:
        return
    sys.stderr.write(f"lightning-fl: error: {message}\n")
    raise SystemExit(2)


def _run(args: ArgsType) -> None:
    words = sys.argv[1:] if args is None else args
    if not isinstance(words, list):  # a configuration
        start(FederatedCLI, args)
        return
    name, *rest = words
    if name == "report":
        asked = report_parser().parse_args(rest)
        path = report(named_runs(asked.runs), asked.output, asked.title, asked.metric, asked.mode)
        print(f"Written to {short_path(path)}")
    elif name == "export":
        _export(rest)
    elif name == "completion":
        start(partial(CompletionCLI, shell=completion_parser().parse_args(rest).shell), [])
    elif name == "partition":
        from lightning_fl.cli.parts import split  # see _export

        output, words = partition_words(rest)
        split(words, output)
    elif name == "check":
        from lightning_fl.cli.parts import check  # see _export

        asked, words = check_parser().parse_known_args(rest)
        check(["fit", *words], asked.rounds, asked.clients, asked.columns)
    else:
        start(FederatedCLI, args)


def _export(words: Sequence[str]) -> None:
    # Imported here: the help of a fit would list the classes of remote clients among the methods.
    from lightning_fl.cli.parts import read_config
    from lightning_fl.integrations.export import write_flower_app

    app, rest = export_words(words)
    found = read_config(app.config, *rest)
    for path in write_flower_app(found, Path(app.config), app.output):
        print(f"Written to {short_path(path.absolute())}")
    if found.left_out:
        print(f"The app leaves out: {', '.join(found.left_out)}")
    print(f"It waits for {len(found.data.num_samples)} SuperNodes: see its README.md")
