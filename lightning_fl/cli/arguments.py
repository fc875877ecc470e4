"""Arguments of the commands that have no Trainer, and names of configurations."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

#: Configurations that come with the package.
CONFIGS = Path(__file__).parents[1] / "configs"


def short_path(path: Path) -> Path:
    """Return a path relative to the working directory, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Resolve ``--config digits.yaml`` to the configuration that comes with the package.

    An existing file with this name takes precedence.

    Args:
        args: Arguments of the command line.

    Example:
        >>> *_, found = with_shipped_configs(["fit", "--config", "configs/digits.yaml"])
        >>> Path(found).is_file()
        True
    """
    found, before = [], ""
    for arg in args:
        option, _, value = arg.partition("=") if arg.startswith("--config=") else (before, "", arg)
        shipped = CONFIGS / value.removeprefix("configs/")
        if option == "--config" and not Path(value).exists() and shipped.is_file():
            arg = arg.removesuffix(value) + str(shipped)
        found.append(arg)
        before = arg
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
        help="Folders of runs (runs/digits/version_0), or folders that contain runs (runs/digits).",
    )
    parser.add_argument(
        "--output",
        help="Path of the report, an .html file. By default, report.html in the folder of the run,"
        " or in the working directory if there are several runs.",
    )
    parser.add_argument("--title", help="Title of the report. By default, the names of the runs.")
    return parser


def partition_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl partition``, without the options of the data module."""
    parser = ArgumentParser(
        prog="lightning-fl partition",
        description="Split the data of a configuration over clients without training, and show"
        " sizes, classes and drift. Further options change the configuration, such as"
        " --data.init_args.num_clients=20.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="A configuration of lightning-fl fit.")
    parser.add_argument(
        "--output",
        default=".",
        help="Folder of partition.json and partition.png, default: %(default)s",
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
    asked, rest = _split_words(words, "app", "target", "config")
    if {"-h", "--help"} & {*rest} or asked.target != "flower" or asked.config is None:
        export_parser().parse_args(words)
    return asked, rest


def partition_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder of the output, and the arguments of the fit whose data is split.

    Args:
        words: Arguments after ``lightning-fl partition``.

    Example:
        >>> partition_words(["digits.yaml", "--output", "out", "--data.init_args.num_clients=3"])
        ('out', ['fit', '--config', 'digits.yaml', '--data.init_args.num_clients=3'])
    """
    asked, rest = _split_words(words, ".", "config")
    is_named = any(word.startswith("--config") for word in rest)
    if {"-h", "--help"} & {*rest} or not (asked.config or is_named):
        partition_parser().parse_args(["--help"] if "--help" in rest else words)
    config = ["--config", asked.config] if asked.config else []
    return asked.output, ["fit", *config, *rest]


def _split_words(words: Sequence[str], output: str, *names: str) -> tuple[Namespace, list[str]]:
    """Return ``--output`` and the arguments with these names, and all others."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, nargs="?")
    parser.add_argument("--output", default=output)
    return parser.parse_known_args(words)
