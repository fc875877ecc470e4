"""A client's local objective for classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.functional.summation import add_rows, empty_sum, merged_sums, sum_value
from lightning_fl.objectives.recorder import Recorder
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.types import FederationError


class WeightedMean(Metric):
    """The weighted mean of the finite values, 0-d in float64; NaN without any.

    It does not depend on the order of the values or on how processes share them. Unlike
    torchmetrics' ``MeanMetric`` it never reads a value, so it does not wait for the device.

    Example:
        >>> mean = WeightedMean()
        >>> mean.update(torch.tensor([1.0, 3.0, torch.inf]), torch.tensor([1.0, 3.0, 1.0]))
        >>> mean.compute()
        tensor(2.5000, dtype=torch.float64)
    """

    full_state_update = False
    sums: Tensor  # of the weighted values and of the weights

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", empty_sum((2,)), dist_reduce_fx=merged_sums)

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add values, with weights of the same shape."""
        is_finite = values.isfinite()
        weights = weights.where(is_finite, 0).double()
        values = values.where(is_finite, 0).double() * weights
        add_rows(self.sums, torch.stack([values, weights], -1).reshape(-1, 2))

    def compute(self) -> Tensor:
        """Return the mean."""
        sums = sum_value(self.sums)
        return sums[0] / sums[1]


