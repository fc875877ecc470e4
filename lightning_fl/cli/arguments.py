"""The commands and their arguments, except the options of ``fit``, which Lightning knows.

Nothing here imports torch or Lightning, which take seconds.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from glob import glob
from importlib.metadata import version
from pathlib import Path

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
DETAILS = {
    "check": "It trains a small federation again with one thing changed, and compares the final"
    " models: the clients in reverse order (order), continued after the first round by a new"
    " process (resume), clients that train at once (vectorized), two processes (processes), and one"
    " client with all samples beside Lightning without a loop (plain). The exit code is 1 if a"
    " result differs.",
}
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
    paths = CONFIGS.rglob("*.yaml")
    shipped = {str(path.relative_to(CONFIGS).with_suffix("")): path for path in paths}
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = word.rpartition("=")
        is_value = option or (before.startswith("-") and "=" not in before)
        is_file = value.endswith((".yaml", ".yml"))
        if is_file and not is_value:
            found.append("--config")
        path = shipped.get(value.removeprefix("configs/").removesuffix(".yaml"))
        is_config = is_file or (option or before) in ("-c", "--config")
        if path and is_config and not Path(value).exists():
            word = word.removesuffix(value) + str(path)
        found.append(word)
    return found


def command_parser() -> ArgumentParser:
    """Return the parser of all commands."""
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
            description=f"{text} {DETAILS.get(name, '')}",
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
    add("--columns", nargs="+", default=[], help="What to check, default all")
    add = commands["partition"].add_argument
    add("--output", default=".", help="Folder of partition.json and partition.png.")
    add = commands["export"].add_argument
    add("target", choices=["flower"], help="What runs the app.")
    add("--output", default="app", help="Folder of the app, which must not exist, %(default)s.")
    return top


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
            pattern = str(Path(pattern).expanduser())
            folders = [each for each in sorted(glob(pattern)) if Path(each).is_dir()]
            # Without a match, the error names the pattern.
            found.setdefault(name, []).extend(folders or [pattern])
    return found
