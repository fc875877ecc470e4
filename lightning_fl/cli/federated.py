"""``lightning-fl fit|validate|test|predict --config X``."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint, RoundProgress, RunReport
from lightning_fl.callbacks.config import RunConfig
from lightning_fl.cli import INTERRUPTED, NOT_TRAINED, TERMINATED, fail
from lightning_fl.cli.arguments import short_path, with_configs
from lightning_fl.cli.parser import PARSER, PARTS, Parser, check_words, describe, one_cause
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.errors import FederationError
from lightning_fl.federation.dropped import is_unusable
from lightning_fl.files import error_context, write_atomically
from lightning_fl.report import LogFiles
from lightning_fl.report.run import TABLE, TEST_FORMAT, changes_of_test, version_folders
from lightning_fl.runners import VectorizedClients
from lightning_fl.strategies import ClientParallelStrategy

_CLI = TypeVar("_CLI", bound=LightningCLI)
#: Print from one process only.
_say = rank_zero_only(print)
#: Environment variable with the folder of a fit, for the processes that it launches. The
#: number of the launching process is appended, since its other children inherit the variable.
RUN_FOLDER = "LIGHTNING_FL_RUN_FOLDER"


def create_folder(root: Path) -> tuple[Path, bool]:
    """Create the next free folder of a run, and return it.

    Fits that start at the same time get different folders. A process that Lightning has launched
    takes the folder of the first process. Processes that were launched otherwise, by torchrun or
    SLURM, all choose the next free folder, which the first of them creates later.

    Args:
        root: Folder of the runs.

    Returns:
        The folder, and whether it was created.
    """
    is_launched = "LOCAL_RANK" in os.environ
    if is_launched and (given := os.environ.get(f"{RUN_FOLDER}_{os.getppid()}")):
        return Path(given), False
    runs = version_folders(root)
    folder = root / f"version_{int(runs[-1].name[8:]) + 1 if runs else 0}"
    if is_launched or int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return folder, False
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return create_folder(root)  # another fit was faster
    os.environ[f"{RUN_FOLDER}_{os.getpid()}"] = str(folder)
    return folder, True


class FederatedCLI(LightningCLI):
    """LightningCLI with a ``FederatedLoop``, a checkpoint and one folder per run.

    A new fit creates the next free folder ``version_N`` under ``trainer.default_root_dir``. ``fit
    --ckpt_path last`` resumes the newest run, and the other commands load its checkpoint. With the
    ``config.yaml`` in the folder of a run, they take that run instead of the newest. A fit from the
    checkpoint of none of these runs is a new one.
    """

    run_folder: Path
    _has_run, _has_created = False, False

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys ``federation`` and ``checkpoint``, and the options of this CLI."""
        parser.add_lightning_class_args(FederatedLoop, "federation")
        parser.add_lightning_class_args(RoundCheckpoint, "checkpoint")
        parser.set_defaults({"trainer.default_root_dir": "runs"})
        parser.add_argument(
            "--vectorize",
            type=PositiveInt
            | Literal["auto", "on_gpu"]
            | dict[str, int | bool | Literal["auto"]]
            | None,
            default="on_gpu",
            help="Number of clients that train at once, or auto; null trains clients one after"
            " another; on_gpu is auto on a GPU, and null on a CPU and with ddp. Further options"
            " of VectorizedClients: --vectorize.compile=true, or {group_size: 10, compile: true}.",
        )
        parser.add_argument(
            "--threads",
            type=PositiveInt | None,
            default=None,
            help="Number of CPU threads of PyTorch; null uses PyTorch's default, one per core."
            " Small models train fastest with 1, especially on a busy machine.",
        )

    def instantiate_classes(self) -> None:
        """Create the folder of a new fit, and wrap the model if clients train at once."""
        is_fit = self.subcommand == "fit"
        if is_fit and not self._has_run and not self.config.fit.trainer.fast_dev_run:
            self.run_folder, self._has_created = create_folder(self.run_folder.parent)
        with self._leaving_nothing():
            super().instantiate_classes()
            if is_fit:
                self._vectorize(self.config_init.fit.vectorize)

    def _vectorize(self, given: Any) -> None:
        """Wrap the model if clients train at once."""
        if given == "on_gpu":
            strategy = self.trainer.strategy
            shares = isinstance(strategy, DDPStrategy)  # the samples of each client
            shares = shares and not isinstance(strategy, ClientParallelStrategy)
            is_wrapped = isinstance(self.model, VectorizedClients)
            given = None
            if strategy.root_device.type == "cuda" and not shares and not is_wrapped:
                given = "auto"
                rank_zero_info("Clients train at once on the GPU; --vectorize=null switches it off")
        if given is not None:
            options = given if isinstance(given, dict) else {"group_size": given}
            with error_context("vectorize", TypeError):
                self.model = VectorizedClients(self.model, **options)

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Remove the folder of a new fit if an error ends it before the first step."""
        try:
            yield
        except Exception:
            trainer: Trainer | None = vars(self).get("trainer")
            if self._has_created and (trainer is None or trainer.global_step == 0):
                shutil.rmtree(self.run_folder, ignore_errors=True)
            raise

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and check the configurations."""
        parser.usage = "lightning-fl COMMAND --config FILE [options]"
        check_words(self._subcommand_parsers.get(args[0] if args else ""), args)
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        if empty := [name for name in PARTS if config[name] is None]:
            raise FederationError(f"{empty[0]} is empty in the configuration: remove it")
        if isinstance(callback := config.trainer.callbacks, Namespace):  # Lightning takes one, too
            config.trainer.callbacks = [callback]

    def before_instantiate_classes(self) -> None:
        """Set the number of threads."""
        if (threads := self.config[self.subcommand].threads) is not None:
            torch.set_num_threads(threads)

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.set_defaults({"weights_only": True})  # do not execute code in checkpoints
        describe(parser, subcommand)
        return parser

    def _parse_ckpt_path(self) -> None:
        """Choose the folder of the run, and resolve ``last`` to a checkpoint.

        Unlike Lightning, do not let hyperparameters of a checkpoint choose classes.
        """
        config, is_fit = self.config[self.config.subcommand], self.config.subcommand == "fit"
        root = Path(config.trainer.default_root_dir or ".").absolute()
        runs = version_folders(root)
        self.run_folder = runs[-1] if runs else root / "version_0"
        given = config.ckpt_path or (None if is_fit else "last")  # do not test random parameters
        if given == "last":
            run = self._run_of_config(config) or self.run_folder
            newest = self._newest(config, run)
            config.ckpt_path = None if newest is None else str(newest)
            if newest is not None:
                self.run_folder, self._has_run = run, run.is_dir()
            elif is_fit:
                rank_zero_warn(f"there is no checkpoint in {short_path(run)}: starting a new run")
            else:
                raise FederationError(
                    f"there is no checkpoint in {run}: run fit first, or set --ckpt_path to a file"
                )
        elif given is not None:
            path = Path(given).absolute()
            if not path.is_file():
                raise FederationError(
                    f"checkpoint {given} is not a file: set --ckpt_path to a file or last"
                )
            if not is_fit:
                runs += [folder for folder in path.parents if (folder / TABLE).is_file()]
            own = [folder for folder in path.parents if folder in runs]
            self.run_folder, self._has_run = [*own, self.run_folder][0], bool(own)

    def _run_of_config(self, config: Any) -> Path | None:
        """Return the folder of a run if its own ``config.yaml`` is a config of the command."""
        files = [Path(path.absolute) for path in reversed(config.get("config") or [])]
        own = (f for f in files if f.name == "config.yaml" and (f.parent / TABLE).is_file())
        return next((file.parent for file in own), None)

    def _newest(self, config: Any, run: Path) -> Path | None:
        """Return the newest checkpoint of a run, including those written on SLURM signals."""
        last = Path(config.checkpoint.dirpath or run) / f"{config.checkpoint.filename}.ckpt"
        found = filter(Path.is_file, [last, *run.glob("hpc_ckpt_*.ckpt")])
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Configure the output folder, the callbacks and the loggers of the Trainer."""
        names = ("trainer", "federation", "checkpoint")
        config, loop, checkpoint = (self._get(self.config_init, name) for name in names)
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
        is_fit = self.subcommand == "fit"
        if is_fit and config.enable_progress_bar is not False:
            callbacks.append(RoundProgress())
        # Also without training: Lightning warns if a callback of the checkpoint is missing.
        for kind in (RunReport, LogFiles)[: 1 + is_fit]:
            if not any(isinstance(callback, kind) for callback in callbacks):
                callbacks.append(kind())
        callbacks.sort(key=lambda callback: isinstance(callback, LogFiles))  # the files of others
        if is_fit and not config.fast_dev_run:
            callbacks.append(RunConfig(self._config_text(), self.run_folder))
        return callbacks

    def _config_text(self) -> str:
        """Return the configuration as YAML, without the checkpoint."""
        config = self.config[self.subcommand].clone()
        for name in ("config", "ckpt_path"):
            config.pop(name, None)
        parser = self._parser(self.subcommand)
        return str(parser.dump(config, skip_none=False, skip_validation=True))

    def _loggers(self) -> list[Logger]:
        # CSVLogger deletes existing files in its folder, so a resumed run uses a new folder.
        loggers: list[Logger] = [CSVLogger(self.run_folder, name="csv")]
        if find_spec("tensorboard"):
            loggers.insert(0, TensorBoardLogger(self.run_folder, name="", version=""))
        return loggers

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: :meth:`run` runs it, when all parts of the configuration are made."""

    def run(self) -> None:
        """Run the command."""
        super()._run_subcommand(self.config.subcommand)

    def fit(self, **kwargs: Any) -> None:
        """Fit and print the folder of the run; remove it if the fit fails before the first step."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.fit(**kwargs)
            return
        if path := kwargs.get("ckpt_path"):
            _say(f"Resuming from {short_path(Path(path))}")
        try:
            with self._leaving_nothing():
                self.trainer.fit(**kwargs)
        except SystemExit as end:  # of Lightning: code 1 after an interruption, 0 after SIGTERM
            if isinstance(end, SIGTERMException) or self.trainer.interrupted:
                _say("\ninterrupted; resume with --ckpt_path last")
                code = TERMINATED if isinstance(end, SIGTERMException) else INTERRUPTED
                raise SystemExit(code) from end
            raise
        loop: FederatedLoop = self._get(self.config_init, "federation")
        if not loop.fit.has_begun:
            _say(
                f"Nothing to train: the checkpoint is of round {loop.round}; increase"
                f" --trainer.max_epochs ({self.trainer.max_epochs}) to continue"
            )
        _say(f"Written to {short_path(self.run_folder)}")
        if loop.rows and all(map(is_unusable, loop.rows)):
            fail(
                f"no update was usable in all {loop.round} rounds, so the model has learned"
                " nothing: see the first warning for the cause",
                NOT_TRAINED,
            )

    def test(self, **kwargs: Any) -> None:
        """Test and write the metrics to ``test.json`` in the folder of the run.

        The file also contains the name and the round of the checkpoint, and the options that differ
        from the fit.
        """
        metrics = self.trainer.test(**kwargs)
        if self.trainer.fast_dev_run or not self.trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        used = Path(kwargs["ckpt_path"])
        folder = self.run_folder if self._has_run else used.absolute().parent
        if differing := changes_of_test(folder, self._config_text()):
            changes = "; ".join(f"{k} is {t!r}, was {f!r}" for k, (f, t) in differing.items())
            rank_zero_warn(f"options of the test differ from the fit: {changes:.1000}")
        found = {
            "format": TEST_FORMAT,
            "checkpoint": used.name,
            "round": self._get(self.config_init, "federation").round or None,
            # JSON has no NaN.
            "metrics": {n: v if math.isfinite(v) else None for m in metrics for n, v in m.items()},
            "seed": self._get(self.config, "seed_everything"),
            "differing options": differing,
        }
        write_atomically(folder / "test.json", json.dumps(found, indent=2, default=str) + "\n")
        print(f"Written to {short_path(folder / 'test.json')}")

    def predict(self, **kwargs: Any) -> None:
        """Predict the test samples and write the outputs of the module, one tensor per batch."""
        if self.trainer.world_size > 1:
            raise FederationError(
                "predict supports one process, because it writes one file, got"
                f" {self.trainer.world_size} processes: set --trainer.devices=1"
            )
        predictions = self.trainer.predict(**kwargs)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            path = Path(kwargs["ckpt_path"]).absolute().with_name("predictions.pt")
            write_atomically(path, partial(torch.save, predictions))
            print(f"Written to {short_path(path)}")


def start(cli: Callable[..., _CLI], words: Sequence[str]) -> _CLI:
    """Parse a command line, and make the parts of its configuration.

    Args:
        cli: Class of the command line.
        words: Arguments.

    Raises:
        FederationError: If a part does not accept its values.
    """
    before, sys.argv = sys.argv, sys.argv[:1]  # Lightning warns where both have arguments
    try:
        return cli(
            LightningModule,
            FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            save_config_callback=None,  # RunConfig writes it
            parser_class=Parser,
            parser_kwargs=PARSER,
            # Modules configure their optimizer, which flags of the CLI would replace.
            auto_configure_optimizers=False,
            args=with_configs(words),
        )
    except (MisconfigurationException, ValueError) as error:
        raise FederationError(one_cause(error)) from error  # jsonargparse's message is longer
    finally:
        sys.argv = before
