"""Baselines for neuron matching: ensembles, averaging and distillation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fl.aggregators import NeuronMatching
from lightning_fl.aggregators.matching.layer_stack import Layers, LayerStack
from lightning_fl.callbacks.federated_loop import loop_of
from lightning_fl.federation.measures import evaluating, on_device
from lightning_fl.functional.randomness import RandomStream, derive_seed, generator, seeded_rng
from lightning_fl.options import check_integer, check_number
from lightning_fl.runners import user_module
from lightning_fl.types import FederationError


class MatchingBaselines(Callback):
    r"""Evaluate baselines for neuron matching on the client networks of each round.

    After each round, the accuracy of these baselines is logged on the validation samples
    (Yurochkin et al., 2019, section 4):

    - ``ensemble/uniform``: the mean of the probabilities of all networks,
      :math:`\frac{1}{J} \sum_j p_{jk}`;
    - ``ensemble/weighted``: :math:`\sum_j \frac{n_{jk}}{\sum_i n_{ik}} p_{jk}` with :math:`n_{jk}`
      samples of class :math:`k` at client :math:`j`;
    - ``ensemble/local``: the mean accuracy of the individual networks;
    - ``ensemble/average``: one network with the position-wise mean of all parameters;
    - ``ensemble/distilled``: a ``student`` trained on the inputs of all clients to match the
      probabilities of the uniform ensemble, with cross-entropy and Adam (Hinton et al., 2015).

    In tests after a fit, the names are ``test_ensemble/uniform`` and so on. The module must map
    ``x`` of a batch ``(x, y)`` to logits. The client networks are saved in checkpoints, for
    ``pfnm.py``; they are not read from there.

    Args:
        student: Network for distillation, which starts from these parameters in each round. None
            omits distillation. The student is trained on pooled inputs of all clients.
        epochs: Number of epochs of distillation per round.
        lr: Learning rate of distillation.
        batch_size: Batch size of distillation.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if the aggregator is
            not a :class:`~lightning_fl.aggregators.NeuronMatching`.
    """

    def __init__(
        self,
        student: nn.Module | None = None,
        epochs: int = 10,
        lr: float = 0.01,
        batch_size: int = 32,
    ) -> None:
        self.epochs = check_integer("epochs", epochs, min=1)
        self.lr = check_number("lr", lr, above=0)
        self.batch_size = check_integer("batch_size", batch_size, min=1)
        #: Initial student of each distillation; a copy, so that the user's network stays unchanged.
        self._first = copy.deepcopy(student)
        #: Student after the last distillation.
        self.student = copy.deepcopy(student)
        #: Client networks of the last round.
        self.networks: list[Layers] = []
        #: Number of samples per network and class, ``[J, classes]``; None if unknown.
        self.class_counts: Tensor | None = None
        self._votes: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        self._right = torch.zeros(1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the aggregator matches neurons."""
        self._loop = loop_of(trainer, "MatchingBaselines")
        rule = self._loop.aggregator
        if not isinstance(rule, NeuronMatching):
            raise FederationError(
                "MatchingBaselines requires the aggregator PFNM, StreamingPFNM or FedMA, got"
                f" {type(rule).__name__}: choose one of these, or remove MatchingBaselines"
            )
        self._rule = rule

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the student to the device of the module."""
        own = next(pl_module.parameters())
        for each in (self._first, self.student):
            if each is not None:
                each.to(own.device, own.dtype)

    def _take(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the client networks of the aggregated round and distill them, once per round."""
        ids, networks = self._rule.returned()
        if not ids:
            return
        counts = self._rule.class_counts
        self.networks = networks
        self.class_counts = None if counts is None else counts[ids]
        if self._first is not None:
            with torch.inference_mode(False):  # that of validation forbids training
                first = copy.deepcopy(self._first)
                self.student = self._distilled(trainer, pl_module, ids, first)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the networks of a round without validation."""
        self._take(trainer, pl_module)

    @torch.no_grad()
    def _probabilities(self, module: nn.Module, x: Any) -> Tensor:
        """Return the probabilities of each network, ``[J, n, classes]``."""
        chain: LayerStack = self._rule.module_chain
        probabilities = []
        for layers in self.networks:
            with chain.holding(layers):
                probabilities.append(module(x).softmax(1))
        return torch.stack(probabilities)

    def _distilled(
        self, trainer: Trainer, pl_module: LightningModule, ids: list[int], student: nn.Module
    ) -> nn.Module:
        """Train a student to match the uniform ensemble."""
        module, data = user_module(pl_module), trainer.datamodule  # type: ignore[attr-defined]
        precision = trainer.precision_plugin
        key = (RandomStream.DISTILLATION, self._loop.round)
        seed = derive_seed(self._loop.run_seed, *key)
        with evaluating(module), seeded_rng(seed, pl_module.device):
            batches = [on_device(trainer, b) for client in ids for b in data.samples_of(client)]
            x = torch.cat([x for x, _ in batches])
            with precision.val_step_context():
                each = [self._probabilities(module, part).mean(0) for part, _ in batches]
            wanted = torch.cat(each)
            optimizer = torch.optim.Adam(student.parameters(), self.lr, fused=True)
            random = generator(self._loop.run_seed, *key)
            with torch.enable_grad():
                for _ in range(self.epochs):
                    order = torch.randperm(len(x), generator=random).to(x.device)
                    for index in order.split(self.batch_size):
                        with precision.val_step_context():
                            loss = cross_entropy(student(x[index]), wanted[index])
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
        return student

    # --- evaluation -------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the networks of the round and reset the counts."""
        self._take(trainer, pl_module)
        self._begin(pl_module)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the counts."""
        self._begin(pl_module)

    def _begin(self, pl_module: LightningModule) -> None:
        # The average network is created here, and inference tensors could not be saved or trained.
        with torch.inference_mode(False):
            self._votes = self._judges(user_module(pl_module)) if self.networks else {}
            self._right = torch.zeros(
                len(self._votes) + 1, dtype=torch.float64, device=pl_module.device
            )

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *index: int
    ) -> None:
        """Count correct predictions."""
        self._count(trainer, pl_module, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *index: int
    ) -> None:
        """Count correct predictions."""
        self._count(trainer, pl_module, batch)

    def _count(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if not self._votes:
            return
        module, (x, y) = user_module(pl_module), batch
        # The module's parameters are swapped, and inference tensors could not be trained later.
        with torch.inference_mode(False), torch.no_grad(), evaluating(module):
            with trainer.precision_plugin.val_step_context():
                each = self._probabilities(module, x)
                hits = [judge(x, each, y) for judge in self._votes.values()]
            counts = torch.stack([*hits, torch.ones_like(y).sum()])
            self._right = self._right + counts.to(self._right)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies on the validation samples."""
        if not trainer.sanity_checking:
            self._log(trainer, pl_module, "")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies on the test samples."""
        self._log(trainer, pl_module, "test_")

    def _log(self, trainer: Trainer, pl_module: LightningModule, prefix: str) -> None:
        right = self._right
        if trainer.world_size > 1:
            torch.distributed.all_reduce(right)
        for name, count in zip(self._votes, right, strict=False):
            pl_module.log(f"{prefix}ensemble/{name}", (count / right[-1]).float())

    def _judges(self, module: nn.Module) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Return functions of samples, probabilities and labels that count correct predictions."""

        def hits(votes: Tensor, y: Tensor) -> Tensor:
            return (votes.argmax(-1) == y).double().sum(-1)

        judges: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "uniform": lambda x, each, y: hits(each.mean(0), y),
            "local": lambda x, each, y: hits(each, y).mean(),
        }
        if (counts := self.class_counts) is not None:
            share = counts.double() / counts.sum(0).clamp(min=1)
            judges["weighted"] = lambda x, each, y: hits((each * share.to(each)[:, None]).sum(0), y)
        if len({tuple(w.shape for w, _ in layers) for layers in self.networks}) == 1:
            mean = [
                tuple(torch.stack(tensors).mean(0) for tensors in zip(*layer, strict=True))
                for layer in zip(*self.networks, strict=True)
            ]

            def average(x: Tensor, each: Tensor, y: Tensor) -> Tensor:
                with self._rule.module_chain.holding([(w, b) for w, b in mean]):
                    return hits(module(x), y)

            judges["average"] = average
        if (student := self.student) is not None:

            def distilled(x: Tensor, each: Tensor, y: Tensor) -> Tensor:
                with evaluating(student):
                    return hits(student(x), y)

            judges["distilled"] = distilled
        return judges

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the networks, the class counts and the student."""
        return {
            "networks": [
                [tensor for layer in layers for tensor in layer] for layers in self.networks
            ],
            "class_counts": self.class_counts,
            "student": None if self.student is None else self.student.state_dict(),
        }
