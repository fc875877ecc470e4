"""``lightning-fl fit|validate|test|predict --config X``, ``report``, ``partition``, ``export``."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import sys
import warnings
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, NoReturn, TypeVar, get_type_hints

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

# Every class that a config may name by its short name has to be imported.
import lightning_fl.aggregators
import lightning_fl.datamodules
import lightning_fl.models
import lightning_fl.objectives
import lightning_fl.optimizers
import lightning_fl.partition
import lightning_fl.policies
import lightning_fl.samplers
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint, RoundProgress, RunReport
from lightning_fl.callbacks.checkpoint import read_checkpoint
from lightning_fl.callbacks.config import RunConfig
from lightning_fl.callbacks.report import write_partition
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.files import read_text, write_atomically
from lightning_fl.integrations.config import ELSEWHERE, TRAINING, Configuration
from lightning_fl.integrations.export import write_flower_app
from lightning_fl.partition import summary
from lightning_fl.report import LogFiles, report
from lightning_fl.report.run import TEST_FORMAT, differing_options, values_of
from lightning_fl.runners import VectorizedClients
from lightning_fl.types import FederationError


class Parser(LightningArgumentParser):
    """Lightning's parser with short error messages and suggestions."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the usage and a short error message with a suggestion, and exit."""
        if not self.exit_on_error:  # parser of a nested class
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        program = parser.prog.replace(" [options]", "")
        command = program if " " in program else f"{program} fit|validate|test|predict"
        sys.stderr.write(f"usage: {command} --config FILE [--option=VALUE ...]\n")
        sys.stderr.write(f"       {program} --help lists all options\n")
        sys.stderr.write(f"lightning-fl: error: {explain(message, options)}\n")
        self.exit(2)


def explain(message: str, options: Sequence[str] = ()) -> str:
    """Return a short version of a jsonargparse error message, with a suggestion if possible.

    Args:
        message: Error message of jsonargparse.
        options: Existing flags.

    Example:
        >>> explain("unrecognized arguments: --trainer.max_epoch=3", ["--trainer.max_epochs"])
        'unknown option --trainer.max_epoch: did you mean --trainer.max_epochs?'
    """
    if found := re.search(r"unrecognized arguments: ([^\s=]+)", message):
        return f"unknown option {found[1]}{did_you_mean(found[1], options)}"
    if found := re.search(r"does not accept option '([^']+)'", message):
        names = [option.removeprefix("--") for option in options]
        return f"unknown option {found[1]}{did_you_mean(found[1], names)}"
    key = ".".join(re.findall(r'[Kk]ey "([^"]+)"', message))
    if found := re.search(r"Option '([^']+)' is not accepted", message):
        owner = re.findall(r"class_path '([^']+)'", message[: found.start()])[-1]
        names = list(inspect.signature(locate(owner)).parameters)  # type: ignore[arg-type]
        similar = did_you_mean(found[1], names) or f": it has {', '.join(names)}"
        return f"{key}: {owner.rpartition('.')[2]} has no option {found[1]}{similar}"
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        names = known_names(message)
        known = f"\nKnown names: {', '.join(names)}" * bool(names)
        return f"{key}: unknown class {found[1]}{did_you_mean(found[1], names)}{known}"
    reason = r"(module '[^']+' has no attribute '[^']+'|No module named '[^']+')"
    if found := re.search(rf"Problem with given class_path '([^']+)':\s+{reason}", message):
        module, _, name = found[1].rpartition(".")
        owner = locate(module)
        similar = did_you_mean(name, [] if owner is None else dir(owner))
        return f"{key}: unknown class {found[1]}: {found[2]}{similar}"
    inner = message[message.rfind('arser key "') :]
    types = [in_words(found) for found in re.findall(r"Expected an? (.+)", inner)]
    nested = re.search(r"NestedArg\(key='([^']+)'", message)
    if nested and not key.endswith(nested[1].rpartition(".")[2]):
        key = f"{key}.{nested[1]}"
    if types and (value := re.search(r"Given value: (.*)", inner)):
        if "a number" in types:
            types = [kind for kind in types if kind != "a whole number"]
        return f"{key} must be {' or '.join(dict.fromkeys(types))}, got {value[1]!r:.200}"
    names = known_names(message)
    text = " ".join(message.split())
    short = text if len(text) <= 400 else f"{text[:300]} ... {text[-90:]}"
    return short + f"\nKnown names: {', '.join(names)}" * bool(names)


