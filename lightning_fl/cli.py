"""``lightning-fl fit|validate|test|predict --config X.yaml``, ``lightning-fl report RUN``."""

from __future__ import annotations

import inspect
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate
from typing import Any, Literal, NoReturn, get_type_hints

import torch
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

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
from lightning_fl.callbacks.checkpoint_checks import read_checkpoint
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.lanes import Lanes
from lightning_fl.report import report
from lightning_fl.types import FederationError


class Parser(LightningArgumentParser):
    """Lightning's parser; where it does not know a class, it says which it knows."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message, with the names that would work."""
        names = known_names(message) if self.exit_on_error else []  # not for an option's own parser
        super().error(message + f"\nKnown names: {', '.join(names)}" * bool(names), ex)


def known_names(message: str) -> list[str]:
    """Return the classes that an option takes, by jsonargparse's message that it found none."""
    head, unknown, _ = message.partition("Expected a dot import path string")
    owner, _, option = head.rpartition('Parser key "')
    key, _, types = option.partition('"')
    if unknown and "Subtypes" not in types:  # One type, which the message does not hold.
        owner = owner.rpartition("class_path '")[2].partition("'")[0]
        with suppress(NameError, TypeError):  # annotations that cannot be read
            types = str(get_type_hints(getattr(locate(owner), "__init__", None)).get(key))
    # Not what torch has: a network may be any of hundreds.
    found = [locate(name) for name in re.findall(r"\blightning[\w.]+", types) if unknown]
    classes = [c for c in found if isinstance(c, type)]
    for c in classes:
        classes += c.__subclasses__()
    return sorted(
        {c.__name__ for c in classes if not inspect.isabstract(c) and c.__name__[0] != "_"}
    )


