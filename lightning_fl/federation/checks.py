"""Checks of the Trainer, the module and the data at the start of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

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
from torch import Tensor, nn

from lightning_fl.contracts.client_part import ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.data import FederatedData
from lightning_fl.errors import FederationError, check_package
from lightning_fl.federation.measures import evaluating
from lightning_fl.federation.run_options import RunOptions
from lightning_fl.federation.spectral_norm import spectral_norms
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.hooks import overrides, replaced
from lightning_fl.objectives import DPSGD, ClientModule
from lightning_fl.runners import flat
from lightning_fl.runners.optimizer import evaluates_often, optimizers_in, params_of
from lightning_fl.strategies import ClientParallelStrategy

#: Unsupported callbacks: the reason, and an alternative if there is one.
#:
#: :meta hide-value:
REFUSED: dict[type[Callback], str] = {
    WeightAveraging: "it averages different clients; for momentum on the server, use FedOpt",
    StochasticWeightAveraging: "it averages different clients and changes their learning rate",
    GradientAccumulationScheduler: "it changes the steps; set accumulate_grad_batches of Trainer",
    BatchSizeFinder: "it trains before the first round; set batch_size",
    LearningRateFinder: "it trains before the first round; set the learning rate",
    ModelPruning: "it shares the masks of a client with others; prune the trained module",
    SpikeDetection: "it compares the losses of different clients; non-finite updates are dropped",
}

#: Options of the Trainer that must have a certain value: the value, and the reason or alternative.
#: An int and a float mean different things to the Trainer: 1 batch, 1.0 of all batches.
REQUIRED: dict[str, tuple[Any, str]] = {
    "overfit_batches": (0.0, "clients train on their own samples: use fewer samples"),
    "limit_train_batches": (1.0, "to limit local work, use Schedule(num_steps=...)"),
    "max_steps": (-1, "it would stop during a round: set max_epochs, the number of rounds"),
    "min_steps": (None, "it would stop during a round: set min_epochs, a number of rounds"),
    "val_check_interval": (1.0, "validation follows aggregation: set check_val_every_n_epoch"),
}


# --- the Trainer ----------------------------------------------------------------------------------


def check_fit(trainer: Trainer, module: LightningModule, vectorized: bool) -> FederatedData:
    """Check that the Trainer, the module and the data support rounds; return the data module."""
    check_trainer(trainer, vectorized)
    check_module(module)
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by the data connector
    if not isinstance(data, FederatedData):
        raise FederationError(
            "FederatedLoop needs a data module that assigns samples to clients, got"
            f" {type(data).__name__}: call Trainer.fit(module, datamodule=...) with"
            " FederatedDataModule(train, ...) or FederatedDataModule.from_datamodule(data, ...)"
        )
    return data


def check_trainer(trainer: Trainer, vectorized: bool) -> None:
    """Check the strategy, the precision, the callbacks and the options of the Trainer."""
    strategy = type(trainer.strategy).__name__
    supported = ClientParallelStrategy if vectorized else DDPStrategy
    if trainer.world_size != 1 and not isinstance(trainer.strategy, supported):
        raise FederationError(
            f"{strategy} is not supported with several processes: set strategy='client_parallel'"
            " (each process trains different clients), or, without VectorizedClients, 'ddp' (all"
            " processes train the same client on parts of its batches)"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise FederationError(
            f"Trainer(precision={trainer.precision!r}) is not supported, because the loss scale of"
            " one client would reach the next: set precision='bf16-mixed' or '32-true'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the connector
        check_package(callback, Callback)
        name = type(callback).__name__
        if reasons := [why for kind, why in REFUSED.items() if isinstance(callback, kind)]:
            raise FederationError(
                f"{name} is not supported, because {reasons[0]}. Remove it from the Trainer's"
                " callbacks"
            )
        if vectorized and isinstance(callback, BaseFinetuning):
            raise FederationError(
                f"{name} is not supported with VectorizedClients, because it adds parameters of the"
                " module to the optimizer: pass the module itself to Trainer.fit instead of"
                " VectorizedClients(module)"
            )
    check_options(trainer)


def check_options(trainer: Trainer, accumulated: int | None = None) -> None:
    """Check the options of the Trainer, which hooks may change during a fit.

    Args:
        trainer: The Trainer.
        accumulated: Its ``accumulate_grad_batches`` at the start of the fit.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    constant = accumulated or trainer.accumulate_grad_batches
    required = REQUIRED | {"accumulate_grad_batches": (constant, "set it before the fit")}
    for name, (value, why) in required.items():
        given = getattr(trainer, name, "a time")  # Lightning keeps no val_check_interval of time
        if given != value or isinstance(given, float) != isinstance(value, float):
            raise FederationError(f"Trainer({name}={given}) is not supported: {why}")
    if trainer.check_val_every_n_epoch is None:
        raise FederationError("check_val_every_n_epoch must be a number of rounds, got None")


