"""Per-FedAvg: a global model that adapts to a client in one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fl.errors import FederationError
from lightning_fl.objectives.local_network import trained_parameters
from lightning_fl.objectives.two_passes import TwoPassModule
from lightning_fl.options import check_flag, check_number


class PerFedAvg(TwoPassModule):
    r"""Train a model whose adaptation to a client, one gradient step, has a small loss.

    Per-FedAvg (Fallah et al., 2020). A local step with the independent batches :math:`D, D', D''`
    is

    .. math:: \tilde w = w - a \nabla f(w; D), \qquad
        w \leftarrow w - b \bigl(I - a \nabla^2 f(w; D'')\bigr) \nabla f(\tilde w; D'),

    where :math:`b` is the learning rate of the optimizer. The first-order variant (FO) drops the
    Hessian. The samples of a training batch are split into two parts of equal size for :math:`D`
    and :math:`D'`, with the Hessian into three; batches are drawn at random, so the parts are
    independent, and the last part has the remaining samples. ``inner_lr=0`` is FedAvg on
    :math:`D'`. The logged ``train_loss`` is :math:`f(\tilde w; D')`.

    The gradient and the Hessian at :math:`w` use the batch statistics of their samples (BatchNorm);
    only the pass at :math:`\tilde w` updates the running statistics. The paper aggregates with
    equal weights: ``FedAvg(weighting="uniform")``.
    :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates the model after one step of
    size :math:`a` on all training samples of the client in the column ``kept``.

    Args:
        net: Network from inputs to logits, ``[batch, classes]``.
        inner_lr: Step size :math:`a` of the adaptation, at least 0.
        hessian: Whether to include the Hessian. It takes about twice the time.
        optimizer: Function that creates the optimizer from the parameters.

    Raises:
        FederationError: If ``inner_lr`` is out of range; at the start of a fit, if processes share
            the samples of a client; in a step, if a batch is smaller than the number of its parts.

    Example:
        >>> module = PerFedAvg(nn.Linear(4, 3), inner_lr=0.1)
        >>> module.training_step((torch.ones(4, 4), torch.tensor([0, 1, 2, 0])), 0).shape
        torch.Size([])
    """

    needs_whole_batches = True

    def __init__(
        self,
        net: nn.Module,
        inner_lr: float = 0.01,
        hessian: bool = False,
        optimizer: OptimizerCallable = torch.optim.SGD,
    ) -> None:
        super().__init__(net, optimizer)
        self.inner_lr = check_number("inner_lr", inner_lr, min=0)
        self.hessian = check_flag("hessian", hessian)

    @property
    def _num_parts(self) -> int:
        return 2 + self.hessian

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss after the adaptation; its gradient is that of the local step."""
        size, parts = len(tree_leaves(batch)[0]), self._num_parts
        if size < parts:
            raise FederationError(
                f"PerFedAvg splits each batch into {parts} parts, and a client has a batch of"
                f" {size}: increase batch_size or min_size of the partition, or set drop_last=True"
            )
        at = [size * i // parts for i in range(parts + 1)]
        first, *others = (
            tree_map(lambda t, i=i: t[at[i] : at[i + 1]], batch) for i in range(parts)
        )
        w = self._trained_now()
        gradient = self._gradient({n: p.detach() for n, p in w.items()}, first)
        adapted = {n: p - self.inner_lr * gradient[n] for n, p in w.items()}
        if self.hessian:
            second = self._gradient(w, others[0])
            # Of value 0 and derivative -a Hess f(w; D'').
            adapted = {
                n: p - self.inner_lr * (second[n] - second[n].detach()) for n, p in adapted.items()
            }
        loss = self.loss_with(others[-1], adapted)
        self._record(loss, size)
        return loss

    def federated_personalize(self, batches: Iterable[Any]) -> bool:
        """Make one gradient step of size ``inner_lr`` on the samples of a client.

        Layers are in the modes of the module: those that the user set to ``eval()`` stay so.

        Args:
            batches: All training samples of the client.

        Returns:
            True.
        """
        w = trained_parameters(self.net)
        total, count = {n: torch.zeros_like(p) for n, p in w.items()}, 0
        for batch in batches:
            with torch.enable_grad():
                losses = self.federated_losses(batch)
                found = torch.autograd.grad(losses.sum(), list(w.values()), allow_unused=True)
            for n, gradient in zip(w, found, strict=True):
                total[n] += 0 if gradient is None else gradient
            count += len(losses)
        with torch.no_grad():
            for n, p in w.items():
                p.sub_(total[n] / count, alpha=self.inner_lr)
        return True