def in_words(kind: str) -> str:
    """Return the description of a type in jsonargparse's messages.

    Example:
        >>> in_words("<class 'int'>"), in_words("typing.Literal['mean', 'sum']")
        ('a whole number', "one of 'mean', 'sum'")
    """
    name = kind.removeprefix("<class '").removesuffix("'>")
    if found := re.fullmatch(r"typing\.Literal\[(.*)\]", name):
        return f"one of {found[1]}"
    words = {"int": "a whole number", "float": "a number", "NoneType": "null", "str": "a text"}
    return {**words, "bool": "true or false"}.get(name, name.rpartition(".")[2])


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a suggestion for an unknown name; empty if no known name is similar.

    Example:
        >>> did_you_mean("Dirichlett", ["Dirichlet", "IID"]), did_you_mean("x", [])
        (': did you mean Dirichlet?', '')
    """
    similar = get_close_matches(name, names, n=1, cutoff=0.7)
    return f": did you mean {similar[0]}?" if similar else ""


def known_names(message: str) -> list[str]:
    """Return the class names that an option accepts, from a jsonargparse error message."""
    head, unknown, _ = message.partition("Expected a dot import path string")
    owner, _, option = head.rpartition('Parser key "')
    key, _, types = option.partition('"')
    if unknown and "Subtypes" not in types:  # a single type, which is not part of the message
        owner = owner.rpartition("class_path '")[2].partition("'")[0]
        with suppress(NameError, TypeError):  # annotations that cannot be read
            types = str(get_type_hints(getattr(locate(owner), "__init__", None)).get(key))
    # Without classes of torch: there are hundreds of networks.
    found = [locate(name) for name in re.findall(r"\blightning[\w.]+", types) if unknown]
    classes = [c for c in found if isinstance(c, type)]
    for c in classes:
        classes += c.__subclasses__()
    return sorted(
        {c.__name__ for c in classes if not inspect.isabstract(c) and c.__name__[0] != "_"}
    )


#: File in the folder of a run that identifies its SLURM job.
JOB = "slurm.json"


class JobNote(Callback):
    """Write the SLURM job of a run to its folder, where a requeued job finds it.

    Args:
        path: Path of the file.
        job: Identification of the job.
    """

    def __init__(self, path: Path, job: Mapping[str, Any]) -> None:
        self.path, self.job = path, job

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file after all processes have chosen the folder."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            write_atomically(self.path, json.dumps(self.job))


_CLI = TypeVar("_CLI", bound=LightningCLI)


class FederatedCLI(LightningCLI):
    """LightningCLI with a ``FederatedLoop``, a checkpoint and one folder per run.

    A new fit creates the next free folder ``version_N`` under ``trainer.default_root_dir``. ``fit
    --ckpt_path last`` resumes the newest run, and the other commands load its checkpoint. A
    requeued SLURM job resumes in the folder of its first start.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys ``federation`` and ``checkpoint``, and the options of this CLI."""
        parser.add_lightning_class_args(FederatedLoop, "federation")
        parser.add_lightning_class_args(RoundCheckpoint, "checkpoint")
        parser.set_defaults({"trainer.default_root_dir": "runs"})
        parser.add_argument(
            "--vectorize",
            type=PositiveInt | Literal["auto"] | dict[str, int | bool | Literal["auto"]] | None,
            default=None,
            help="Number of clients that train at once, or auto; null trains clients one after"
            " another. Further options of VectorizedClients: --vectorize.compile=true, or"
            " {group_size: 10, compile: true}.",
        )
        parser.add_argument(
            "--threads",
            type=PositiveInt | None,
            default=None,
            help="Number of CPU threads of PyTorch; null uses PyTorch's default, one per core."
            " Small models train fastest with 1, especially on a busy machine.",
        )

    def instantiate_classes(self) -> None:
        """Wrap the model in ``VectorizedClients`` if ``--vectorize`` is set."""
        super().instantiate_classes()
        if self.subcommand == "fit" and (given := self.config_init.fit.vectorize) is not None:
            options = given if isinstance(given, dict) else {"group_size": given}
            parameters = inspect.signature(VectorizedClients).parameters
            known = [name for name in parameters if name != "module"]
            if unknown := sorted(set(options) - set(known)):
                raise FederationError(
                    f"unknown option {unknown[0]!r} of vectorize: choose from {known}"
                )
            self.model = VectorizedClients(self.model, **options)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments and check the seeds, which numpy would reject later."""
        self.words = sys.argv[1:] if args is None else args
        super().parse_arguments(parser, args)
        for key in ("seed_everything", "federation.seed", "data.init_args.seed"):
            seed = self.config[self.config.subcommand].get(key)
            if isinstance(seed, int) and not 0 <= seed < 2**32:
                raise FederationError(f"{key} must be from 0 to {2**32 - 1}, got {seed}")

    def before_instantiate_classes(self) -> None:
        """Set the number of threads."""
        if (threads := self.config[self.subcommand].threads) is not None:
            torch.set_num_threads(threads)

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        # Only for --help: main runs these without a Trainer.
        for name, own in (
            ("report", report_parser()),
            ("partition", partition_parser()),
            ("export", export_parser()),
        ):
            parser._subcommands_action.add_subcommand(  # type: ignore[union-attr]  # just added
                name, own, help=own.description
            )

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        # Do not execute code in checkpoints, and do not test random parameters.
        parser.set_defaults({"weights_only": True})
        if subcommand != "fit":
            parser.set_defaults({"ckpt_path": "last"})
        return parser

    def _parse_ckpt_path(self) -> None:
        """Choose the folder of the run, and resolve ``last`` to a checkpoint."""
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        root = Path(config.trainer.default_root_dir).absolute()
        runs = sorted(
            (p for p in root.glob("version_*") if p.name.removeprefix("version_").isdigit()),
            key=lambda p: int(p.name.removeprefix("version_")),
        )
        self.run_folder = runs[-1] if runs else root / "version_0"
        self.is_requeued = False
        if subcommand == "fit" and (requeued := self._requeued(runs)) is not None:
            self.run_folder, self.is_requeued = requeued, True
            if config.ckpt_path is None or self._newest(config) is not None:
                config.ckpt_path = "last"  # newer than the checkpoint of the command line
        if config.ckpt_path == "last":
            last = self.run_folder / f"{config.checkpoint.filename}.ckpt"
            if (newest := self._newest(config)) is not None:
                config.ckpt_path = str(newest)
            elif subcommand == "fit":
                config.ckpt_path = None  # no checkpoint was written yet
            else:
                raise FederationError(
                    f"{subcommand} found no checkpoint {last}: run fit first, or set --ckpt_path"
                    " to a file"
                )
        elif config.ckpt_path is not None and not Path(config.ckpt_path).is_file():
            raise FederationError(
                f"checkpoint {config.ckpt_path} does not exist: set --ckpt_path to a file or last"
            )
        elif config.ckpt_path is not None and Path(config.ckpt_path).absolute().parent in runs:
            self.run_folder = Path(config.ckpt_path).absolute().parent
        elif subcommand == "fit" and not config.trainer.fast_dev_run:
            self.run_folder = root / f"version_{int(runs[-1].name[8:]) + 1 if runs else 0}"
        if (path := config.ckpt_path) is not None and config.weights_only is not False:
            read_checkpoint(  # memory-mapped: tensors are not read
                path,
                lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True),
                in_full=False,
            )
        # Unlike Lightning, do not let hyperparameters of a checkpoint choose classes.

    def _newest(self, config: Any) -> Path | None:
        """Return the newest checkpoint of the run, including those written on SLURM signals."""
        folder = Path(config.checkpoint.dirpath or self.run_folder)
        found = [folder / f"{config.checkpoint.filename}.ckpt"]
        found += self.run_folder.glob("hpc_ckpt_*.ckpt")
        return max(filter(Path.is_file, found), key=lambda p: p.stat().st_mtime, default=None)

    def _requeued(self, runs: Sequence[Path]) -> Path | None:
        """Return the folder of the run if SLURM has requeued this job, else None."""
        if os.environ.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
            return None
        for run in reversed(runs):
            with suppress(OSError, ValueError):
                if json.loads(read_text(run / JOB)) == self._job():
                    return run
        return None

    def _job(self) -> dict[str, Any]:
        """Return the identification of the job, which does not change when it is requeued."""
        words = self.words if isinstance(self.words, list) else [str(self.words)]
        return {"job": os.environ.get("SLURM_JOB_ID"), "command": list(map(str, words))}

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Configure the output folder, the callbacks and the loggers of the Trainer."""
        config = self._get(self.config_init, "trainer")
        callbacks = list(config.callbacks or [])
        loop, checkpoint = (self._get(self.config_init, k) for k in ("federation", "checkpoint"))
        if loop.csv_name is not None:
            loop.csv_name = str(self.run_folder / loop.csv_name)
        if checkpoint.dirpath is None:
            checkpoint.dirpath = str(self.run_folder)
        if self.subcommand == "fit" and config.enable_progress_bar is not False:
            callbacks.append(RoundProgress())
        if self.subcommand == "fit" and "SLURM_JOB_ID" in os.environ:
            callbacks.append(JobNote(self.run_folder / JOB, self._job()))
        # Also without training: Lightning warns if a callback of the checkpoint is missing.
        if not any(isinstance(callback, RunReport) for callback in callbacks):
            before = [i for i, c in enumerate(callbacks) if isinstance(c, LogFiles)]
            callbacks.insert(min(before, default=len(callbacks)), RunReport())
        if self.subcommand == "fit" and not any(isinstance(c, LogFiles) for c in callbacks):
            callbacks.append(LogFiles())
        if self.subcommand == "fit" and not config.fast_dev_run:
            resumed = self._get(self.config, "ckpt_path") is not None
            callbacks.append(RunConfig(self._config_text(), self.run_folder, resumed))
        if config.logger in (None, True):
            kwargs["logger"] = self._loggers() if self.subcommand == "fit" else False
        return super().instantiate_trainer(
            callbacks=callbacks, default_root_dir=str(self.run_folder), **kwargs
        )

    def _config_text(self) -> str:
        """Return the configuration as YAML, with which the command can be repeated."""
        config = self.config[self.subcommand].clone()
        for name in ("config", "ckpt_path"):
            if config.get(name) is None:  # ckpt_path: null would test random parameters
                config.pop(name, None)
        text: str = self._parser(self.subcommand).dump(
            config, skip_none=False, skip_validation=True
        )
        return text

    def _loggers(self) -> list[Logger]:
        # CSVLogger deletes existing files in its folder, so a resumed run uses a new folder.
        loggers: list[Logger] = [CSVLogger(self.run_folder, name="csv")]
        if find_spec("tensorboard"):
            loggers.insert(0, TensorBoardLogger(self.run_folder, name="", version=""))
        return loggers

    def fit(self, **kwargs: Any) -> None:
        """Fit and print the folder of the run, which is removed if the fit fails at its start."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.fit(**kwargs)
            return
        if self.is_requeued and self.trainer.is_global_zero:
            job, count = os.environ["SLURM_JOB_ID"], os.environ["SLURM_RESTART_COUNT"]
            print(
                f"SLURM job {job}, restart {count}: resuming the run in {_short(self.run_folder)}"
            )
        if (path := kwargs.get("ckpt_path")) and self.trainer.is_global_zero:
            print(f"Resuming from {_short(Path(path))}")
        # Not created here: other processes still have to find the next free folder.
        is_new = not self.run_folder.exists()
        try:
            self.trainer.fit(**kwargs)
        except Exception:
            if is_new and self.trainer.global_step == 0 and self.trainer.is_global_zero:
                shutil.rmtree(self.run_folder, ignore_errors=True)
            raise
        except SystemExit as end:  # Lightning exits with code 1 after an interruption
            if type(end) is not SystemExit or not self.trainer.interrupted:
                raise  # SIGTERMException has a different exit code
            if self.trainer.is_global_zero:
                checkpoint = self._get(self.config_init, "checkpoint")
                last = Path(checkpoint.dirpath, f"{checkpoint.filename}.ckpt")
                remedy = "resume with --ckpt_path last"
                if not last.is_file():
                    remedy = "there is no checkpoint yet, start a new fit"
                sys.stderr.write(f"\ninterrupted; {remedy}\n")
            raise SystemExit(INTERRUPTED) from end
        if self.trainer.is_global_zero:
            print(f"Written to {_short(self.run_folder)}")

    def test(self, **kwargs: Any) -> None:
        """Test and write the metrics to ``test.json`` beside the checkpoint.

        The file also contains the name of the checkpoint and the options that differ from the fit.
        """
        metrics = self.trainer.test(**kwargs)
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        used = kwargs.get("ckpt_path")
        folder = Path(used).absolute().parent if used else self.run_folder
        tested = values_of(yaml.safe_load(self._config_text()))
        try:
            fitted = values_of(yaml.safe_load((folder / "config.yaml").read_text()))
        except (OSError, ValueError, AttributeError, yaml.YAMLError):
            fitted = None  # the fit was run from Python
        differing = {} if fitted is None else differing_options(fitted, tested)
        if differing:
            changes = "; ".join(f"{k} is {t!r}, was {f!r}" for k, (f, t) in differing.items())
            rank_zero_warn(f"options of the test differ from the fit: {changes:.1000}")
        found = {
            "format": TEST_FORMAT,
            "checkpoint": Path(used).name if used else None,
            "metrics": {name: value for each in metrics for name, value in each.items()},
            "seed": self._get(self.config, "seed_everything"),
            "differing options": differing,
        }
        write_atomically(folder / "test.json", json.dumps(found, indent=2, default=str) + "\n")
        print(f"Written to {_short(folder / 'test.json')}")

    def predict(self, **kwargs: Any) -> None:
        """Predict the test samples and write the outputs of the module, one tensor per batch."""
        if self.trainer.world_size > 1:
            raise FederationError(
                "predict supports one process, because it writes one file, got"
                f" {self.trainer.world_size} processes: set --trainer.devices=1"
            )
        predictions = self.trainer.predict(**kwargs)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            # The checkpoint need not belong to the newest run.
            used = kwargs.get("ckpt_path")
            folder = Path(used).absolute().parent if used else self.run_folder
            write_atomically(folder / "predictions.pt", partial(torch.save, predictions))
            print(f"Written to {_short(folder / 'predictions.pt')}")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


