"""What a federation refuses at the start of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_fl.aggregators import Aggregator
from lightning_fl.federation.measures import evaluating
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import replaced
from lightning_fl.objectives import ClientModule
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.samplers import ClientSampler
from lightning_fl.transforms import UpdateTransform
from lightning_fl.types import FederatedData, FederationError, check_package


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a loop that are out of range.

    Args:
        options: Arguments of :class:`FederatedLoop` by name.

    Raises:
        FederationError: Names the option, its value and what is allowed.
    """
    for name, kind in (
        ("aggregator", Aggregator),
        ("policy", HyperparameterPolicy),
        ("sampler", ClientSampler),
    ):
        rule = options[name]
        if rule is not None and not isinstance(rule, kind):
            hint = f": write {rule.__name__}()" if isinstance(rule, type) else ""
            raise FederationError(f"{name} must be a {kind.__name__}, got {rule!r}{hint}")
    count, fraction = options["clients_per_round"], options["client_fraction"]
    if count is not None and fraction is not None:
        raise FederationError(
            f"clients_per_round={count!r} and client_fraction={fraction!r} both say how many"
            " clients a round samples: give one of them"
        )
    is_count = isinstance(count, int | np.integer) and not isinstance(count, bool) and count >= 1
    if count is not None and not is_count:
        raise FederationError(
            f"clients_per_round must be a whole number from 1 up, got {count!r}: for a part of all"
            " clients set client_fraction"
        )
    is_fraction = isinstance(fraction, float | int | np.floating) and 0 < fraction <= 1
    if fraction is not None and (isinstance(fraction, bool) or not is_fraction):
        raise FederationError(
            f"client_fraction must be in (0, 1], got {fraction!r}: for a number of clients set"
            " clients_per_round"
        )
    min_clients = options["min_clients"]
    if not isinstance(min_clients, int | np.integer) or min_clients < 1:
        raise FederationError(f"min_clients must be a whole number from 1 up, got {min_clients!r}")
    for name, allowed in (
        ("on_client_error", ("skip", "raise")),
        ("optimizer_state", ("reset", "keep")),
        ("buffers", ("average", "server", "local", None)),
    ):
        if options[name] not in allowed:
            raise FederationError(f"{name} must be one of {allowed}, got {options[name]!r}")
    for transform in options["update_transforms"]:
        if not isinstance(transform, UpdateTransform):
            raise FederationError(f"update_transforms must be UpdateTransforms, got {transform!r}")
    if not options["client_state_memory_gb"] >= 0:
        raise FederationError(
            f"client_state_memory_gb must be at least 0, got {options['client_state_memory_gb']!r}"
        )


def check_fit(trainer: Trainer, module: LightningModule, vectorized: bool) -> Any:
    """Refuse a Trainer, a module or data that rounds cannot be made of; return the data module.

    Args:
        trainer: The Trainer, with its callbacks.
        module: The user's module.
        vectorized: Whether clients train at once, in lanes.
    """
    check_trainer(trainer, vectorized)
    check_module(module)
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by the data connector
    if not isinstance(data, FederatedData):
        raise FederationError(
            "FederatedLoop needs to know which samples belong to which client: pass"
            " Trainer.fit(module, datamodule=FederatedDataModule(train, val, test, ...)),"
            f" got {type(data).__name__}"
        )
    return data


def warn_of_running_statistics(module: nn.Module) -> None:
    """Warn that clients change a module's buffers by training it, as those of BatchNorm."""
    if any(getattr(m, "running_mean", None) is not None for m in module.modules()):
        rank_zero_warn(
            "the module keeps running statistics (BatchNorm) and clients change them: FederatedLoop"
            " averages them. Choose buffers='average', 'server' or 'local' to say what you want"
        )


