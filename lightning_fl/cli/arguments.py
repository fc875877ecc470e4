"""The commands and their arguments, except the options of ``fit``, which Lightning knows.

Nothing here imports torch or Lightning, which take seconds.
"""

from __future__ import annotations

import os.path
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from glob import glob
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: Configurations that come with the package.
CONFIGS = Path(__file__).parents[1] / "configs"
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
}
#: Commands whose options are those of a configuration.
OF_TRAINER = ("fit", "validate", "test", "predict")
#: Commands that take options of their own and those of ``fit``, with what they need.
OF_CONFIG = {"check": "FILE", "partition": "FILE", "export": "flower FILE"}
WITH_FIT = "Further options are those of fit, such as --data.init_args.num_clients=20."
COLUMNS = "order, resume, vectorized, processes, plain"
RUNS = (
    "Folders of runs (runs/digits/version_0), or folders that contain runs (runs/digits). NAME is a"
    " group of runs; its FOLDER may contain wildcards (FedAvg='runs/a*')."
)
EXAMPLE = """\
lightning-fl COMMAND --help describes the options of a command. A first run:

  lightning-fl fit --config digits.yaml
"""


def short_path(path: Path) -> Path:
    """Return a path relative to the working directory, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def with_configs(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with its configurations as ``--config`` and a path.

    ``--config`` may be left out before the name of a file. A file that does not exist may be one
    that comes with the package, which ``--config`` also takes without ``.yaml``.

    Args:
        words: Arguments of the command line.

    Example:
        >>> with_configs(["fit", "a.yaml", "--config=b.yaml", "--data", "c.yaml"])
        ['fit', '--config', 'a.yaml', '--config=b.yaml', '--data', 'c.yaml']
        >>> Path(with_configs(["fit", "--config", "digits"])[-1]).name
        'digits.yaml'
    """
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = word.rpartition("=")
        is_value = option or (before.startswith("-") and "=" not in before)
        if value.endswith((".yaml", ".yml")) and not is_value:
            found.append(before := "--config")
        if (option or before) in ("-c", "--config") and not os.path.exists(value):
            name = value.removeprefix("configs/").removesuffix(".yaml")
            if os.path.isfile(path := f"{CONFIGS}/{name}.yaml"):
                word = word.removesuffix(value) + path
        found.append(word)
    return found


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the command of a command line, the values of its own arguments, and the rest.

    Args:
        words: Arguments of the command line.
    """
    top = ArgumentParser(
        prog="lightning-fl",
        description="Federated learning with the Lightning Trainer.",
        epilog=EXAMPLE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {version('lightning_fl')}")
    added = top.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands = {
        name: added.add_parser(
            name,
            help=text,
            usage=f"%(prog)s {OF_CONFIG[name]} [options]" if name in OF_CONFIG else None,
            description=text,
            epilog=WITH_FIT if name in OF_CONFIG else None,
            add_help=name not in OF_TRAINER,
            allow_abbrev=False,
        )
        for name, text in COMMANDS.items()
    }
    add = commands["init"].add_argument
    add("name", nargs="?", default="federation", help="New folder of the project, %(default)s.")
    add = commands["methods"].add_argument
    add("word", nargs="?", default="", help="Only methods with this word.")
    add = commands["report"].add_argument
    add("runs", nargs="+", metavar="[NAME=]FOLDER", help=RUNS)
    add("--output", help="An .html file; default: report.html in the run, or in this folder.")
    add("--title", help="Title of the report; default: the names of the runs.")
    add("--metric", help="Column of rounds.csv that judges runs; default: accuracy, else loss.")
    add("--mode", choices=["max", "min"], help="Best value of --metric, if its name does not tell.")
    add("--latex", help="A file for a table of the groups in LaTeX, in addition to the page.")
    add("--columns", nargs="+", default=[], help="Its columns; default: final and test metrics.")
    add("--percent", action="store_true", help="Shares in percent in this table.")
    add = commands["check"].add_argument
    add("--rounds", type=int, default=3, help="Rounds, default: %(default)s")
    add("--clients", type=int, default=4, help="Most clients per round, default: %(default)s")
    add("--columns", nargs="+", default=[], help=f"Some of {COLUMNS}; default: all")
    add = commands["partition"].add_argument
    add("--output", default=".", help="Folder of partition.json and partition.png.")
    add = commands["export"].add_argument
    add("target", choices=["flower"], help="What runs the app.")
    add("--output", default="app", help="Folder of the app, which must not exist, %(default)s.")
    asked, options = top.parse_known_args(words or ["--help"])
    own = vars(asked)
    command = own.pop("command")
    if options and command not in (*OF_CONFIG, *OF_TRAINER):
        top.error(f"unrecognized arguments: {' '.join(options)}")
    return command, own, options


def named_runs(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the folders of ``lightning-fl report`` by the name of their group.

    Args:
        words: Folders, or ``NAME=FOLDER``. A word that is an existing folder, or that has a slash
            before the first equality sign, has an empty name.

    Example:
        >>> named_runs(["FedAvg=runs/a", "runs/lr=0.1", "FedAvg=runs/b"])
        {'FedAvg': ['runs/a', 'runs/b'], '': ['runs/lr=0.1']}
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, _, pattern = word.partition("=")
        if not name or not pattern or "/" in name or Path(word).exists():
            found.setdefault("", []).append(word)
        else:
            # Without a match, the error names the pattern.
            folders = sorted(glob(f"{os.path.expanduser(pattern)}/"))
            found.setdefault(name, []).extend(folders or [pattern])
    return found
