"""Client module for classification with additional loss terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fl.contracts.personal import PersonalModel
from lightning_fl.errors import FederationError
from lightning_fl.frozen import complete
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.functional.summation import add_rows, empty_sum, merged_sums, sum_value
from lightning_fl.hooks import attributes_set, overrides
from lightning_fl.objectives.local_network import load_tensors
from lightning_fl.objectives.parameter_groups import ParameterGroup, split_groups
from lightning_fl.objectives.recorder import Recorder
from lightning_fl.objectives.terms import ModelView, Term, TermModule, settable


class _Precise(Metric):
    """Never lower the precision of states, as metrics of a module in half precision do."""

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        def moved(tensor: Tensor) -> Tensor:
            like = fn(tensor.new_empty(0))
            return tensor.to(like.device, torch.promote_types(tensor.dtype, like.dtype))

        before = self._dtype
        applied = super()._apply(moved, exclude_state)  # sets the precision of updates anew
        self._dtype = torch.promote_types(before, self._dtype)
        return applied


class Mean(_Precise, MeanMetric):
    """Compute a mean, at least in single precision."""


class WeightedMean(_Precise):
    """Compute the weighted mean of the finite values as a float64 scalar, NaN if there are none.

    The result is independent of the order of the values and of their distribution over processes.
    Unlike torchmetrics' ``MeanMetric`` it does not read values on the host, so it never
    synchronizes with the device.

    Example:
        >>> mean = WeightedMean()
        >>> mean.update(torch.tensor([1.0, 3.0, torch.inf]), torch.tensor([1.0, 3.0, 1.0]))
        >>> mean.compute()
        tensor(2.5000, dtype=torch.float64)
    """

    full_state_update = False
    sums: Tensor  # sum of the weighted values and sum of the weights

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", empty_sum((2,)), dist_reduce_fx=merged_sums)

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add values.

        Args:
            values: Values of any shape.
            weights: Weights of the same shape.
        """
        is_finite = values.isfinite()
        weights = weights.where(is_finite, 0).double()
        values = values.where(is_finite, 0).double() * weights
        add_rows(self.sums, torch.stack([values, weights], -1).reshape(-1, 2))

    def compute(self) -> Tensor:
        """Return the weighted mean."""
        sums = sum_value(self.sums)
        return sums[0] / sums[1]


