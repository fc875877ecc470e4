"""Hooks that carry a number from client to client: the troubles that ``tests/troubles.py`` omits.

The tests have one hook of each kind, since the check of a whole run compares fits, whatever the
hook.
"""

# ruff: noqa: D102  # a hook is described by its class

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from troubles import Troubled

Batch = Sequence[Tensor]


def scale(tensors: Iterable[Tensor], factor: float) -> None:
    """Multiply tensors in place."""
    for tensor in tensors:
        tensor.mul_(factor)


def gradients(module: LightningModule) -> list[Tensor]:
    """Return the gradients of a module."""
    return [p.grad for p in module.parameters() if p.grad is not None]


def values(module: LightningModule) -> list[Tensor]:
    """Return the values of a module's parameters."""
    return [p.data for p in module.parameters()]


# --- hooks of the module --------------------------------------------------------------------------


class Numbered(Troubled):
    """Its hooks use a number that grows from client to client."""

    def number(self) -> float:
        """Return the next number."""
        self.steps += 1
        return 1 / (1 + 0.1 * self.steps)


class SetsWeight(Numbered):
    """Set the weight of the loss before a step."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.weight = self.number()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * self.weight


class Draws(SetsWeight):
    """Draw the weight of the loss from a generator of the module."""

    def __init__(self, factor: Callable[..., float]) -> None:
        super().__init__(factor)
        self.own = torch.Generator().manual_seed(0)

    def number(self) -> float:
        """Return the next number."""
        return float(torch.rand((), generator=self.own))


class SetsRateInTheStep(Numbered):
    """Set the learning rate in the step of the optimizer."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Any
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * self.number()
        optimizer.step(closure=optimizer_closure)


class Backward(Numbered):
    """Scale the loss in the backward pass."""

    def backward(self, loss: Tensor) -> None:
        (loss * self.number()).backward()


class BeforeBackward(Numbered):
    """Scale the gradient of the loss."""

    def on_before_backward(self, loss: Tensor) -> None:
        by = self.number()
        loss.register_hook(lambda gradient: gradient * by)


class AfterBackward(Numbered):
    """Scale gradients after the backward pass."""

    def on_after_backward(self) -> None:
        scale(gradients(self), self.number())


class BeforeStep(Numbered):
    """Scale gradients before the step of the optimizer."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        scale(gradients(self), self.number())


class BeforeZeroGrad(Numbered):
    """Scale parameters before gradients are set to zero."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        scale(values(self), self.number())


class BatchEnd(Numbered):
    """Scale parameters after a step."""

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        scale(values(self), self.number())


MODULES = (
    *(SetsWeight, SetsRateInTheStep, Backward, BeforeBackward, AfterBackward, BeforeStep),
    *(BeforeZeroGrad, BatchEnd, Draws),
)


# --- callbacks ------------------------------------------------------------------------------------


class Counts(Callback):
    """Its hooks use a number that grows from client to client."""

    def __init__(self) -> None:
        self.calls = 0

    def number(self) -> float:
        """Return the next number."""
        self.calls += 1
        return 1 / (1 + 0.1 * self.calls)


class SetsAttribute(Counts):
    """Set an attribute of the module."""

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        module.late = self.number()


class ScalesBatch(Counts):
    """Scale the inputs."""

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        scale(batch[:1], self.number())


class ScalesGradients(Counts):
    """Scale gradients."""

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        scale(gradients(module), self.number())


class ScalesParameters(Counts):
    """Scale parameters after a step."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        scale(values(module), self.number())


class GrowsList(Callback):
    """Scale gradients by the length of a list."""

    def __init__(self) -> None:
        self.seen = list[int]()

    def on_before_optimizer_step(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.seen.append(0)
        scale(gradients(module), 1 / len(self.seen))


class ReadsBatchIndex(Callback):
    """Set an attribute of the module to the number of the Lightning batch, which others count."""

    def on_train_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        module.late = 0.1 * batch_idx


CALLBACKS = (
    *(SetsAttribute, ScalesBatch, ScalesGradients, ScalesParameters, GrowsList, ReadsBatchIndex),
)