def check_module(module: LightningModule) -> None:
    """Refuse a module that cannot be trained client after client."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise FederationError(
            f"{name} optimizes by hand (automatic_optimization=False): FederatedLoop needs"
            " automatic optimization, to give each client its own optimizer state and rate"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise FederationError(
            f"{name}.training_step takes dataloader_iter, with which the module fetches batches"
            " itself: FederatedLoop gives each client its own batches, use training_step(batch,"
            " batch_idx)"
        )
    for tensor_name, tensor in module.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise FederationError(
                f"{name}.{tensor_name} has no shape yet: run the module once on a sample before fit"
            )


def check_network(trainer: Trainer, module: LightningModule, data: FederatedData) -> None:
    """Refuse a network that does not take the samples, where it is known how to ask it."""
    if not isinstance(module, ClientModule):
        return
    x, *_ = trainer.precision_plugin.convert_input(data.example())
    with evaluating(module), torch.no_grad(), seeded_rng(0):
        try:
            module(x.to(module.device))
        except RuntimeError as error:
            if not any(word in str(error) for word in ("shape", "size", "channels")):
                return  # the precision of the run is not in force yet
            raise FederationError(
                f"{type(module.net).__name__} does not take samples of shape {list(x.shape[1:])}:"
                f" choose another network, or other sizes. It says: {error}"
            ) from error


def check_smallest_batch(module: nn.Module, data: Any) -> None:
    """Warn where BatchNorm would meet a batch of one sample, which it cannot train on."""
    smallest = getattr(data, "smallest_batch", None)
    if smallest is None or not (single := smallest == 1).any():
        return
    if any(isinstance(m, nn.BatchNorm1d | nn.SyncBatchNorm) for m in module.modules()):
        rank_zero_warn(
            f"client {int(single.nonzero()[0])} trains on batches of one sample, and BatchNorm"
            " cannot: set drop_last=True to leave remainders out, and give every client two"
            " samples or more (min_size of a partition)"
        )


#: Callbacks that break rounds: what each does to them, and the remedy.
REFUSED: dict[type[Callback], str] = {
    WeightAveraging: "averages the parameters of different clients step by step, which breaks"
    " rounds: take it out of the Trainer's callbacks; FedOpt has momentum on the server",
    StochasticWeightAveraging: "averages the parameters of different clients and sets their"
    " learning rate, which breaks rounds: take it out of the Trainer's callbacks",
    GradientAccumulationScheduler: "adds up gradients across clients, which breaks rounds: take it"
    " out of the Trainer's callbacks and raise batch_size",
    BatchSizeFinder: "trains before the first round, which breaks rounds: take it out of the"
    " Trainer's callbacks and set batch_size",
    LearningRateFinder: "trains before the first round, which breaks rounds: take it out of the"
    " Trainer's callbacks and set the learning rate",
    ModelPruning: "replaces parameters by masked ones while clients train, so that the masks of one"
    " client reach the others, which breaks rounds: take it out of the Trainer's callbacks and"
    " prune the trained module after the fit",
    SpikeDetection: "compares the loss of a client with the losses of the clients before it, which"
    " breaks rounds: take it out of the Trainer's callbacks; on_client_error handles updates that"
    " are not finite",
}


def check_trainer(trainer: Trainer, vectorized: bool = False) -> None:
    """Refuse options and callbacks of the Trainer that break rounds.

    Args:
        trainer: The Trainer, with its callbacks.
        vectorized: Whether clients train at once, in lanes.
    """
    if trainer.world_size != 1 and not isinstance(trainer.strategy, DDPStrategy):
        raise FederationError(
            f"FederatedLoop cannot share clients out with {type(trainer.strategy).__name__}: choose"
            " strategy='client_parallel' (each process trains clients of its own) or 'ddp' (all"
            " train one client, on parts of its batches)"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
        check_package(callback, Callback)
        for kind, why in REFUSED.items():
            if isinstance(callback, kind):
                raise FederationError(f"{type(callback).__name__} {why}")
        if vectorized and isinstance(callback, BaseFinetuning):
            raise FederationError(
                f"{type(callback).__name__} gives the optimizer parameters of the module itself,"
                " which vectorized training does not step: train the module itself instead of"
                " VectorizedClients(module)"
            )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    # An int and a float mean different things to the Trainer: 1 batch, 1.0 of all batches.
    wanted: dict[str, tuple[Any, str]] = {
        "accumulate_grad_batches": (1, "a local step is one batch: raise batch_size instead"),
        "overfit_batches": (0.0, "clients train on their own samples: use fewer samples instead"),
        "limit_train_batches": (1.0, "a round has the steps of its plan: set num_steps instead"),
        "max_steps": (
            -1,
            "it stops inside a round and breaks resuming: set max_epochs, the rounds",
        ),
        "val_check_interval": (1.0, "validation follows aggregation: set check_val_every_n_epoch"),
    }
    for name, (value, why) in wanted.items():
        given = getattr(trainer, name)
        if given != value or isinstance(given, float) != isinstance(value, float):
            raise FederationError(f"Trainer({name}={given}) breaks rounds: {why}")
    if trainer.check_val_every_n_epoch is None:
        raise FederationError(
            "Trainer(check_val_every_n_epoch=None) validates by batches, which breaks rounds: set a"
            " number of rounds"
        )


@contextmanager
def one_optimizer(module: LightningModule) -> Iterator[None]:
    """Refuse several optimizers as they are configured: Lightning's advice is of no use here."""

    def checking(configure: Callable[[], Any]) -> Callable[[], Any]:
        def checked() -> Any:
            made: Any = configure()
            if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list | tuple):
                found = len(made[0])
            elif isinstance(made, list | tuple):
                found = len(made)
            else:
                found = int(made is not None)
            if found != 1:
                raise FederationError(
                    f"a client trains with one optimizer, {type(module).__name__} configures"
                    f" {found}: return one from configure_optimizers"
                )
            return made

        return checked

    with replaced(module, "configure_optimizers", checking):
        yield