# --- the module -----------------------------------------------------------------------------------


def check_module(module: LightningModule) -> None:
    """Check that the module trains with given batches."""
    name = type(module).__name__
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise FederationError(
            f"{name}.training_step(dataloader_iter) is not supported, because FederatedLoop chooses"
            " the batches of each client: use training_step(batch, batch_idx)"
        )


def checked_optimizers(module: LightningModule) -> AbstractContextManager[None]:
    """Return a context in which a module's tensors and optimizers are checked, after ``setup``."""

    def checking(configure: Callable[[], Any]) -> Callable[[], Any]:
        def checked() -> Any:
            check_dense(module)
            configured: Any = configure()
            check_configured(module, configured)
            return configured

        return checked

    return replaced(module, "configure_optimizers", checking)


def check_dense(module: LightningModule) -> None:
    """Check that the tensors of a module can be averaged: dense, real, and with a shape."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_dense = not nn.parameter.is_lazy(tensor) and tensor.layout == torch.strided
        if not is_dense or tensor.is_complex():
            raise FederationError(
                f"{type(module).__name__}.{name} is lazy, sparse or complex, but clients exchange"
                " dense real tensors: run the module on a sample in its constructor or in setup,"
                " keep a sparse tensor in a plain attribute, or register torch.view_as_real of a"
                " complex one"
            )


def terms_of(module: nn.Module) -> Iterable[Any]:
    """Return the terms of the loss of a module, which only a ``ClientModule`` has."""
    return module.terms if isinstance(module, ClientModule) else ()


def check_configured(module: LightningModule, configured: Any) -> None:
    """Check that a module configures an optimizer, with the parameters of its loss terms."""
    name, optimizers = type(module).__name__, list(optimizers_in(configured))
    if not optimizers:
        raise FederationError(f"{name}.configure_optimizers must return an optimizer, got none")
    known = {id(p) for optimizer in optimizers for p in params_of(optimizer)}
    for term in terms_of(module):
        if any(p.requires_grad and id(p) not in known for p in term.parameters()):
            raise FederationError(
                f"the optimizer of {name} leaves out parameters of the term {type(term).__name__},"
                " which would not be trained: create it from self.parameters(), which include them"
            )


def check_phases_of_terms(module: LightningModule, is_trained: Callable[[str], bool]) -> None:
    """Check that some phase of local training trains the parameters of each loss term."""
    for i, term in enumerate(terms_of(module)):
        names = [f"terms.{i}.{n}" for n, p in term.named_parameters() if p.requires_grad]
        if names and not any(map(is_trained, names)):
            raise FederationError(
                f"phases train no parameter of the term {type(term).__name__}, which would keep its"
                " initial values: let a phase train local or all parameters, or add the pattern"
                f" 'terms.{i}.*' to its list"
            )


def warn_of_averaged_buffers(
    module: nn.Module, shared: Mapping[str, Tensor], before: Tensor
) -> None:
    """Warn if the first aggregation averaged buffers, whose mean may have no meaning.

    Args:
        module: The user's module with the new global model.
        shared: The buffers that clients exchange, by name.
        before: The state before the round, as one vector, with these buffers at its end.
    """
    # which the loop makes consistent after each aggregation
    known = {id(vector) for vectors, _ in spectral_norms(module) for vector in vectors}
    sizes = [buffer.numel() for buffer in shared.values()]
    olds = before[len(before) - sum(sizes) :].split(sizes)
    changed = [
        name
        for (name, new), old in zip(shared.items(), olds, strict=True)
        if id(new) not in known and not torch.equal(flat(new).to(old), old)
    ]
    if changed:
        listed = ", ".join(changed[:3]) + ", ..." * (len(changed) > 3)
        rank_zero_warn(
            f"clients change the buffers {listed}, which FederatedLoop averages over clients. If"
            " their mean has no meaning (a queue, a unit vector), keep them on the clients with"
            " buffers='local', or list them in local_parameters. To silence this warning, set"
            " buffers to 'average', 'server' or 'local'"
        )


# --- the module and the data, or the rules --------------------------------------------------------


def check_network(trainer: Trainer, module: LightningModule, data: FederatedData) -> None:
    """Check that the network of a ``ClientModule`` has an output for each class."""
    if not isinstance(module, ClientModule) or overrides(module, "federated_losses", ClientModule):
        return
    labels, example = data.class_labels, data.example()
    if labels is None or labels.is_floating_point() or example is None:
        return
    x, *_ = trainer.precision_plugin.convert_input(example)
    if not isinstance(x, Tensor):
        return
    with evaluating(module), torch.no_grad(), seeded_rng(0, module.device):
        try:
            scores = module(x.to(module.device))
        except RuntimeError:  # of shapes or the precision, which is in effect in steps only
            return
    count = int(labels.max()) + 1
    if isinstance(scores, Tensor) and scores.ndim > 1 and count > scores.shape[1]:
        raise FederationError(
            f"{type(module.net).__name__} has {scores.shape[1]} outputs, and the largest label is"
            f" {count - 1}: set {count} outputs, or number the classes from 0"
        )


def check_evaluations(trainer: Trainer, module: nn.Module) -> None:
    """Check that an optimizer evaluates the loss once in a step, where that is counted on."""
    if (found := evaluates_often(trainer.optimizers)) is None:
        return
    if isinstance(module, DPSGD):
        raise FederationError(
            f"{type(found).__name__} evaluates several noisy gradients in a step, of which"
            f" {type(module).__name__} counts one: choose an optimizer such as SGD or Adam"
        )
    if trainer.accumulate_grad_batches != 1:
        raise FederationError(
            f"{type(found).__name__} evaluates the loss several times in a step, and"
            " accumulate_grad_batches adds up their gradients: increase batch_size instead"
        )


def check_terms(module: nn.Module, federation: Federation) -> None:
    """Check that the terms of the loss fit the run, and its precision what sums over samples."""
    is_half = federation.known_layout.dtype.itemsize < 4
    for each in (module, *terms_of(module)):
        if is_half and getattr(each, "sums_samples", False):
            raise FederationError(
                f"{type(each).__name__} sums over samples, which half precision rounds: set"
                " precision='bf16-mixed' or '32-true'"
            )
    for term in terms_of(module):
        term.check(federation)


def check_private_steps(
    module: nn.Module, options: RunOptions, parts: Sequence[ClientPart]
) -> None:
    """Check that clients with DP-SGD send nothing without noise that the server uses."""
    reads = options.policy.learns_from - {"val_loss"}
    who = options.aggregator if parts else options.policy
    if isinstance(module, DPSGD) and (parts or reads):
        what = "adds to the work of clients" if parts else f"learns from {min(reads)}"
        raise FederationError(
            f"{type(who).__name__} {what}, which the privacy loss of {type(module).__name__} does"
            " not cover: use a rule of updates only, such as FedAvg or FedAdam, and a Schedule"
        )


def check_policy(options: RunOptions) -> None:
    """Check that the policy does not learn from a global model that is not the clients' model."""
    learns = sorted(options.policy.learns_from & {"val_loss", "contributions"})
    if options.local_parameters and learns:
        raise FederationError(
            f"{type(options.policy).__name__} learns from {learns[0]} of the global model, in which"
            f" local_parameters={list(options.local_parameters)} keep their initial values: use a"
            " policy that learns from client_losses, or a fixed Schedule"
        )


def check_clock(options: RunOptions, is_drawn: bool) -> None:
    """Check that no asynchronous round was drawn, as for a loader, before its clock began."""
    if is_drawn and options.sampler.is_asynchronous:
        raise FederationError(
            "the training loader was made before the fit has begun, when"
            f" {type(options.sampler).__name__} does not know which clients finish first: in setup"
            " and configure_optimizers, use trainer.estimated_stepping_batches, or"
            " trainer.num_training_batches for one round, instead of the length of the loader"
        )