class ClientModule(LightningModule):
    r"""Cross-entropy + terms, :math:`\frac{1}{|b|} \sum_{i \in b} \ell(w; x_i, y_i) + \sum_j r_j`.

    Logs once a round ``train_loss`` (the mean loss over the local samples that clients trained on,
    terms included, without clients whose loss is not finite), ``val_loss`` and ``val_acc``; in a
    test ``test_loss`` and ``test_acc``. A batch is ``(x, y)`` with class indices ``y``. For another
    task override :meth:`federated_losses`.

    Args:
        net: The network, from inputs to logits, ``[batch, classes]``.
        terms: Further terms of the loss.
        optimizer: Makes the optimizer from the parameters. Its learning rate is what the policy's
            is a ratio to; without a policy's it is used as it is.

    Example:
        >>> module = ClientModule(nn.Linear(4, 3), optimizer=torch.optim.Adam)
        >>> module.federated_losses((torch.zeros(2, 4), torch.tensor([0, 2]))).shape
        torch.Size([2])
    """

    def __init__(
        self,
        net: nn.Module,
        terms: Sequence[Term] = (),
        optimizer: OptimizerCallable = torch.optim.SGD,
    ) -> None:
        super().__init__()
        self.net, self.terms = net, nn.ModuleList(terms)
        # Not a hyperparameter: a checkpoint with a callable in it cannot be loaded safely.
        self.make_optimizer = optimizer
        self.train_loss = WeightedMean()
        # Not scalars: over several processes Lightning would average those without their weights.
        self.val_loss, self.test_loss = (MeanMetric(nan_strategy="disable") for _ in range(2))
        self.val_acc, self.test_acc = (MulticlassAccuracy(average="micro") for _ in range(2))
        #: Parameters that the client started from, by name, for the terms; a ``FederatedLoop`` sets
        #: them where it is not None. Constant, so neither a buffer nor saved.
        self.federated_global_parameters: dict[str, Tensor] | None = {} if len(self.terms) else None
        #: Weight of each sample in the mean, ``[batch]``, summing to 1; None is equal weights.
        #: VectorizedClients with fewer samples than others are filled up with samples of weight 0.
        self.federated_sample_weight: Tensor | None = None
        #: Whether the step heeds them: not that of a child, nor a term of the samples.
        has_own_step = type(self).training_step is not ClientModule.training_step
        self.federated_knows_weights = not has_own_step and not any(t.uses_batch for t in terms)
        #: Looks inside the network, where a term wants that.
        self.recorder: Recorder | None = None
        self._built_for = torch.Size()
        self._client_loss: list[Tensor] = []
        self._client_samples: list[Tensor] = []

    @property
    def federated_local_parameters(self) -> list[str]:
        """Names of the parameters that stay with each client: those of some terms."""
        return [
            f"terms.{i}.{name}"
            for i, term in enumerate(self.terms)
            if term.stays_local
            for name, _ in term.named_parameters()
        ]

    def setup(self, stage: str) -> None:
        """Let the terms make what depends on the shape of a sample."""
        if stage == "fit" and any(t.wants_trace for t in self.terms):
            example = self._example()
            if self.recorder is None or self._built_for != example.shape[1:]:
                self.build_terms(example)

    def _example(self) -> Tensor:
        """Return samples as the network gets them."""
        data: Any = getattr(self.trainer, "datamodule", None)
        if self.example_input_array is None and hasattr(data, "example"):
            return cast("Tensor", data.example()[0])
        if not isinstance(self.example_input_array, Tensor):
            raise FederationError(
                f"{type(self).__name__} needs to know what a sample looks like: use a"
                " FederatedDataModule, or set its example_input_array to a batch of inputs"
            )
        return self.example_input_array

    def build_terms(self, x: Tensor) -> None:
        """Let the terms make what depends on the shape of a sample.

        Args:
            x: Some samples, ``[batch, ...]``; their values do not matter.

        Raises:
            FederationError: If the network cannot be traced, or terms do not fit it.
        """
        if type(self).forward is not ClientModule.forward:
            raise FederationError(
                f"terms that look inside the network run it themselves, and"
                f" {type(self).__name__}.forward would not be asked: put what it does into net"
            )
        wanted = [term for term in self.terms if term.wants_trace]
        points = cast("Term", wanted[0]).points
        if any(term.points != points for term in wanted):
            raise FederationError("terms that look inside one network must name the same points")
        recorder = Recorder(self.net, points)
        params = dict(self.net.named_parameters(prefix="net"))
        if x.is_floating_point() and params:  # a precision plugin has not converted either yet
            x = x.to(next(iter(params.values())))
        with seeded_rng(0, self.device):  # of dropout
            trace = recorder.fixed(params, x)
        for term in wanted:
            cast("Term", term).build(recorder, trace)
        self.recorder, self._built_for = recorder, x.shape[1:]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[batch, classes]``."""
        return cast("Tensor", self.net(x))

    def federated_losses(self, batch: Any, outputs: Tensor | None = None) -> Tensor:
        """Return each sample's loss, ``[batch]``; training and validation use it.

        Args:
            batch: ``(x, y)``.
            outputs: What the network made of ``x``, where that is known already.
        """
        x, y = batch
        return F.cross_entropy(self(x) if outputs is None else outputs, y, reduction="none")

    def on_train_epoch_start(self) -> None:
        """Forget what a round that was cut short has left."""
        self.train_loss.reset()
        self._client_loss, self._client_samples = [], []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Tensor]:
        """Return the loss of a local step; with terms, also ``task_loss``, which has none."""
        trace = None
        if self.recorder is None:
            outputs = self(batch[0])
        else:
            outputs, trace = self.recorder(batch[0])
        losses = self.federated_losses(batch, outputs)
        weight = self.federated_sample_weight
        loss = task_loss = losses.mean() if weight is None else losses @ weight
        start = self.federated_global_parameters
        if start is not None:
            params: dict[str, Tensor] = dict(self.net.named_parameters(prefix="net"))
            if not start:  # Outside of a federation the model stays near where it began.
                start = {n: p.detach().clone() for n, p in params.items()}
                self.federated_global_parameters = start
            fixed = {n: start[n] for n in params}
            own, anchor = ModelView(params, outputs, trace), ModelView(fixed)
            if self.recorder is not None:
                anchor = ModelView(fixed, trace=self.recorder.fixed(fixed, batch[0]))
            loss = loss + sum(term(own, anchor, batch) for term in self.terms)
        self.federated_record(loss, len(losses))
        return loss if start is None else {"loss": loss, "task_loss": task_loss.detach()}

    def federated_record(self, loss: Tensor, count: int | Tensor) -> None:
        """Note the loss of a local step, of one client or of each in the lanes.

        Args:
            loss: Scalar, or ``[lanes]``.
            count: Samples, of the same shape.
        """
        loss = loss.detach()
        if not isinstance(count, Tensor):
            # Filled on the device: to copy the number is to wait for it.
            count = torch.full_like(loss, count, dtype=torch.float32)
        self._client_loss.append(loss * count)
        self._client_samples.append(count)

    def on_client_end(self) -> None:
        """Add the clients' losses to the round's figure: once a client, not once a step."""
        if self._client_loss:
            samples = torch.stack(self._client_samples).sum(0)
            loss = torch.stack(self._client_loss).sum(0) / samples
            self.train_loss.update(loss, samples)
        self._client_loss, self._client_samples = [], []

    def on_train_epoch_end(self) -> None:
        """Log the round's training loss."""
        self.on_client_end()
        self.log("train_loss", self.train_loss, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the validation loss and accuracy."""
        self._evaluate(batch, "val", self.val_loss, self.val_acc)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the test loss and accuracy."""
        self._evaluate(batch, "test", self.test_loss, self.test_acc)

    def _evaluate(
        self, batch: Any, name: str, loss: MeanMetric, accuracy: MulticlassAccuracy
    ) -> None:
        outputs = self(batch[0])
        loss.update(self.federated_losses(batch, outputs))
        accuracy.update(outputs, batch[1])
        self.log(f"{name}_loss", loss)
        self.log(f"{name}_acc", accuracy, prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the logits of a batch."""
        return cast("Tensor", self(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters, those of terms included."""
        return self.make_optimizer(self.parameters())