#: Exit code after an interruption (128 + SIGINT), as in a shell.
INTERRUPTED = 130
#: Configs shipped with the package.
CONFIGS = Path(__file__).parent / "configs"


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Resolve ``--config digits.yaml`` to the config shipped with the package.

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
    )
    parser.add_argument(
        "runs",
        nargs="+",
        help="Folders of runs (runs/digits/version_0), or folders that contain runs (runs/digits).",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        help="Path of the report, an .html file; null writes report.html to the folder of the run,"
        " or to the current folder if there are several runs.",
    )
    parser.add_argument(
        "--title", type=str | None, help="Title of the report; null uses the names of the runs."
    )
    return parser


def partition_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl partition``, without the options of the data module."""
    parser = ArgumentParser(
        prog="lightning-fl partition",
        description="Split the data of a configuration over clients without training, and show"
        " sizes, classes and drift.",
    )
    parser.add_argument("config", help="A configuration of lightning-fl fit.")
    parser.add_argument(
        "--output",
        type=str,
        default=".",
        help="Folder of partition.json and partition.png. Further options change the configuration,"
        " such as --data.init_args.num_clients=20.",
    )
    return parser


def export_parser() -> ArgumentParser:
    """Return the parser of ``lightning-fl export``."""
    parser = ArgumentParser(
        prog="lightning-fl export",
        description="Write an app from a configuration, which runs the same federation on the"
        " machines of a deployment.",
    )
    parser.add_argument("target", choices=["flower"], help="What runs the app.")
    parser.add_argument("config", help="A configuration of lightning-fl fit.")
    parser.add_argument(
        "--output",
        type=str,
        default="app",
        help="Folder of the app, which must not exist. Further options change the configuration,"
        " such as --trainer.max_epochs=20.",
    )
    return parser


def export_words(words: Sequence[str]) -> tuple[Any, list[str]]:
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


def _split_words(words: Sequence[str], output: str, *names: str) -> tuple[Any, list[str]]:
    """Return ``--output`` and the arguments with these names, and all others."""
    parser = PlainParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, nargs="?")
    parser.add_argument("--output", default=output)
    return parser.parse_known_args(words)


class PartitionCLI(FederatedCLI):
    """Split the data of a configuration: neither a module nor a Trainer is made.

    Args:
        output: Folder of the files.
        options: Arguments of :class:`FederatedCLI`.
    """

    def __init__(self, *args: Any, output: str, **options: Any) -> None:
        self.output = output
        super().__init__(*args, **options)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: there is no checkpoint."""

    def instantiate_classes(self) -> None:
        """Instantiate only the data module."""
        chosen = Namespace(data=self.config.fit.data)  # type: ignore[no-untyped-call]
        self.datamodule = self._parser("fit").instantiate_classes(chosen).data

    def after_instantiate_classes(self) -> None:
        """Do nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        data = self.datamodule
        data.prepare_data()
        data.setup("fit")
        print(summary(data.num_samples.tolist(), data.class_counts, data.client_names))
        for path in write_partition(Path(self.output), data):
            print(f"Written to {_short(path.absolute())}")


def with_notes(error: BaseException) -> str:
    """Return the message of an error with its notes, which give the round and the clients.

    Example:
        >>> error = ValueError("wrong")
        >>> error.add_note("in round 2, client 7")
        >>> print(with_notes(error))
        wrong
        in round 2, client 7
    """
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    r"""Format a warning for the command line, without the line of code.

    Example:
        >>> show_warning("2 of 10 updates", UserWarning, "file.py", 3)
        'lightning-fl: warning: 2 of 10 updates\n'
    """
    kind = "warning" if issubclass(category, UserWarning) else category.__name__
    return f"lightning-fl: {kind}: {message}\n"


def start(cli: Callable[..., _CLI], args: ArgsType = None) -> _CLI:
    """Run a command line with the options of this package.

    Args:
        cli: Class of the command line.
        args: Arguments; None takes those of the process.
    """
    return cli(
        LightningModule,
        FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_callback=None,  # RunConfig writes it
        parser_class=Parser,
        # Modules configure their optimizer, which flags of the CLI would replace.
        auto_configure_optimizers=False,
        # Treat a prefix of an option as an error, not as an abbreviation.
        parser_kwargs={
            "description": "Federated learning with the Lightning Trainer.",
            "allow_abbrev": False,
        },
        args=args,
    )


class _PartsCLI(FederatedCLI):
    """Instantiate the parts of a configuration, and nothing that trains."""

    parts: Configuration

    def _parse_ckpt_path(self) -> None:
        """Do nothing: there is no checkpoint."""

    def instantiate_classes(self) -> None:
        """Instantiate the module, the data module and the loop."""
        config = self.config.fit
        names = ("data", "model", "federation")
        chosen = Namespace(**{name: config[name] for name in names})  # type: ignore[no-untyped-call]
        found = self._parser("fit").instantiate_classes(chosen)
        if (num_rounds := config.trainer.max_epochs or -1) < 0:
            raise FederationError(
                "the configuration has no number of rounds: set trainer.max_epochs"
            )
        usual = self._parser("fit").get_defaults().trainer
        callbacks = [each.class_path.rpartition(".")[2] for each in config.trainer.callbacks or ()]
        own = [
            f"trainer.{name}"
            for name, value in config.trainer.items()
            if name not in TRAINING + ELSEWHERE and value != usual[name]
        ]
        trainer = {name: config.trainer[name] for name in TRAINING}
        self.parts = Configuration(
            found.model,
            found.data,
            found.federation,
            trainer,
            num_rounds,
            self._config_text(),
            (*callbacks, *own, *["vectorize"] * (config.vectorize is not None)),
        )

    def after_instantiate_classes(self) -> None:
        """Do nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""