class FederatedCLI(LightningCLI):
    """Lightning's CLI with a federation, its checkpoint and a folder for each run.

    A new fit takes the next free folder ``version_N`` under ``trainer.default_root_dir``; ``fit
    --ckpt_path last`` goes on in the newest one, the other commands read it.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the loop and the checkpoint keys of their own, which merge and take flags."""
        parser.add_lightning_class_args(FederatedLoop, "federation")
        parser.add_lightning_class_args(RoundCheckpoint, "checkpoint")
        parser.set_defaults({"trainer.default_root_dir": "runs"})
        parser.add_argument(
            "--lanes",
            type=PositiveInt | Literal["auto"] | dict[str, int | bool | Literal["auto"]] | None,
            default=None,
            help="Clients that train at once, in Lanes(model, lanes); null is one after another."
            " Further options of Lanes as --lanes.compile=true, or {lanes: 10, compile: true}.",
        )
        parser.add_argument(
            "--threads",
            type=PositiveInt | None,
            default=None,
            help="Threads of PyTorch on the CPU; null is PyTorch's choice, one a core. Small models"
            " are fastest with 1, and on a busy machine by far.",
        )

    def instantiate_classes(self) -> None:
        """Put the model into lanes, where they are wanted."""
        super().instantiate_classes()
        if self.subcommand == "fit" and (lanes := self.config_init.fit.lanes) is not None:
            options = lanes if isinstance(lanes, dict) else {"lanes": lanes}
            known = [name for name in inspect.signature(Lanes).parameters if name != "module"]
            if unknown := sorted(set(options) - set(known)):
                raise FederationError(f"lanes has no option {unknown[0]!r}, it has {known}")
            self.model = Lanes(self.model, **options)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and refuse seeds that numpy would refuse later."""
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
        # For --help alone: it has no Trainer, and main has it run before it comes to this.
        reporting = report_parser()
        parser._subcommands_action.add_subcommand(  # type: ignore[union-attr]  # just added
            "report", reporting, help=reporting.description
        )

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        # A checkpoint is data, not code; and random weights are not worth a test.
        parser.set_defaults({"weights_only": True})
        if subcommand != "fit":
            parser.set_defaults({"ckpt_path": "last"})
        return parser

    def _parse_ckpt_path(self) -> None:
        """Find the run's folder and the checkpoint that ``last`` means, before it is read."""
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        root = Path(config.trainer.default_root_dir).absolute()
        runs = sorted(
            (p for p in root.glob("version_*") if p.name.removeprefix("version_").isdigit()),
            key=lambda p: int(p.name.removeprefix("version_")),
        )
        self.run_folder = runs[-1] if runs else root / "version_0"
        if config.ckpt_path == "last":
            last = self.run_folder / f"{config.checkpoint.filename}.ckpt"
            if config.checkpoint.dirpath is not None:
                last = Path(config.checkpoint.dirpath, last.name)
            if last.is_file():
                config.ckpt_path = str(last)
            elif subcommand == "fit":
                config.ckpt_path = None  # Killed before its first checkpoint, or never begun.
            else:
                raise FederationError(
                    f"there is no checkpoint {last} to {subcommand}: run fit first, or name a"
                    " file with --ckpt_path"
                )
        elif config.ckpt_path is not None and not Path(config.ckpt_path).is_file():
            raise FederationError(
                f"there is no checkpoint {config.ckpt_path}: give --ckpt_path a file, or last"
            )
        elif config.ckpt_path is not None and Path(config.ckpt_path).absolute().parent in runs:
            self.run_folder = Path(config.ckpt_path).absolute().parent
        elif subcommand == "fit" and not config.trainer.fast_dev_run:
            self.run_folder = root / f"version_{int(runs[-1].name[8:]) + 1 if runs else 0}"
        if (path := config.ckpt_path) is not None:  # Mapped: of its tensors nothing is read.
            read_checkpoint(
                path, lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            )
        # Not as Lightning: a checkpoint's hyper-parameters would say what classes are made.

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Put what the run writes into its folder, and show rounds."""
        config = self._get(self.config_init, "trainer")
        callbacks = list(config.callbacks or [])
        loop, checkpoint = (self._get(self.config_init, k) for k in ("federation", "checkpoint"))
        if loop.table is not None:
            loop.table = str(self.run_folder / loop.table)
        if checkpoint.dirpath is None:
            checkpoint.dirpath = str(self.run_folder)
        if self.subcommand == "fit" and config.enable_progress_bar is not False:
            callbacks.append(RoundProgress())
        # Also where nothing is trained: Lightning warns of callbacks that a checkpoint has in it.
        if not any(isinstance(callback, RunReport) for callback in callbacks):
            callbacks.append(RunReport())
        if config.logger in (None, True):
            kwargs["logger"] = self._loggers() if self.subcommand == "fit" else False
        return super().instantiate_trainer(
            callbacks=callbacks, default_root_dir=str(self.run_folder), **kwargs
        )

    def _loggers(self) -> list[Logger]:
        # Lightning's CSV logger empties its folder: a resumed run gets the next one.
        loggers: list[Logger] = [CSVLogger(self.run_folder, name="csv")]
        if find_spec("tensorboard"):
            loggers.insert(0, TensorBoardLogger(self.run_folder, name="", version=""))
        return loggers

    def fit(self, **kwargs: Any) -> None:
        """Fit, and say where the results are; a fit that is refused leaves no folder behind."""
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.fit(**kwargs)
            return
        if (path := kwargs.get("ckpt_path")) and self.trainer.is_global_zero:
            print(f"Going on from {_short(Path(path))}")
        # Not made here: other processes of the run are about to look which folder is the next.
        is_new = not self.run_folder.exists()
        try:
            self.trainer.fit(**kwargs)
        except Exception:
            if is_new and self.trainer.global_step == 0 and self.trainer.is_global_zero:
                shutil.rmtree(self.run_folder, ignore_errors=True)
            raise
        if self.trainer.is_global_zero:
            print(f"Written to {_short(self.run_folder)}")

    def predict(self, **kwargs: Any) -> None:
        """Predict the test samples and write what the module returned, a tensor a batch."""
        if self.trainer.world_size > 1:
            raise FederationError(
                f"predict writes one file, {self.trainer.world_size} processes would write parts of"
                " it: set --trainer.devices=1"
            )
        predictions = self.trainer.predict(**kwargs)
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            # A checkpoint from elsewhere does not belong to the newest run.
            used = kwargs.get("ckpt_path")
            folder = Path(used).absolute().parent if used else self.run_folder
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(predictions, folder / "predictions.pt")
            print(f"Written to {_short(folder / 'predictions.pt')}")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


#: The configs that come with the package.
CONFIGS = Path(__file__).parent / "configs"


def with_shipped_configs(args: Sequence[str]) -> list[str]:
    """Let ``--config digits.yaml`` mean the one that comes with the package.

    A file of the user's with that name goes first.

    Args:
        args: Of the command line.

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
        description="Make a page of runs: what was run, and how it went; several side by side.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        help="Folders of runs (runs/digits/version_0), or what holds some (runs/digits).",
    )
    parser.add_argument(
        "--output",
        type=str | None,
        help="The page, a file that ends in .html; null is report.html, in the folder of the run if"
        " it is one, else here.",
    )
    parser.add_argument(
        "--title", type=str | None, help="Of the page; null is made of the names of the runs."
    )
    return parser


def main(args: ArgsType = None) -> None:
    """Run the command line; a user's mistake ends with a message, not with a traceback."""
    if args is None:
        sys.argv[1:] = with_shipped_configs(sys.argv[1:])
    elif isinstance(args, list):
        args = with_shipped_configs(args)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Lightning's own, of torch 2.14.
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")
    words = sys.argv[1:] if args is None else args
    try:
        if isinstance(words, list) and words[:1] == ["report"]:
            asked = report_parser().parse_args(words[1:])
            print(f"Written to {_short(report(asked.runs, asked.output, asked.title))}")
            return
        FederatedCLI(
            LightningModule,
            FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_class=Parser,
            # Modules bring their own optimiser; the CLI's flags would replace it.
            auto_configure_optimizers=False,
            parser_kwargs={"description": "A whole federation in one Lightning Trainer."},
            args=args,
        )
    except MisconfigurationException as error:
        message = str(error)
    except ValueError as error:
        message = str(error)
        if "Union subtypes" not in message:  # jsonargparse's own words for what a class refused
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FederationError):
            cause = cause.__cause__
        message = str(cause or error)
    except RuntimeError as error:
        message = str(error)
        if "loading state_dict" in message:
            message = f"the checkpoint is of another model, configure the model it is of. {message}"
        elif not message.startswith(
            ("Early stopping conditioned on metric", "Found more than one stateful callback")
        ):
            raise
    else:
        return
    sys.stderr.write(f"lightning-fl: error: {message}\n")
    raise SystemExit(2)
