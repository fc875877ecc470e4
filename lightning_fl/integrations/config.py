"""The server and the clients of a configuration of ``lightning-fl fit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils.data import Dataset

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.integrations.client import RemoteClient
from lightning_fl.integrations.server import RemoteServer

#: Options of the Trainer that the local training of a client depends on.
TRAINING = (
    "accelerator",
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "deterministic",
    "detect_anomaly",
)
#: Options of the Trainer that local training does not depend on.
ELSEWHERE = (
    "callbacks",  # named one by one
    "check_val_every_n_epoch",
    "default_root_dir",
    "devices",
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
    "fast_dev_run",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "logger",
    "max_epochs",
    "num_nodes",
    "num_sanity_val_steps",
    "profiler",
    "strategy",
    "val_check_interval",
)
#: Options of a ``FederatedLoop`` that a server needs.
OF_SERVER = (
    "clients_per_round",
    "client_fraction",
    "min_clients",
    "buffers",
    "exchange_frozen",
    "local_parameters",
)
#: Options of a ``FederatedLoop`` that a client needs.
OF_CLIENT = (
    "optimizer_state",
    "buffers",
    "exchange_frozen",
    "update_transforms",
    "local_parameters",
    "phases",
)


@dataclass(frozen=True)
class Configuration:
    """Hold what a configuration of ``lightning-fl fit`` describes, without a Trainer.

    :func:`lightning_fl.cli.read_config` returns it.

    Args:
        module: The LightningModule, with the initial weights of ``lightning-fl fit``.
        data: The data module with the clients of the simulation.
        loop: The federation.
        trainer: Options of the Trainer of a client.
        num_rounds: Number of rounds.
        text: The whole configuration as YAML.
        left_out: Options that may change results and that a server and clients do not have, such as
            callbacks of the Trainer.
    """

    module: LightningModule
    data: FederatedDataModule
    loop: FederatedLoop
    trainer: Mapping[str, Any]
    num_rounds: int
    text: str
    left_out: tuple[str, ...] = ()

    def server(self) -> RemoteServer:
        """Return the server of the federation."""
        options = self.loop.options
        chosen = {name: getattr(options, name) for name in OF_SERVER}
        rules = options.aggregator, options.policy, options.sampler
        return RemoteServer(self.module, *rules, seed=self.loop.seed, **chosen)

    def client(
        self, data: FederatedDataModule | Dataset[Any] | None = None, batch_size: int | None = None
    ) -> RemoteClient:
        """Return a client of the federation.

        Args:
            data: The client's own samples. None uses the data of the configuration, of which each
                client trains its part.
            batch_size: Samples per local step of own samples; None means that of the
                configuration.
        """
        options, size = self.loop.options, batch_size
        chosen = {name: getattr(options, name) for name in OF_CLIENT}
        if chosen["buffers"] is None:
            del chosen["buffers"]  # the server warns
        if data is not None and batch_size is None:
            size = getattr(self.data, "batch_size", 32)
        data = self.data if data is None else data
        return RemoteClient(self.module, data, options.aggregator, self.trainer, size, **chosen)
