"""Losses, accuracies and gradients for aggregators and policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn

from lightning_fl.federation.processes import Processes
from lightning_fl.functional.randomness import RandomStream, derive_seed, seeded_rng
from lightning_fl.runners.base import ClientRunner
from lightning_fl.runners.local_step import gradients_of
from lightning_fl.runners.tensors import flat


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode, and restore the mode of each submodule on exit."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def on_device(trainer: Trainer, batch: Any, is_training: bool = False) -> Any:
    """Convert a batch to the precision and device of training, as Lightning's loops do.

    All hooks of the transfer are called. Hooks that augment samples ask ``trainer.training``.

    Args:
        trainer: The Trainer.
        batch: The batch.
        is_training: Whether the batch is for training instead of an evaluation.
    """
    state = trainer.state
    stage = state.stage
    state.stage = RunningStage.TRAINING if is_training else RunningStage.VALIDATING
    try:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch)
    finally:
        state.stage = stage


def accuracy(module: LightningModule, batch: Any) -> Tensor:
    """Return 1 for each correctly classified sample of a batch ``(x, y)``, else 0.

    Raises:
        ValueError: If there is no class per sample, or fewer than two scores.
    """
    x, y = batch
    scores: Tensor = module(x)
    found = scores.argmax(1)
    if y.is_floating_point() or y.shape != found.shape or scores.shape[1] < 2:
        raise ValueError(
            "the samples have no class labels, or the module does not return class scores"
        )
    is_right: Tensor = found == y
    return is_right.double()


def evaluate(
    trainer: Trainer,
    module: LightningModule,
    batches: Iterable[Any],
    metric: Callable[[Any, Any], Tensor],
    seed: int,
) -> list[Tensor]:
    """Return a metric of a module for each batch, in the mode and the precision of validation.

    Args:
        trainer: The Trainer.
        module: The module.
        batches: The batches, as a loader returns them.
        metric: Function of the module and a batch on its device.
        seed: Seed of random numbers. Those of the run do not change.
    """
    values = []
    with evaluating(module), torch.no_grad(), seeded_rng(seed, module.device):
        for batch in batches:
            moved = on_device(trainer, batch)
            with trainer.precision_plugin.val_step_context():
                values.append(metric(module, moved))
    return values


class Measures:
    """Evaluate models on the samples of clients and of the server.

    Random numbers depend on the seed, the round and the client only.

    Args:
        trainer: The Trainer of the fit.
        data: The data module of the federation.
        seed: The seed of the run.
        processes: The processes of the fit.
    """

    def __init__(self, trainer: Trainer, data: Any, seed: int, processes: Processes) -> None:
        self._trainer, self._data, self._seed = trainer, data, seed
        self._processes = processes
        #: Batches of the clients in training, with their seeds.
        self._streams: list[tuple[Any, int]] = []

    def client_losses(
        self, runner: ClientRunner, clients: Sequence[int], round: int, models: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of the model of each client on all its training samples.

        Args:
            runner: Runner of these clients.
            clients: Ids of the clients, in the order of the runner.
            round: Index of the round.
            models: Models to evaluate instead, ``[k, P]``.

        Returns:
            Losses, ``[k]``, the same on processes that share samples.
        """
        means = []
        for row, client in enumerate(clients):
            seed = derive_seed(self._seed, RandomStream.CLIENT_LOSS, round, client)
            own = runner.client(row) if models is None else runner.at_model(row, models[row])
            with own:
                parts = evaluate(
                    self._trainer,
                    runner.module,
                    self._data.samples_of(client),
                    lambda module, batch: module.federated_losses(batch).double(),
                    seed,
                )
            means.append(torch.as_tensor(sum(p.sum() for p in parts) / sum(map(len, parts))))
        return self._processes.same(torch.stack(means))

    def training_accuracy(
        self, module: LightningModule, clients: Sequence[int], round: int
    ) -> float:
        """Return the accuracy of a module on all training samples of the given clients.

        Must be called on all processes.

        Args:
            module: The module.
            clients: Ids of the clients.
            round: Index of the round.
        """
        processes = self._processes
        seed = derive_seed(self._seed, RandomStream.CLIENT_LOSS, round)
        own = clients[processes.rank :: processes.count]
        batches = (batch for client in own for batch in self._data.samples_of(client))
        none = torch.zeros(0, dtype=torch.float64, device=module.device)
        is_right = torch.cat([none, *evaluate(self._trainer, module, batches, accuracy, seed)])
        counts = torch.stack([is_right.sum(), torch.ones_like(is_right).sum()])
        right, total = processes.sum(counts)
        return float(right / total)

    def client_gradients(self, runner: ClientRunner, clients: Sequence[int], round: int) -> Tensor:
        """Return the gradient of each client's mean loss over all its training samples.

        Args:
            runner: Runner of these clients.
            clients: Ids of the clients, in the order of the runner.
            round: Index of the round.

        Returns:
            Gradients at the clients' models, ``[k, num_parameters]`` in float64; 0 for frozen
            parameters. The same on processes that share samples.
        """
        rows = []
        for row, client in enumerate(clients):
            seed = derive_seed(self._seed, RandomStream.CLIENT_LOSS, round, client)
            with runner.client(row):
                rows.append(self._gradient(runner, self._data.samples_of(client), seed))
        return self._processes.same(torch.stack(rows))

    def batch_gradients(
        self, runner: ClientRunner, clients: Sequence[int], round: int
    ) -> Callable[[Tensor], Tensor]:
        """Return a function of models, ``[k, P]``, that evaluates them on each client's next batch.

        Args:
            runner: Runner of these clients.
            clients: Ids of the clients, in the order of the runner.
            round: Index of the round.

        Returns:
            Function that returns gradients as :meth:`client_gradients`, of one training batch each.
        """
        streams = self._streams = []

        def evaluated(models: Tensor) -> Tensor:
            for client in () if streams else clients:
                seed = derive_seed(self._seed, RandomStream.CLIENT_START, round, client)
                generator = torch.Generator().manual_seed(seed)
                streams.append((self._data.steps_of(client, generator), seed))
            rows = []
            for row, (stream, seed) in enumerate(streams):
                with runner.at_model(row, models[row]):
                    rows.append(self._gradient(runner, [next(stream)], seed))
            return self._processes.same(torch.stack(rows))

        return evaluated

    def close_batches(self) -> None:
        """End the batches of :meth:`batch_gradients`, from which clients may go on to train."""
        for stream, _ in self._streams:
            stream.close()
        self._streams = []

    def _gradient(self, runner: ClientRunner, batches: Iterable[Any], seed: int) -> Tensor:
        """Return the gradient of the mean loss of the module, ``[num_parameters]``."""
        module: Any = runner.module
        total = torch.zeros(runner.num_parameters, dtype=torch.float64, device=module.device)
        count = torch.zeros((), dtype=torch.float64, device=module.device)
        precision = self._trainer.precision_plugin
        with evaluating(module), torch.enable_grad(), seeded_rng(seed, module.device):
            for batch in batches:
                with precision.val_step_context():
                    losses = module.federated_losses(on_device(self._trainer, batch))
                grads = gradients_of(losses.sum(), runner.shared)
                parts = (grads.get(n, torch.zeros_like(p)) for n, p in runner.shared.items())
                total += torch.cat([flat(part) for part in parts])
                count += len(losses)
        return total / count.clamp(min=1)

    def contributions(
        self, runner: ClientRunner, moves: Mapping[int, Tensor], clients: Tensor, round: int
    ) -> Tensor:
        r"""Return the inner product of each update with the gradient of the validation loss.

        Must be called on all processes.

        Args:
            runner: Runner with the global model, at which the gradient :math:`g` is evaluated.
            moves: Updates :math:`\Delta_k` of the clients of this process by client, ``[P]`` each.
            clients: Ids of the clients of the round, ``[K]``.
            round: Index of the round.

        Returns:
            :math:`g^\top \Delta_k` in float64, ``[K]``; NaN for clients without an update.
        """
        seed = derive_seed(self._seed, RandomStream.VALIDATION, round)
        loaders = self._data.val_dataloader()  # several in a list
        first = loaders[0] if isinstance(loaders, list) and loaders else loaders
        gradient = self._gradient(runner, first, seed)
        buffers = gradient.new_zeros(sum(runner.vector.sizes) - runner.num_parameters)
        gradient = torch.cat([gradient, buffers])
        own = {client: float(gradient @ move.double()) for client, move in moves.items()}
        parts = self._processes.gather(own)
        known = {client: product for part in parts for client, product in part.items()}
        products = [known.get(client, math.nan) for client in clients.tolist()]
        # Policies must agree on all processes.
        products = self._trainer.strategy.broadcast(products)
        return torch.tensor(products, dtype=torch.float64)