def read_config(path: str | Path, *more: str) -> Configuration:
    """Return what a configuration of ``lightning-fl fit`` describes, without a Trainer.

    Args:
        path: The file, or the name of a configuration that comes with the package.
        more: Further arguments of ``lightning-fl fit``, which change the configuration.

    Raises:
        FederationError: If the number of rounds is unlimited.

    Example:
        >>> found = read_config("digits.yaml")
        >>> found.num_rounds, type(found.loop.options.aggregator).__name__
        (60, 'FedAvg')
    """
    words, sys.argv = sys.argv, sys.argv[:1]  # Lightning warns where both have arguments
    try:
        words_of_fit = with_shipped_configs(["fit", "--config", str(path), *more])
        return start(_PartsCLI, words_of_fit).parts
    finally:
        sys.argv = words


def main(args: ArgsType = None) -> None:
    """Run the command line. Configuration errors print a message without a traceback."""
    if args is None:
        sys.argv[1:] = with_shipped_configs(sys.argv[1:])
    elif isinstance(args, list):
        args = with_shipped_configs(args)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.formatwarning = show_warning
    # Raised by Lightning with torch 2.14.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")
    words = sys.argv[1:] if args is None else args
    try:
        if isinstance(words, list) and words[:1] == ["report"]:
            asked = report_parser().parse_args(words[1:])
            print(f"Written to {_short(report(asked.runs, asked.output, asked.title))}")
            return
        if isinstance(words, list) and words[:1] == ["export"]:
            app, rest = export_words(words[1:])
            found = read_config(app.config, *rest)
            for path in write_flower_app(found, Path(app.config), app.output):
                print(f"Written to {_short(path.absolute())}")
            if found.left_out:
                print(f"The app leaves out: {', '.join(found.left_out)}")
            print(f"It waits for {len(found.data.num_samples)} SuperNodes: see its README.md")
            return
        cli: Callable[..., FederatedCLI] = FederatedCLI
        if isinstance(words, list) and words[:1] == ["partition"]:
            output, words = partition_words(words[1:])
            cli, words = partial(PartitionCLI, output=output), with_shipped_configs(words)
            if args is None:
                sys.argv[1:] = words
            else:
                args = words
        start(cli, args)
    except KeyboardInterrupt:  # outside of the Trainer, which handles interruptions itself
        sys.stderr.write("\ninterrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except MisconfigurationException as error:
        message = with_notes(error)
    except ValueError as error:
        message = with_notes(error)
        if "Union subtypes" not in message:  # jsonargparse wraps errors of a constructor
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
