"""Parts of a configuration without a Trainer: the split of its data, and a federation elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_fl.callbacks.report import write_partition
from lightning_fl.cli.arguments import short_path, with_shipped_configs
from lightning_fl.cli.federated import FederatedCLI, start
from lightning_fl.integrations.config import ELSEWHERE, TRAINING, Configuration
from lightning_fl.partition import summary
from lightning_fl.types import FederationError


class PartitionCLI(FederatedCLI):
    """Split the data of a configuration: neither a module nor a Trainer is made.

    Args:
        output: Folder of the files.
        options: Arguments of :class:`~lightning_fl.cli.federated.FederatedCLI`.
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

    def _run_subcommand(self, subcommand: str) -> None:
        data = self.datamodule
        data.prepare_data()
        data.setup("fit")
        print(summary(data.num_samples.tolist(), data.class_counts, data.client_names))
        for path in write_partition(Path(self.output), data):
            print(f"Written to {short_path(path.absolute())}")


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
