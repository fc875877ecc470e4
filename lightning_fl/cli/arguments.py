"""Arguments of the commands that have no Trainer, and names of configurations."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path

#: Configurations that come with the package.
CONFIGS = Path(__file__).parents[1] / "configs"


def short_path(path: Path) -> Path:
    """Return a path relative to the working directory, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def config_files(args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the position and the path of each file of a configuration on a command line.

    A value that does not end as a YAML file may be the text of a configuration.

    Args:
        args: Arguments of the command line.

    Example:
        >>> list(config_files(["fit", "--config=a.yaml", "-c", "b.yaml", "-c", "{model: null}"]))
        [(1, 'a.yaml'), (3, 'b.yaml')]
    """
    before = ""
    for at, arg in enumerate(args):
        is_value = arg.startswith("--config=") or before in ("--config", "-c")
        if is_value and arg.endswith((".yaml", ".yml")):
            yield at, arg.removeprefix("--config=")
        before = arg


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Resolve ``--config digits.yaml`` to the configuration that comes with the package.

    An existing file with this name takes precedence.

    Args:
        args: Arguments of the command line.

    Example:
        >>> *_, found = with_shipped_configs(["fit", "-c", "digits.yaml"])
        >>> Path(found).is_file()
        True
    """
    found = list(args)
    for at, path in config_files(args):
        shipped = CONFIGS / path.removeprefix("configs/")
        if not Path(path).exists() and shipped.is_file():
            found[at] = found[at].removesuffix(path) + str(shipped)
    return found


def report_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl report``."""
    parser = ArgumentParser(
        prog="lightning-fl report",
        description="Write an HTML report of one run, or a comparison of several runs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        help="Folders of runs (runs/digits/version_0), or folders that contain runs (runs/digits)."
        " NAME=FOLDER names their group; FOLDER may contain wildcards (FedAvg='runs/a*'). A name"
        " that is given several times has all of these runs.",
    )
    parser.add_argument(
        "--output",
        help="Path of the report, an .html file. By default, report.html in the folder of the run,"
        " or in the working directory if there are several runs.",
    )
    parser.add_argument("--title", help="Title of the report. By default, the names of the runs.")
    parser.add_argument(
        "--metric",
        help="Column of rounds.csv by which runs are judged and compared, such as val/f1. By"
        " default, the accuracy of the validation, or else its loss.",
    )
    parser.add_argument(
        "--mode",
        choices=["max", "min"],
        help="Whether the best value of --metric is its maximum or its minimum. By default, min for"
        " names with loss or err, otherwise max.",
    )
    return parser


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
            continue
        pattern = str(Path(pattern).expanduser())
        folders = [pattern] if Path(pattern).exists() else sorted(glob(pattern))
        # Without a match, the error names the pattern.
        found.setdefault(name, []).extend([f for f in folders if Path(f).is_dir()] or [pattern])
    return found


def partition_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl partition``, without the options of the data module."""
    parser = ArgumentParser(
        prog="lightning-fl partition",
        description="Split the data of a configuration over clients without training, and show"
        " sizes, classes and drift. Further options change the configuration, such as"
        " --data.init_args.num_clients=20.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", help="A configuration of lightning-fl fit.")
    # As in the other commands, also several times.
    parser.add_argument("-c", "--config", dest="more", action="append", default=[], help=SUPPRESS)
    parser.add_argument(
        "--output",
        default=".",
        help="Folder of partition.json and partition.png, default: %(default)s",
    )
    return parser


def check_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl check``, without the options of the fit."""
    parser = ArgumentParser(
        prog="lightning-fl check",
        usage="lightning-fl check --config FILE [options of fit] [--rounds N] [--clients N]"
        " [--columns NAME ...]",
        description="Train a small federation of a configuration again with one thing changed, and"
        " compare the final models: the clients in reverse order (order), continued after the first"
        " round by a new process (resume), clients that train at once (vectorized), two processes"
        " (processes), and one client with all samples beside Lightning without a loop (plain). The"
        " exit code is 1 if a result differs.",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=3, help="Rounds, default: %(default)s")
    parser.add_argument(
        "--clients", type=int, default=4, help="Most clients per round, default: %(default)s"
    )
    columns = ["order", "resume", "vectorized", "processes", "plain"]
    parser.add_argument(
        "--columns", nargs="+", choices=columns, default=columns, help="What to check, default: all"
    )
    return parser


def export_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl export``."""
    parser = ArgumentParser(
        prog="lightning-fl export",
        description="Write an app from a configuration, which runs the same federation on the"
        " machines of a deployment. Further options change the configuration, such as"
        " --trainer.max_epochs=20.",
        allow_abbrev=False,
    )
    parser.add_argument("target", choices=["flower"], help="What runs the app.")
    parser.add_argument("config", help="A configuration of lightning-fl fit.")
    parser.add_argument(
        "--output",
        default="app",
        help="Folder of the app, which must not exist, default: %(default)s",
    )
    return parser


def completion_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl completion``."""
    parser = ArgumentParser(
        prog="lightning-fl completion",
        description="Print a script that completes commands and options in a shell. For bash:"
        " lightning-fl completion bash > ~/.local/share/bash-completion/completions/lightning-fl",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="The shell.")
    return parser


def export_words(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the options of ``lightning-fl export``, and those that change the configuration.

    Args:
        words: Arguments after ``lightning-fl export``.

    Example:
        >>> asked, rest = export_words(["flower", "digits.yaml", "--trainer.max_epochs=3"])
        >>> asked.config, asked.output, rest
        ('digits.yaml', 'app', ['--trainer.max_epochs=3'])
    """
    return _parse(export_parser(), words)


def partition_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder of the output, and the arguments of the fit whose data is split.

    Args:
        words: Arguments after ``lightning-fl partition``.

    Example:
        >>> partition_words(["-c", "digits.yaml", "--output=out", "--data.init_args.num_clients=3"])
        ('out', ['fit', '--config', 'digits.yaml', '--data.init_args.num_clients=3'])
    """
    parser = partition_parser()
    asked, rest = _parse(parser, words)
    files = [asked.config] * bool(asked.config) + asked.more
    if not files:
        parser.error("a configuration is required, such as digits.yaml")
    return asked.output, ["fit", *(word for file in files for word in ("--config", file)), *rest]


def _parse(parser: ArgumentParser, words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the arguments of a parser, and the options that it does not know with their values.

    ``parse_known_args`` would take the value of an unknown option for a name.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    names: list[str] = []
    options: list[str] = []
    rest: list[str] = []
    place, takes_value = names, False
    for word in words:
        if re.match("-[-a-z]", word):
            place = options if word.partition("=")[0] in known else rest
            takes_value = "=" not in word and word not in ("--help", "--print_config")
            place.append(word)
        else:
            (place if takes_value else names).append(word)
            takes_value = False
    return parser.parse_args([*names, *options]), rest
