"""The parser of a configuration: its help, its errors, and its files."""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

# Every class that a config may name by its short name has to be imported.
import lightning_fl.models
import lightning_fl.optimizers
import lightning_fl.transforms  # noqa: F401
from lightning_fl.cli import fail
from lightning_fl.cli.arguments import COMMANDS, WITH_FIT
from lightning_fl.errors import FederationError
from lightning_fl.files import error_context, read_text

#: Parts of a configuration that are no class of the user's choice.
PARTS = ("trainer", "federation", "checkpoint")
FIT = f"""{COMMANDS["fit"]} The options that most runs set:

  --config digits.yaml               a configuration; several are merged in order
  --data.init_args.num_clients 20    number of clients over which the samples are split
  --federation.clients_per_round 10  number of clients sampled in each round
  --federation.aggregator FedAvgM    rule of the server; lightning-fl methods lists them
  --trainer.max_epochs 100           number of rounds
  --trainer.default_root_dir runs    folder of the runs
  --seed_everything 1                seed of the run
  --threads 1                        CPU threads; 1 is best for small models
  --vectorize auto                   clients train at once
  --ckpt_path last                   resume the newest run
"""


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keep the lines of a description."""


def one_cause(error: BaseException) -> str:
    r"""Return one line of an error and its causes: where it is, and the innermost cause.

    Example:
        >>> error = ValueError("key 'a':\n  none of two types\n  ...")
        >>> error.__cause__ = TypeError("is missing")
        >>> one_cause(error)
        "key 'a': is missing"
    """
    cause: BaseException | None = error
    lines = dict[str, None]()
    while cause is not None:
        if isinstance(cause, FederationError):
            return str(cause)
        lines[str(cause).partition("\n")[0]] = None
        cause = cause.__cause__
    *places, last = lines
    return " ".join([*(place for place in places if place.endswith(":")), last])


class Parser(LightningArgumentParser):
    """Lightning's parser, with a shorter help, and errors of one cause."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with one line: the option, and the innermost cause."""
        if not self.exit_on_error:  # of a class, which another type of an option may accept
            super().error(message, ex)
        if ex is None or ex.__cause__ is None:
            fail(f"{message}; usage: {self.usage}")
        fail(one_cause(ex))

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """Return the help: only that of ``fit`` has the options of a configuration."""
        for action in self._actions:
            if not self.prog.endswith("fit") and action.dest not in OF_ALL:
                action.help = SUPPRESS
        return super().format_help(formatter)

    def _check_value_key(self, action: Any, value: Any, key: str, *args: Any, **more: Any) -> Any:
        """Check a value of a file, or of the arguments of a class."""
        try:
            return super()._check_value_key(action, value, key, *args, **more)
        except (TypeError, ValueError):
            refuse_class(action, value, key)
            raise


#: Help of options that have another meaning here than in Python.
HELP = {
    "ckpt_path": "Path of a checkpoint, or last: the checkpoint of the newest run. A fit resumes"
    " from it; the other commands take last by default.",
    "weights_only": "Whether checkpoints are read as data. A checkpoint that contains other objects"
    " requires false: set it for files that you trust only, because they can run code.",
    "trainer.default_root_dir": "Folder of the runs. Each fit has a new folder version_N in it.",
    "checkpoint.dirpath": "Folder of the checkpoint; null uses the folder of the run.",
}


#: Options in the help of the commands other than ``fit``.
OF_ALL = ("help", "config", "print_config", "threads", "ckpt_path", "weights_only", "subcommand")


#: Options of all parsers; ``prog`` also with ``python -m lightning_fl``.
#:
#: :meta hide-value:
PARSER = {"prog": "lightning-fl", "formatter_class": _Formatter, "allow_abbrev": False}


def describe(parser: LightningArgumentParser, command: str) -> None:
    """Set the texts of the help of a command."""
    parser.usage = f"lightning-fl {command} --config FILE [options]"
    parser.description = FIT if command == "fit" else f"{COMMANDS[command]} {WITH_FIT}"
    for action in parser._actions:
        action.help = HELP.get(action.dest, action.help)
    named: Any = parser.groups
    groups: Any = parser._action_groups
    groups.sort(key=lambda group: group is not named["federation"])


def check_words(parser: LightningArgumentParser | None, words: Sequence[str]) -> None:
    """Check the files of the configurations of a command, and the names of its options and classes.

    The last name of an option alone is no option.

    Args:
        parser: Parser of the command; None if there is no such command.
        words: The command and its arguments.
    """
    for path in (word.rpartition("=")[2] for word in words):
        if path.endswith((".yaml", ".yml")) and os.path.isfile(path):
            check_file(path)
    if parser is None:
        return
    actions = {option: action for action in parser._actions for option in action.option_strings}
    for word, next_word in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if word.startswith("--") and "." not in name and name not in actions:
            whole = [option for option in actions if option.endswith(f".{name[2:]}")]
            whole = whole or ["its whole name, such as --federation.policy.init_args.lr"]
            raise FederationError(f"{name} is not an option: use {' or '.join(whole)}")
        refuse_class(actions.get(name.removesuffix("+")), value or next_word, name[2:])


def check_file(path: str) -> None:
    """Check that a file of a configuration is YAML with options.

    Raises:
        FederationError: If it is not, or if a key stands twice, of which YAML would keep the last.
    """
    with error_context(f"config {path} cannot be read", ValueError, yaml.YAMLError, RecursionError):
        if yaml.load(read_text(path), _UniqueKeys) is None:
            raise FederationError("it is empty")


def class_names(kind: Any) -> set[str]:
    """Return the names of the classes of which an option of a type takes objects."""
    if isinstance(kind, type) and issubclass(kind, os.PathLike):
        return set()  # a text is the path itself
    if isinstance(kind, type) and kind.__module__ != "builtins":
        return {kind.__name__}.union(*map(class_names, kind.__subclasses__()))
    kinds = get_args(kind)  # a text is no class where the option takes texts
    return set[str]().union(*map(class_names, () if str in kinds else kinds))


def refuse_class(action: Any, value: Any, key: str) -> None:
    """Raise an error if an option has a class that does not exist, or that is written in Python."""
    known = sorted(n for n in class_names(getattr(action, "_typehint", None)) if n[0] != "_")
    for part in value if isinstance(value, list) else [value]:
        name = part.get("class_path") if isinstance(part, dict) else part
        found = isinstance(name, str) and re.fullmatch(r"([A-Z]\w*)(\(.*\))?", name)
        if not known or not found or name in known:
            continue
        (nearest,) = get_close_matches(found[1], known, n=1, cutoff=0)
        why = f"{name} is Python: write {{class_path: {nearest}, init_args: {{...}}}}"
        if not found[2]:
            why = f"there is no class {name}\nThe nearest name is {nearest}; a class of yours"
            why += f" needs its module, such as my_module.{name}"
        raise FederationError(f"{key}: {why}")


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            line = node.start_mark.line + 1
            raise FederationError(f"duplicate key {max(keys, key=keys.count)} below line {line}")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found