class ClientModule(TermModule):
    r"""Train a classifier with cross-entropy and additional loss terms.

    .. math:: \frac{1}{|b|} \sum_{i \in b} \ell(w; x_i, y_i) + \sum_j r_j

    Logs ``train_loss``, ``val_loss`` and ``val_acc`` once per round, and ``test_loss`` and
    ``test_acc`` in a test. ``train_loss`` is the mean loss over the local training samples,
    including terms, without clients with a non-finite loss. A batch is ``(x, y)`` with class
    indices ``y``. For other tasks override :meth:`federated_losses`; accuracies are logged for
    scores of two classes or more and integer labels only. A ``training_step`` of a
    subclass must call ``super().training_step`` to add the terms. Parameters that a subclass
    lists in :attr:`federated_local_parameters` stay with each client.

    Args:
        net: Network from inputs to logits, ``[batch, classes]``.
        terms: Additional terms of the loss.
        optimizer: Function that creates the optimizer from the parameters. A learning rate of the
            policy replaces its learning rate; the ratio of the two scales all parameter groups.

    Example:
        >>> module = ClientModule(nn.Linear(4, 3), optimizer=torch.optim.Adam)
        >>> module.federated_losses((torch.zeros(2, 4), torch.tensor([0, 2]))).shape
        torch.Size([2])
    """

    _uncompared = ("terms.",)

    def __init__(
        self,
        net: nn.Module,
        terms: Sequence[Term] = (),
        optimizer: OptimizerCallable = torch.optim.SGD,
    ) -> None:
        super().__init__()
        self.net, self.terms = net, nn.ModuleList(terms)
        # Not saved as a hyperparameter: a checkpoint with a callable cannot be loaded safely.
        self.make_optimizer = optimizer
        self.train_loss = WeightedMean()
        # Metrics, because Lightning averages scalars over processes without weights.
        self.val_loss, self.test_loss = (Mean(nan_strategy="disable") for _ in range(2))
        self.val_acc, self.test_acc = (MulticlassAccuracy(average="micro") for _ in range(2))
        #: Initial parameters of the client by name, for the terms. A ``FederatedLoop`` sets them
        #: unless the attribute is None. Constant, so neither a buffer nor saved.
        self.federated_global_parameters: dict[str, Tensor] | None = {} if len(self.terms) else None
        self._settable = settable(terms)
        #: Numbers of terms that a policy may set, by name, and their inputs. None is the value of
        #: the term itself.
        inputs = [name for term in terms for name in term.inputs]
        self.federated_hyperparameters: dict[str, Any] = dict.fromkeys([*self._settable, *inputs])
        self._hyperparameter_limits = {
            name: terms[i].hyperparameters[each] for name, (i, each) in self._settable.items()
        }
        # A step overridden in a subclass and terms that use the batch do not support weights.
        has_own_step = type(self).training_step is not ClientModule.training_step
        self._knows_weights = not has_own_step and not any(t.uses_batch for t in terms)
        #: Terms that the training step of a subclass has not used yet, until a warning names them.
        self._unused_terms = set(range(len(terms))) if has_own_step else set[int]()
        #: Recorder of activations, if a term requires one.
        self.recorder: Recorder | None = None
        # In a tuple, so that it is not a submodule.
        self._losses = (_Losses(self),)
        self._built_for = torch.Size()
        self._discard_losses()

    @property
    def federated_local_parameters(self) -> list[str]:
        """Names of the parameters and buffers of terms that stay local to each client."""
        return [
            f"terms.{i}.{name}"
            for i, term in enumerate(self._own_terms())
            if term.stays_local
            for name, _ in (*term.named_parameters(), *term.named_buffers())
            if name not in term.exchanged
        ]

    def _own_terms(self) -> list[Term]:
        return cast("list[Term]", list(self.terms))

    def setup(self, stage: str) -> None:
        """Check the terms, and build those that depend on the network or on a sample's shape."""
        if stage != "fit":
            return
        for term in self._own_terms():
            term.prepare(self)
        self._check_terms()
        if any(t.wants_trace for t in self.terms):
            example = self._example()
            if self.recorder is None or self._built_for != example.shape[1:]:
                self.build_terms(example)

    def _check_terms(self) -> None:
        """Refuse options that would silently change what a term means."""
        clip = self.trainer.gradient_clip_val
        by_norm = self.trainer.gradient_clip_algorithm != "value"
        for term in self._own_terms():
            name = type(term).__name__
            if term.is_independent and clip and by_norm:
                raise FederationError(
                    f"gradient_clip_val={clip} clips the joint norm of the client model and of the"
                    f" second model of {name}, so that each would change the other: remove it, or"
                    " set gradient_clip_algorithm=value"
                )
            if term.parameter_groups() and (
                type(self).configure_optimizers is not ClientModule.configure_optimizers
            ):
                raise FederationError(
                    f"{name} has parameters with optimizer options of their own, and"
                    f" {type(self).__name__}.configure_optimizers does not set them: pass the"
                    " optimizer to ClientModule instead of overriding configure_optimizers"
                )
        second = [type(term).__name__ for term in self._own_terms() if term.is_independent]
        if len(second) > 1:
            raise FederationError(
                f"terms has two personal models ({', '.join(second)}), and a client has one: remove"
                " one of them"
            )

    def _example(self) -> Tensor:
        """Return example inputs of the network."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # a connector's
        example: Any = self.example_input_array
        if example is None and (batch := getattr(data, "example", lambda: None)()) is not None:
            example = batch[0]
        if not isinstance(example, Tensor):
            raise FederationError(
                f"{type(self).__name__} requires example inputs, which the data module does not"
                " have: set example_input_array of the module to a batch of inputs"
            )
        return example

    def build_terms(self, x: Tensor) -> None:
        """Build the terms that depend on the shape of a sample.

        Args:
            x: Samples, ``[batch, ...]``. Only shape and dtype are used.

        Raises:
            FederationError: If the network cannot be traced, or is incompatible with a term.
        """
        if type(self).forward is not ClientModule.forward:
            raise FederationError(
                f"terms that record activations run net directly, so {type(self).__name__}.forward"
                " would not be called: move its computation into net"
            )
        wanted = [term for term in self.terms if term.wants_trace]
        points = cast("Term", wanted[0]).points
        if any(term.points != points for term in wanted):
            kinds = ", ".join(type(term).__name__ for term in wanted)
            raise FederationError(
                f"all terms that record activations ({kinds}) must use the same points: name the"
                " same modules in each, such as RepresentationMatching(points=['layer']) and"
                " MOON(point='layer')"
            )
        recorder = Recorder(self.net, points)
        params = dict(self.net.named_parameters(prefix="net"))
        if x.is_floating_point() and params:  # not converted by a precision plugin yet
            x = x.to(next(iter(params.values())))
        with seeded_rng(0, self.device):  # dropout draws random numbers
            trace = recorder.fixed(params, x)
        for term in wanted:
            cast("Term", term).build(recorder, trace)
        self.recorder, self._built_for = recorder, x.shape[1:]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add frozen parameters that the checkpoint was saved without, from this module.

        A ``FederatedLoop`` has added them already. This is for ``load_from_checkpoint``.
        """
        complete(checkpoint, self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[batch, classes]``."""
        return cast("Tensor", self.net(x))

    def federated_losses(self, batch: Any, outputs: Tensor | None = None) -> Tensor:
        """Return the loss of each sample, ``[batch]``, for training and validation.

        Args:
            batch: Batch ``(x, y)``.
            outputs: Network outputs for ``x``. None computes them.
        """
        x, y = batch
        return F.cross_entropy(self(x) if outputs is None else outputs, y, reduction="none")

    def loss_with(self, batch: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch, without terms, for other tensors of the network.

        Args:
            batch: Batch ``(x, y)``.
            tensors: Parameters and buffers that replace those of the module, by name. Buffers are
                updated in place, as by a training step.

        Example:
            >>> module = ClientModule(nn.Linear(2, 3))
            >>> zeros = {"net.weight": torch.zeros(3, 2), "net.bias": torch.zeros(3)}
            >>> module.loss_with((torch.ones(4, 2), torch.tensor([0, 1, 2, 0])), zeros).exp()
            tensor(3.)
        """
        given = {f"module.{name}": tensor for name, tensor in tensors.items()}
        losses: Tensor = functional_call(self._losses[0], given, (batch,))
        return self.mean_of(losses)

    def _uses_client(self, hook: str) -> bool:
        """Return whether a subclass or a term overrides a client hook."""
        return overrides(self, hook, ClientModule) or any(
            overrides(term, hook, Term) for term in self._own_terms()
        )

    def on_client_start(self) -> None:
        """Set the tensors of terms for the first local step of a client.

        Called once per client and round, with the tensors of the client in the module, or once for
        clients that train at once if no term uses them. A subclass that overrides it must call
        ``super().on_client_start()``.
        """
        for term in self._own_terms():
            term.on_client_start(self)

    def on_train_epoch_start(self) -> None:
        """Clear the records of an interrupted round."""
        self.train_loss.reset()
        self._discard_losses()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any]:
        """Return the loss of a local step; with terms, also ``task_loss`` and ``terms`` alone."""
        trace: Any = None
        if self.recorder is None:
            outputs = self(batch[0])
        else:
            outputs, trace = self.recorder(batch[0])
        losses = self.federated_losses(batch, outputs)
        loss = task_loss = self.mean_of(losses)
        start = self.federated_global_parameters
        if start is not None:
            params: dict[str, Tensor] = dict(self.net.named_parameters(prefix="net"))
            if not start:  # Outside a federation, use the initial model.
                start = {n: p.detach().clone() for n, p in params.items()}
                self.federated_global_parameters = start
                for term in self._own_terms():
                    term.on_client_start(self)
            fixed = {n: start[n] for n in params}
            own, anchor = ModelView(params, outputs, trace, self), ModelView(fixed)
            if self.recorder is not None and any(
                t.wants_trace and t.wants_global_trace for t in self.terms
            ):
                anchor = ModelView(fixed, trace=self.recorder.fixed(fixed, batch[0]))
            values = [self._term(i, own, anchor, batch) for i in range(len(self.terms))]
            loss = loss + sum(values)
        self._record(loss, len(losses))
        if start is None:
            return loss
        terms = {type(t).__name__: v for t, v in zip(self.terms, values, strict=True)}
        return {"loss": loss, "task_loss": task_loss.detach(), "terms": terms}

    def _term(self, i: int, own: ModelView, anchor: ModelView, batch: Any) -> Tensor:
        """Return the value of a term, with the numbers of the policy in the place of its own."""
        self._unused_terms.discard(i)
        term, values = self.terms[i], self.federated_hyperparameters
        names = [(name, each) for name, (j, each) in self._settable.items() if j == i]
        names += [(name, name) for name in cast("Term", term).inputs]
        given = {each: values[name] for name, each in names if values[name] is not None}
        with attributes_set(term, given):
            return cast("Tensor", term(own, anchor, batch))

    def _record(self, loss: Tensor, count: int | Tensor) -> None:
        """Record the loss of a local step, for one client or for clients that train at once."""
        loss = loss.detach()
        if not isinstance(count, Tensor):
            # Fill on the device: a copy from the host would synchronize.
            count = torch.full_like(loss, count, dtype=torch.float32)
        self._client_loss.append(loss * count)
        self._client_samples.append(count)

    def _discard_losses(self) -> None:
        """Discard the recorded losses of a client, or of a round without clients."""
        self._client_loss: list[Tensor] = []
        self._client_samples: list[Tensor] = []

    def on_client_end(self) -> None:
        """Set the tensors of terms, and add the recorded client losses to ``train_loss``.

        Called once per client, after its local training, with the tensors of the client in the
        module, or once for clients that train at once if no term uses them. Changes to local
        parameters are kept. A subclass that overrides it must call ``super().on_client_end()``.
        """
        for term in self._own_terms():
            term.on_client_end(self)
        if self._unused_terms:
            unused = ", ".join(type(self.terms[i]).__name__ for i in sorted(self._unused_terms))
            self._unused_terms.clear()
            rank_zero_warn(
                f"{type(self).__name__}.training_step did not use the terms of the module"
                f" ({unused}): call"
                " super().training_step(batch, batch_idx), which adds them, or override"
                " federated_losses instead"
            )
        self._add_client_losses()

    def _add_client_losses(self) -> None:
        if self._client_loss:
            samples = torch.stack(self._client_samples).sum(0)
            loss = torch.stack(self._client_loss).sum(0) / samples
            self.train_loss.update(loss, samples)
        self._discard_losses()

    def on_train_epoch_end(self) -> None:
        """Log the training loss of the round, if it had clients."""
        self._add_client_losses()  # without a FederatedLoop there is no on_client_end
        # The metric synchronizes processes, so they must agree on whether to log it.
        decide = self.trainer.strategy.reduce_boolean_decision
        if decide(self.train_loss.update_called, all=False):
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
        self.log(f"{name}_loss", loss)
        if not batch[1].is_floating_point() and outputs.ndim > 1 and outputs.shape[1] > 1:
            accuracy.update(outputs, batch[1])
            self.log(f"{name}_acc", accuracy, prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the logits of a batch."""
        return cast("Tensor", self(batch[0]))

    def federated_personalize(self, batches: Iterable[Any]) -> bool:
        """Load the personal model of the client, if a term has one.

        See :class:`~lightning_fl.callbacks.PersonalizedEvaluation`.

        Args:
            batches: Training samples of the client.

        Returns:
            Whether there is a personal model.
        """
        for term in self._own_terms():
            if (tensors := term.personal_model(self)) is not None:
                load_tensors(self.net, tensors)
                return True
        return False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters, including those of terms."""
        optimizer = self.make_optimizer(self.parameters())
        groups: list[ParameterGroup] = []
        for term in self._own_terms():
            if term.is_independent and isinstance(optimizer, PersonalModel | torch.optim.LBFGS):
                raise FederationError(
                    f"{type(optimizer).__name__} cannot train the second model of"
                    f" {type(term).__name__} apart from the client model: use SGD or Adam"
                )
            groups += term.parameter_groups()
        return split_groups(optimizer, groups)


class _Losses(nn.Module):
    """Compute the losses of a module as a forward pass, for ``functional_call``."""

    def __init__(self, module: ClientModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        return self.module.federated_losses(batch)
