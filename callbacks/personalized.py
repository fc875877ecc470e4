"""Evaluation of global and personal models on the test samples of each client."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_fl.aggregators import NeuronMatching
from lightning_fl.callbacks.client_scores import ClientScores
from lightning_fl.callbacks.client_table import KINDS, summary, write_table
from lightning_fl.callbacks.federated_loop import loop_of
from lightning_fl.errors import FederationError
from lightning_fl.federation.measures import accuracy, evaluate
from lightning_fl.files import error_context
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.options import check_flag, check_integer, check_number
from lightning_fl.runners import user_module
from lightning_fl.runners.module_copy import copied_module
from lightning_fl.strategies import gathered


class PersonalizedEvaluation(Callback):
    r"""Evaluate the global model and personal models of each client on its test samples.

    For each client, up to five models are evaluated:

    - ``global``: the model of the server, with client-local tensors at their initial values;
      omitted for clients without tensors or a start model of their own;
    - ``server``: the model from which the client would start the next round, including its local
      tensors;
    - ``personal``: the same model after local fine-tuning on the client's training samples, with
      the loss and optimizer of the module, the learning rate and other numbers of the policy, and
      the gradient clipping of the Trainer; all parameters train together in each step, also if the
      loop has phases or the Trainer accumulates gradients;
    - ``kept``: the personal model of the method, if it has one besides the trained model;
    - ``local``: a model trained on this client only, from the initial global model, with one local
      epoch per round.

    If the method has a personal model of its own, ``personal`` and ``local`` evaluate it after the
    training of all models. So the global and the personal model of a method are in the columns

    ==================================================  ==========  ============
    method                                              global      personal
    ==================================================  ==========  ============
    FedAvg and fine-tuning                              server      personal
    local layers or statistics (FedPer, FedBN), FedEM   global      server
    Clustered, IFCA, Gossip, FedAMP                     global      server
    pFedMe (``optimizer_state: keep``)                  server      kept
    Ditto, APFL, Fed-RoD, Per-FedAvg, FedALA            server      kept
    ==================================================  ==========  ============

    For each kind, the callback logs the mean over clients, the mean weighted by test samples, the
    standard deviation and variance over clients (fairness), and the mean over the worst decile of
    clients, as ``personal/mean``, ``personal/weighted``, ``personal/std``, ``personal/variance``
    and ``personal/worst``; ``personal/hurt`` is the share of clients with a lower score after
    fine-tuning than before it. The table of clients,
    ``clients.csv``, is written beside the table of rounds.

    Clients that never train, ``FederatedDataModule(unseen_clients=...)``, are evaluated in the same
    way (Wu et al., 2022). Their figures are ``unseen_server/mean``, ``unseen_personal/hurt`` and so
    on, and their rows have a 1 in the column ``unseen``. Such a client starts as one that was never
    sampled: from the model of the server, also if the rule has several models; with client-local
    tensors at their initial values, and with mixture weights (FedEM) from its own samples. Choose
    ``steps`` by the clients that train, not by the unseen ones.

    Any module or optimizer can have a personal model: it has a method
    ``federated_personalize(batches)`` that writes this model into the parameters and returns
    whether there is one. So can an aggregation rule: ``ClientPart.personal_models``.

    Requires ``FederatedDataModule(local_test_size=...)``.

    Args:
        steps: Number of local steps of ``personal``.
        local_steps: Number of local steps of ``local``; 0 omits it.
        lr: Learning rate of ``personal`` and ``local``. None uses the learning rate of the policy,
            or of the optimizer if the policy does not set one.
        every_n_rounds: Number of rounds between evaluations; None evaluates after the last round
            only. The last round is evaluated in any case.
        metric: Function of module and batch that returns one score per sample, higher is better;
            None is accuracy, for batches ``(x, y)`` and a module whose ``forward`` returns one
            score per class.
        save_models: Whether to write the model of each client, the one scored as ``kept``, else as
            ``personal``, else as ``server``, to ``client_models/CLIENT.pt`` beside ``clients.csv``.
            A module of the same class loads it: ``module.load_state_dict(torch.load(path))``.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if there is no
            :class:`FederatedLoop`, there are no local test samples, the metric does not return one
            score per sample, or a module that optimizes manually is to be trained.
    """

    def __init__(
        self,
        steps: int = 10,
        local_steps: int = 0,
        lr: float | None = None,
        every_n_rounds: int | None = None,
        metric: Callable[[LightningModule, Any], Tensor] | None = None,
        save_models: bool = False,
    ) -> None:
        self.steps = check_integer("steps", steps, min=0)
        self.local_steps = check_integer("local_steps", local_steps, min=0)
        self.lr = check_number("lr", lr, above=0, optional=True)
        self.every_n_rounds = check_integer("every_n_rounds", every_n_rounds, min=1, optional=True)
        self.metric = metric or accuracy
        self.save_models = check_flag("save_models", save_models)
        #: Table of the last evaluation, one row per client.
        self.rows: list[dict[str, float]] = []
        self._measured_at = 0
        self._first: Tensor | None = None

    @property
    def metric_name(self) -> str:
        """Name of the metric in reports: that of its function or class."""
        name: str = getattr(self.metric, "__name__", type(self.metric).__name__)
        return "score" if name == "<lambda>" else name

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there are a FederatedLoop and local test samples."""
        if stage != "fit":
            return
        self._loop = loop_of(trainer, "PersonalizedEvaluation")
        self._loop.evaluates_clients = True
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not getattr(data, "local_tests", None):
            raise FederationError(
                "PersonalizedEvaluation requires test samples for each client: set local_test_size"
                " of the data module (data.init_args.local_test_size=0.2)"
            )
        user = user_module(pl_module)
        if (self.steps or self.local_steps) and not user.automatic_optimization:
            raise FederationError(
                f"PersonalizedEvaluation(steps={self.steps}) trains a copy of"
                f" {type(user).__name__}, which optimizes manually: set steps=0 and local_steps=0"
            )
        if isinstance(self._loop.aggregator, NeuronMatching):
            raise FederationError(
                "PersonalizedEvaluation does not support"
                f" {type(self._loop.aggregator).__name__}, which changes the width of the global"
                " network: remove one of them"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the initial global model, and score one batch before anything is trained."""
        if not self._loop.round:  # the callback may have been part of an earlier run
            self._first, self._measured_at = None, 0
        if self._first is None and self._loop.round and self.local_steps:
            raise FederationError(
                "local_steps requires the initial global model, which the checkpoint does not"
                " contain: set local_steps=0, or set it from the start of a run"
            )
        self._try_metric(trainer)
        if self._first is None:
            self._first = self._loop.runner.read().vector

    def _try_metric(self, trainer: Trainer) -> None:
        """Score the first test batch of a client, so that a fit does not fail at its end."""
        runner, data = self._loop.runner, trainer.datamodule  # type: ignore[attr-defined]
        module = copied_module(runner.module, runner.constants.parameters.values())
        with seeded_rng(0, module.device):
            batches = list(islice(data.samples_of(0, test=True), 1))
            if data.is_stream:  # fine-tuning reads streams ahead
                next(data.steps_of(0, torch.Generator()))
        what = (
            f"PersonalizedEvaluation needs one score per sample of {type(module).__name__}: give a"
            " metric, a function of module and batch that returns a tensor [samples]"
        )
        with error_context(f"{what}, as {self.metric_name} fails", Exception):
            for scores in evaluate(trainer, module, batches, self.metric, seed=0):
                len(scores)  # a single number has none

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate, log and write the table if an evaluation is due."""
        round, every = self._loop.round, self.every_n_rounds
        is_last = round == trainer.max_epochs or trainer.should_stop
        is_due = is_last or (every is not None and round % every == 0)
        if not is_due or self._loop.plan_of_the_round is None:
            return
        for name, value in self._measure(trainer, round).items():
            pl_module.log(name, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the last round if EarlyStopping ended the fit after ``on_train_epoch_end``."""
        round = self._loop.round
        if round and self._measured_at != round:
            figures = self._measure(trainer, round)
            for logger in trainer.loggers:
                logger.log_metrics(figures, round)  # the step of all metrics of the round

    def rows_of(self, round: int) -> list[dict[str, float]]:
        """Return one row per client that trains if a round was evaluated, counted from 1."""
        seen = [row for row in self.rows if "unseen" not in row]
        return seen if self._measured_at == round else []

    def _measure(self, trainer: Trainer, round: int) -> dict[str, float]:
        """Evaluate all clients, write the table, and return the metrics to log."""
        self._measured_at = round
        self.rows = self._client_rows(trainer, round)
        # Called on all processes: Lightning broadcasts the log folder from the first one.
        if (path := self._loop.table_path(trainer)) is not None:
            names = trainer.datamodule.client_names  # type: ignore[attr-defined]
            write_table(path.with_name("clients.csv"), self.rows, names)
        return {
            f"{prefix}{kind}/{figure}": value
            for prefix in ("", "unseen_")
            for kind in KINDS
            for figure, value in summary(
                [row for row in self.rows if ("unseen" in row) == bool(prefix)], kind
            ).items()
        }

    def _client_rows(self, trainer: Trainer, round: int) -> list[dict[str, float]]:
        """Return one row per client. The clients are split over the processes."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        count = len(data.local_tests)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            count = min(count, 2)
        scores = ClientScores(trainer, self._loop, self.metric, self.lr)
        if self.save_models and (path := self._loop.table_path(trainer)) is not None:
            scores.folder = path.with_name("client_models")
        own = [
            scores.row(client, round, self.steps, self.local_steps, self._first)
            for client in range(trainer.global_rank, count, trainer.world_size)
        ]
        every = gathered(own) if trainer.world_size > 1 else [own]
        return sorted((row for each in every for row in each), key=lambda row: row["client"])

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the initial global model if ``local_steps`` is set."""
        return {"first": self._first} if self.local_steps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the initial global model."""
        self._first = state_dict.get("first")
