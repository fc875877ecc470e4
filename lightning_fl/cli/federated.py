"""``lightning-fl fit|validate|test|predict --config X``."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

# Every class that a config may name by its short name has to be imported.
import lightning_fl.aggregators
import lightning_fl.datamodules
import lightning_fl.models
import lightning_fl.objectives
import lightning_fl.optimizers
import lightning_fl.partition
import lightning_fl.policies
import lightning_fl.samplers  # noqa: F401
from lightning_fl.callbacks import (
    FederatedLoop,
    LayerSummary,
    RoundCheckpoint,
    RoundProgress,
    RunReport,
)
from lightning_fl.callbacks.checkpoint import read_checkpoint
from lightning_fl.callbacks.config import RunConfig
from lightning_fl.cli import INTERRUPTED, TERMINATED
from lightning_fl.cli.arguments import short_path
from lightning_fl.cli.config_files import check_configs
from lightning_fl.cli.messages import explain
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.files import FolderLock, one_line, read_text, write_atomically
from lightning_fl.report import LogFiles
from lightning_fl.report.run import (
    IGNORED_BY_TEST,
    TABLE,
    TEST_FORMAT,
    config_values,
    differing_options,
    values_of,
    version_folders,
)
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


#: File in the folder of a run that identifies its SLURM job.
JOB = "slurm.json"

#: Help of options that have another meaning here than in Python.
HELP = {
    "ckpt_path": "Path of a checkpoint, or last: the checkpoint of the newest run. A fit resumes"
    " from it.",
    "weights_only": "Whether checkpoints are read as data. A checkpoint that contains other objects"
    " requires false: set it for files that you trust only, because they can run code.",
    "trainer.default_root_dir": "Folder of the runs. Each fit has a new folder version_N in it.",
    "checkpoint.dirpath": "Folder of the checkpoint; null uses the folder of the run.",
}


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
    --ckpt_path last`` resumes the newest run, and the other commands load its checkpoint. With the
    ``config.yaml`` in the folder of a run, they take that run instead of the newest. A requeued
    SLURM job resumes in the folder of its first start.
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
        config = self.config[self.config.subcommand]
        if isinstance(callback := config.trainer.callbacks, Namespace):  # Lightning takes one, too
            config.trainer.callbacks = [callback]
        for key in ("seed_everything", "federation.seed", "data.init_args.seed"):
            seed = config.get(key)
            if isinstance(seed, int) and not 0 <= seed < 2**32:
                raise FederationError(f"{key} must be from 0 to {2**32 - 1}, got {seed}")

    def before_instantiate_classes(self) -> None:
        """Set the number of threads."""
        if (threads := self.config[self.subcommand].threads) is not None:
            torch.set_num_threads(threads)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        # Do not execute code in checkpoints, and do not test random parameters.
        parser.set_defaults({"weights_only": True})
        if subcommand != "fit":
            parser.set_defaults({"ckpt_path": "last"})
        for action in parser._actions:
            action.help = HELP.get(action.dest, action.help)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Choose the folder of the run, and resolve ``last`` to a checkpoint."""
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        root = Path(config.trainer.default_root_dir or ".").absolute()
        runs = version_folders(root)
        new = root / f"version_{int(runs[-1].name[8:]) + 1 if runs else 0}"
        self.run_folder = runs[-1] if runs else new
        self.is_requeued = False
        if subcommand == "fit" and (requeued := self._requeued(runs)) is not None:
            self.run_folder, self.is_requeued = requeued, True
            if config.ckpt_path is None or self._newest(config) is not None:
                config.ckpt_path = "last"  # newer than the checkpoint of the command line
        if config.ckpt_path == "last" and not self.is_requeued:
            self.run_folder = self._run_of_config(config) or self.run_folder
        if config.ckpt_path == "last":
            last = self.run_folder / f"{config.checkpoint.filename}.ckpt"
            if (newest := self._newest(config)) is not None:
                config.ckpt_path = str(newest)
            elif subcommand == "fit":
                config.ckpt_path = None  # no checkpoint was written yet
                if (self.run_folder / TABLE).exists() and not self.is_requeued:
                    self.run_folder = new  # keep the results of the other run
                    rank_zero_warn(f"there is no checkpoint {short_path(last)}: starting a new run")
            else:
                raise FederationError(
                    f"{subcommand} found no checkpoint {last}: run fit first, or set --ckpt_path"
                    " to a file"
                )
        elif config.ckpt_path is not None and not Path(config.ckpt_path).is_file():
            what = "is a folder" if Path(config.ckpt_path).is_dir() else "does not exist"
            raise FederationError(
                f"checkpoint {config.ckpt_path} {what}: set --ckpt_path to a file or last"
            )
        elif config.ckpt_path is not None and Path(config.ckpt_path).absolute().parent in runs:
            self.run_folder = Path(config.ckpt_path).absolute().parent
        elif subcommand == "fit" and not config.trainer.fast_dev_run:
            self.run_folder = new
        self.checkpoint_round: int | None = None
        if (path := config.ckpt_path) is not None and config.weights_only is not False:
            checkpoint = read_checkpoint(  # memory-mapped: tensors are not read
                path,
                lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True),
                in_full=False,
            )
            state = checkpoint.get("callbacks", {}).get(FederatedLoop.__qualname__, {})
            self.checkpoint_round = state.get("round")
        # Unlike Lightning, do not let hyperparameters of a checkpoint choose classes.

    def _run_of_config(self, config: Any) -> Path | None:
        """Return the folder of a run if its own ``config.yaml`` is a config of the command."""
        for path in reversed(config.get("config") or []):
            file = Path(path.absolute)
            if file.name == "config.yaml" and (file.parent / TABLE).is_file():
                return file.parent
        return None

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
        loop, checkpoint = (self._get(self.config_init, k) for k in ("federation", "checkpoint"))
        loop.table_name = str(self.run_folder / TABLE)
        if checkpoint.dirpath is None:
            checkpoint.dirpath = str(self.run_folder)
        if config.logger in (None, True):
            kwargs["logger"] = self._loggers() if self.subcommand == "fit" else False
        return super().instantiate_trainer(
            callbacks=self._callbacks(config), default_root_dir=str(self.run_folder), **kwargs
        )

    def _callbacks(self, config: Any) -> list[Callback]:
        """Return the callbacks of the configuration, and those that the command adds."""
        callbacks: list[Callback] = list(config.callbacks or [])

        def has(kind: type) -> bool:
            return any(isinstance(callback, kind) for callback in callbacks)

        if self.subcommand == "fit":
            if config.enable_progress_bar is not False:
                callbacks.append(RoundProgress())
            if config.enable_model_summary is not False and not has(ModelSummary):
                callbacks.append(LayerSummary())
            if "SLURM_JOB_ID" in os.environ:
                callbacks.append(JobNote(self.run_folder / JOB, self._job()))
        # Also without training: Lightning warns if a callback of the checkpoint is missing.
        if not has(RunReport):
            before = [i for i, c in enumerate(callbacks) if isinstance(c, LogFiles)]
            callbacks.insert(min(before, default=len(callbacks)), RunReport())
        if self.subcommand == "fit":
            if not has(LogFiles):
                callbacks.append(LogFiles())
            if not config.fast_dev_run:
                resumed = self._get(self.config, "ckpt_path") is not None
                callbacks.append(RunConfig(self._config_text(), self.run_folder, resumed))
        return callbacks

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
        """Fit and print the folder of the run; remove it if the fit fails before the first step."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.fit(**kwargs)
            return
        if self.is_requeued and self.trainer.is_global_zero:
            job, count = os.environ["SLURM_JOB_ID"], os.environ["SLURM_RESTART_COUNT"]
            place = short_path(self.run_folder)
            print(f"SLURM job {job}, restart {count}: resuming the run in {place}")
        if (path := kwargs.get("ckpt_path")) and self.trainer.is_global_zero:
            print(f"Resuming from {short_path(Path(path))}")
        # Not created here: other processes still have to find the next free folder.
        new = [p for p in (self.run_folder, *self.run_folder.parents) if not p.exists()]
        try:
            self.trainer.fit(**kwargs)
        except Exception:
            if new and self.trainer.global_step == 0 and self.trainer.is_global_zero:
                with suppress(FederationError, OSError):  # another run may have begun there
                    lock = FolderLock(self.run_folder)
                    shutil.rmtree(self.run_folder, ignore_errors=True)
                    lock.release()
                    for parent in new[1:]:
                        parent.rmdir()
            raise
        except SystemExit as end:  # of Lightning: code 1 after an interruption, 0 after SIGTERM
            is_terminated = isinstance(end, SIGTERMException)
            if not (is_terminated or (type(end) is SystemExit and self.trainer.interrupted)):
                raise
            if self.trainer.is_global_zero:
                checkpoint = self._get(self.config_init, "checkpoint")
                last = Path(checkpoint.dirpath, f"{checkpoint.filename}.ckpt")
                remedy = "resume with --ckpt_path last"
                if not last.is_file():
                    remedy = "there is no checkpoint yet, start a new fit"
                sys.stderr.write(f"\ninterrupted; {remedy}\n")
            raise SystemExit(TERMINATED if is_terminated else INTERRUPTED) from end
        if self.trainer.is_global_zero:
            done, rounds = self.checkpoint_round or 0, self.trainer.max_epochs or -1
            if done >= rounds > 0:
                more = f"increase --trainer.max_epochs ({rounds}) to continue"
                print(f"Nothing to train: the checkpoint is of round {done}; {more}")
            print(f"Written to {short_path(self.run_folder)}")

    def test(self, **kwargs: Any) -> None:
        """Test and write the metrics to ``test.json`` beside the checkpoint.

        The file also contains the name and the round of the checkpoint, and the options that differ
        from the fit.
        """
        metrics = self.trainer.test(**kwargs)
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        used = kwargs.get("ckpt_path")
        folder = Path(used).absolute().parent if used else self.run_folder
        differing = self._differing_options(folder)
        if differing:
            changes = "; ".join(f"{k} is {t!r}, was {f!r}" for k, (f, t) in differing.items())
            rank_zero_warn(f"options of the test differ from the fit: {changes:.1000}")
        found = {
            "format": TEST_FORMAT,
            "checkpoint": Path(used).name if used else None,
            "round": self.checkpoint_round,
            # JSON has no NaN.
            "metrics": {
                name: value if math.isfinite(value) else None
                for each in metrics
                for name, value in each.items()
            },
            "seed": self._get(self.config, "seed_everything"),
            "differing options": differing,
        }
        write_atomically(folder / "test.json", json.dumps(found, indent=2, default=str) + "\n")
        print(f"Written to {short_path(folder / 'test.json')}")

    def _differing_options(self, folder: Path) -> dict[str, tuple[Any, Any]]:
        """Return the options that differ between the fit in a folder and this command."""
        own = values_of(yaml.safe_load(self._config_text()))
        try:
            fitted = config_values(folder / "config.yaml")
            return differing_options(fitted, own, IGNORED_BY_TEST)
        except FileNotFoundError:
            pass  # the fit was run from Python
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            rank_zero_warn(
                f"the options of the test are not compared with those of the fit, because"
                f" {folder / 'config.yaml'} cannot be read: {one_line(error)}"
            )
        return {}

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
            print(f"Written to {short_path(folder / 'predictions.pt')}")


def start(cli: Callable[..., _CLI], args: ArgsType = None) -> _CLI:
    """Run a command line with the options of this package.

    Args:
        cli: Class of the command line.
        args: Arguments; None takes those of the process.

    Raises:
        FederationError: If a configuration does not exist or cannot be read.
    """
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list):
        check_configs(words)
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
            "prog": "lightning-fl",  # also with python -m lightning_fl
            "allow_abbrev": False,
        },
        args=args,
    )
