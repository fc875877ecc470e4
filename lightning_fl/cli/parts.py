"""Parts of a configuration without a Trainer: the split of its data, and a federation elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from lightning_fl.callbacks.report import write_partition
from lightning_fl.check import COLUMNS, CheckResult, Run, check_columns
from lightning_fl.cli.arguments import short_path
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.errors import FederationError
from lightning_fl.integrations.config import TRAINING, UNSUPPORTED, Configuration, write_flower_app
from lightning_fl.partition import summary


class _PartsCLI(FederatedCLI):
    """Instantiate some parts of a configuration, and nothing that trains.

    Args:
        names: Keys of the parts, such as ``data``.
        options: Arguments of :class:`~lightning_fl.cli.federated.FederatedCLI`.
    """

    def __init__(self, *args: Any, names: Sequence[str], **options: Any) -> None:
        self.names = names
        super().__init__(*args, **options)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: there is no checkpoint."""

    def instantiate_classes(self) -> None:
        """Instantiate the parts."""
        chosen = Namespace(**{name: self.config.fit[name] for name in self.names})  # type: ignore[no-untyped-call]
        self.parts = self._parser("fit").instantiate_classes(chosen)

    def configuration(self) -> Configuration:
        """Return what the configuration describes, without a Trainer."""
        config, usual = self.config.fit, self._parser("fit").get_defaults().trainer
        if (num_rounds := config.trainer.max_epochs or -1) < 0:
            raise FederationError(
                "the configuration has no number of rounds: set trainer.max_epochs"
            )
        callbacks = [each.class_path.rpartition(".")[2] for each in config.trainer.callbacks or ()]
        own = [f"trainer.{name}" for name in UNSUPPORTED if config.trainer[name] != usual[name]]
        left_out = (*callbacks, *own, *["vectorize"] * (config.vectorize not in (None, "on_gpu")))
        trainer = {name: config.trainer[name] for name in TRAINING}
        parts = self.parts.model, self.parts.data, self.parts.federation
        return Configuration(*parts, trainer, num_rounds, self._config_text(), left_out)


def _parts(words: Sequence[str], *names: str) -> _PartsCLI:
    """Instantiate parts of a configuration.

    Args:
        words: Arguments of ``lightning-fl``, from ``fit`` on.
        names: Keys of the parts.
    """
    return start(partial(_PartsCLI, names=names), words)


def partition(words: Sequence[str], output: str) -> None:
    """Split the data of a configuration: neither a module nor a Trainer is made.

    Args:
        words: Arguments of ``lightning-fl``, from ``fit`` on.
        output: Folder of the files.
    """
    data = _parts(words, "data").parts.data
    data.prepare_data()
    data.setup("fit")
    paths = write_partition(Path(output), data)
    print(summary(data.num_samples.tolist(), data.class_counts, data.client_names))
    for path in paths:
        print(f"Written to {short_path(path.absolute())}")


def checked(
    words: Sequence[str], rounds: int, clients: int, columns: Sequence[str]
) -> Iterator[CheckResult]:
    """Yield the results of ``check_federation`` for a configuration.

    Args:
        words: Arguments of ``lightning-fl``, from ``fit`` on.
        rounds: Number of rounds.
        clients: Maximum number of clients per round.
        columns: What to check.
    """
    words = [*words, "--threads=1"]  # of forked processes, in which OpenMP may hang

    def make() -> Run:
        parts = _parts(words, "data", "model", "federation", "trainer").parts
        given = {name: value for name, value in parts.trainer.items() if value is not None}
        callbacks = given.pop("callbacks", [])
        return Run(parts.model, parts.data, parts.federation, callbacks, given)

    _parts(words)  # mistakes are shown by this process
    yield from check_columns(make, rounds, clients, columns)


def check(words: Sequence[str], rounds: int, clients: int, columns: Sequence[str]) -> None:
    """Check a configuration, and print a table; see :func:`checked`.

    Raises:
        SystemExit: With code 1 if a result differs.
    """
    table = Table("column", "result", "difference", "first client and tensor", "")
    results = []
    columns = columns or list(COLUMNS)
    found = checked(words, rounds, clients, columns)
    for result in track(found, "checking", total=len(columns), transient=True):
        where = [] if result.client is None else [f"client {result.client}"]
        where += [] if result.tensor is None else [result.tensor]
        size = f"{result.difference:.1e}" if result.difference else ""
        cells = result.column, result.outcome, size, ", ".join(where), result.detail
        table.add_row(*map(Text, cells))  # a text in brackets would be markup
        results.append(result)
    Console().print(table)
    if not all(result.is_equal for result in results):
        raise SystemExit(1)


def export(words: Sequence[str], target: str, output: str) -> None:
    """Write the app of a configuration.

    Args:
        words: Arguments of ``lightning-fl``, from ``fit`` on.
        target: What runs the app: ``flower``.
        output: Folder of the app.
    """
    cli = _parts(words, "data", "model", "federation")
    files = [file for file in cli.config.fit.config or () if file is not None]
    if not files:
        raise FederationError("export takes the file of a configuration, such as digits.yaml")
    found = cli.configuration()
    for path in write_flower_app(found, Path(files[0].absolute), output):
        print(f"Written to {short_path(path.absolute())}")
    if found.left_out:
        print(f"The app leaves out: {', '.join(found.left_out)}")
    print(f"It waits for {len(found.data.num_samples)} SuperNodes: see its README.md")


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
    words = ["fit", "--config", str(path), *more]
    return _parts(words, "data", "model", "federation").configuration()
