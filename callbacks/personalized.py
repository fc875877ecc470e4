"""Evaluation of global and personal models on the test samples of each client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.callbacks.client_table import KINDS, summary, write_table
from lightning_fl.callbacks.federated_loop import loop_of
from lightning_fl.federation.compare import compare
from lightning_fl.federation.loss_scale import without_scale
from lightning_fl.federation.measures import accuracy, evaluating, on_device
from lightning_fl.federation.memory import runner_rows
from lightning_fl.federation.round import call_hook
from lightning_fl.files import one_line
from lightning_fl.functional.randomness import RandomStream, derive_seed, generator, seeded_rng
from lightning_fl.options import check_integer, check_number
from lightning_fl.runners import SequentialRunner, optimizers_in, user_module
from lightning_fl.strategies import gathered
from lightning_fl.types import AdaptiveModel, FederationError, PersonalModel, ServerState

#: Types of attributes that a copy of a module shares with the original.
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)


class PersonalizedEvaluation(Callback):
    r"""Evaluate the global model and personal models of each client on its test samples.

    For each client, up to five models are evaluated:

    - ``global``: the model of the server, with client-local tensors at their initial values;
      omitted for clients without tensors or a start model of their own;
    - ``server``: the model from which the client would start the next round, including its local
      tensors;
    - ``personal``: the same model after local fine-tuning on the client's training samples, with
      the loss and optimizer of the module, the learning rate and other numbers of the policy, and
      the gradient clipping of the Trainer;
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
    Clustered, Gossip                                   global      server
    pFedMe (``optimizer_state: keep``)                  server      kept
    Ditto, APFL, Per-FedAvg                             server      kept
    ==================================================  ==========  ============

    For each kind, the callback logs the mean over clients, the mean weighted by test samples, the
    standard deviation and variance over clients (fairness), and the mean over the worst decile of
    clients, as ``personal/mean``, ``personal/weighted``, ``personal/std``, ``personal/variance``
    and ``personal/worst``. A table of clients and a figure are written beside the table of rounds.

    Any module or optimizer can have a personal model: it has a method
    ``federated_personalize(batches)`` that writes this model into the parameters and returns
    whether there is one. A module with local tensors can have a method ``federated_adapt(batches)``
    that sets them for a client that has not trained yet.

    Requires ``FederatedDataModule(local_test_size=...)``.

    Args:
        steps: Number of local steps of ``personal``.
        local_steps: Number of local steps of ``local``; 0 omits it.
        lr: Learning rate of ``personal`` and ``local``. None uses the learning rate of the policy,
            or of the optimizer if the policy does not set one.
        every_n_rounds: Number of rounds between evaluations; None evaluates after the last round
            only.
        metric: Function of module and batch that returns one score per sample, higher is better;
            None is accuracy, for batches ``(x, y)`` and a module whose ``forward`` returns one
            score per class.
        name: Name of the files, without ``.csv`` and ``.png``.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if there is no
            :class:`FederatedLoop`, there are no local test samples, or the metric does not return
            one score per sample.
    """

    def __init__(
        self,
        steps: int = 10,
        local_steps: int = 0,
        lr: float | None = None,
        every_n_rounds: int | None = None,
        metric: Callable[[LightningModule, Any], Tensor] | None = None,
        name: str = "clients",
    ) -> None:
        self.steps = check_integer("steps", steps, min=0)
        self.local_steps = check_integer("local_steps", local_steps, min=0)
        self.lr = check_number("lr", lr, above=0, optional=True)
        self.every_n_rounds = check_integer("every_n_rounds", every_n_rounds, min=1, optional=True)
        self.metric, self.name = metric or accuracy, name
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
        module = user_module(pl_module)
        if self.metric is accuracy and type(module).forward is LightningModule.forward:
            raise FederationError(
                f"PersonalizedEvaluation calls the module on a batch, and {type(module).__name__}"
                " has no forward: add one that returns one score per class, or give a metric"
            )
        if isinstance(self._loop.aggregator, NeuronMatching):
            raise FederationError(
                "PersonalizedEvaluation does not support"
                f" {type(self._loop.aggregator).__name__}, which changes the width of the global"
                " network: remove one of them"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the initial global model, and score one batch before anything is trained."""
        if self._first is None and self._loop.round and self.local_steps:
            raise FederationError(
                "local_steps requires the initial global model, which the checkpoint does not"
                " contain: set local_steps=0, or set it from the start of a run"
            )
        self._try_metric(trainer)
        now = self._loop.runner.read().vector
        self._first = now if self._first is None else self._first
        compare(self._first, now, "the first model of PersonalizedEvaluation")

    def _try_metric(self, trainer: Trainer) -> None:
        """Score the first test batch of a client, so that a fit does not fail at its end."""
        runner, data = self._loop.runner, trainer.datamodule  # type: ignore[attr-defined]
        module = _copied(runner.module, runner.constants.parameters.values())
        own = self.metric is accuracy
        remedy = "give a metric" if own else "check the metric"
        with evaluating(module), torch.no_grad(), seeded_rng(0, module.device):
            batch = next(data.samples_of(0, test=True), None)
            if batch is None:
                return
            batch = on_device(trainer, batch)
            try:
                found = self.metric(module, batch)
            except Exception as error:
                what = "the accuracy" if own else "the metric"
                raise FederationError(
                    f"PersonalizedEvaluation cannot compute {what} of {type(module).__name__}"
                    f" on a batch of test samples ({type(error).__name__}: {one_line(error)}):"
                    f" {remedy}, a function of module and batch that returns one score per"
                    " sample"
                ) from error
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        if not shape:
            got = "a single number" if shape == () else f"a {type(found).__name__}"
            raise FederationError(
                f"PersonalizedEvaluation needs one score per sample, got {got} for a batch"
                f" of test samples: {remedy} that returns a tensor of the shape [samples]"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate, log and write the table if an evaluation is due."""
        round = trainer.current_epoch + 1
        is_last = round == trainer.max_epochs or trainer.should_stop
        if not (is_last if self.every_n_rounds is None else round % self.every_n_rounds == 0):
            return
        for name, value in self._measure(trainer, round).items():
            pl_module.log(name, value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the last round if EarlyStopping ended the fit after ``on_train_epoch_end``."""
        round = self._loop.round
        if self.every_n_rounds is None and round and self._measured_at != round:
            figures = self._measure(trainer, round)
            for logger in trainer.loggers:
                logger.log_metrics(figures, trainer.global_step - 1)

    def _measure(self, trainer: Trainer, round: int) -> dict[str, float]:
        """Evaluate all clients, write the table, and return the metrics to log."""
        self._measured_at = round
        self.rows = self._measured(trainer, round)
        # Called on all processes: Lightning broadcasts the log folder from the first one.
        if (path := self._loop.table_path(trainer)) is not None:
            names = trainer.datamodule.client_names  # type: ignore[attr-defined]
            write_table(path.parent / self.name, self.rows, names)
        return {
            f"{kind}/{figure}": value
            for kind in KINDS
            for figure, value in summary(self.rows, kind).items()
        }

    def _measured(self, trainer: Trainer, round: int) -> list[dict[str, float]]:
        """Return one row per client. The clients are split over the processes."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        count = 2 if trainer.fast_dev_run else len(data.local_tests)  # type: ignore[attr-defined]
        with self._studio(trainer) as (host, train):
            own = [
                self._row(trainer, host, train, client, round)
                for client in range(trainer.global_rank, count, trainer.world_size)
            ]
        every = gathered(own) if trainer.world_size > 1 else [own]
        return sorted((row for each in every for row in each), key=lambda row: row["client"])

    @contextmanager
    def _studio(self, trainer: Trainer) -> Iterator[tuple[SequentialRunner, Any]]:
        """Yield a runner on a copy of the module, so that the module of the run stays unchanged."""
        loop, user = self._loop, self._loop.runner.module
        constants = loop.runner.constants.parameters
        module = _copied(user, constants.values())
        made = next(optimizers_in(module.configure_optimizers()))
        known = {id(param) for param in module.parameters()}
        if any(id(p) not in known for group in made.param_groups for p in group["params"]):
            raise FederationError(
                f"PersonalizedEvaluation trains a copy of {type(user).__name__}, but its optimizer"
                " has parameters of another module: use self.parameters() in configure_optimizers"
            )
        host = SequentialRunner(
            module,
            loop.options.buffer_policy,
            made,
            loop.runner.keep_optimizer,
            constants,
            loop.runner.private,
        )
        host.base_lr = float(made.param_groups[0].get("lr", 0.0))
        state = loop.runner.read()
        loop.aggregator.start(state.vector)  # clients start from the models of the next round
        try:
            yield host, state
        finally:
            host.close()

    def _row(
        self, trainer: Trainer, host: SequentialRunner, server: ServerState, client: int, round: int
    ) -> dict[str, float]:
        loop, data = self._loop, trainer.datamodule  # type: ignore[attr-defined]
        rows = runner_rows(loop.store, client)
        start = loop.aggregator.models_for(torch.tensor([client]))
        state = ServerState(start, server.counters)
        plan = loop.policy.drawn(loop.round, torch.tensor([client]))
        row: dict[str, float] = {
            "client": client,
            "train_samples": len(data.parts[client]),
            "test_samples": len(data.local_tests[client]),
        }
        has_own = any(name.startswith(("parameter.", "buffer.")) for name in rows)
        if has_own or not torch.equal(start[0], server.vector):
            self._load(host, ServerState(server.vector[None], server.counters), {}, plan)
            row["global"] = self._score(trainer, host, client)
        self._load(host, state, rows, plan)
        if not rows and isinstance(host.module, AdaptiveModel):
            host.module.federated_adapt(self._samples(trainer, client))
        row["server"] = self._score(trainer, host, client)
        if self._personalize(trainer, host, client):
            row["kept"] = self._score(trainer, host, client)
            self._load(host, state, rows, plan)
        batches = self._batches(client, round)
        if self.steps:
            self._train(trainer, host, islice(batches, self.steps))
            row["personal"] = self._trained_score(trainer, host, client)
        if self.local_steps and self._first is not None:
            alone, rows = ServerState(self._first[None], server.counters), {}
            batches, left = self._batches(client, round), self.local_steps
            each = int(data.batches_per_epoch[client])
            while left > 0:
                self._load(host, alone, rows, plan)
                self._train(trainer, host, islice(batches, min(each, left)))
                left -= each
                alone = ServerState(host.vector.read()[None], host.counters.read())
                rows = {name: kept.detach().clone() for name, kept in host.rows()[0].items()}
            row["local"] = self._trained_score(trainer, host, client)
        return row

    def _trained_score(self, trainer: Trainer, host: SequentialRunner, client: int) -> float:
        """Return the score of a client's model after training, including its personal state."""
        # Mixtures load the weights that they learned from the samples.
        call_hook(host.module, "on_client_start")
        self._personalize(trainer, host, client)
        return self._score(trainer, host, client)

    def _personalize(self, trainer: Trainer, host: SequentialRunner, client: int) -> bool:
        """Load the personal model of the method; return whether there is one."""
        seed = derive_seed(0, RandomStream.PERSONAL, client)
        for owner in (host.module, host.optimizer):
            if isinstance(owner, PersonalModel):
                with seeded_rng(seed, host.module.device):
                    if owner.federated_personalize(self._samples(trainer, client)):
                        return True
        return False

    def _samples(self, trainer: Trainer, client: int) -> Iterator[Any]:
        """Yield all training samples of a client in batches."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        for batch in data.samples_of(client):
            yield on_device(trainer, batch, is_training=True)

    def _load(
        self,
        host: SequentialRunner,
        state: ServerState,
        rows: Mapping[str, Tensor],
        plan: Mapping[str, Tensor],
    ) -> None:
        """Load the state of a client at the start of a round."""
        host.load(state, [rows], [self._rate(host, plan)])
        host.set_hyperparameters(plan)
        call_hook(host.module, "on_client_start")

    def _rate(self, host: SequentialRunner, plan: Mapping[str, Tensor]) -> float:
        """Return the learning rate of a client."""
        if self.lr is not None:
            return self.lr
        lr = float(plan["lr"]) if "lr" in plan else host.base_lr
        return lr * float(plan.get("lr_factor", 1.0))

    def _score(self, trainer: Trainer, host: SequentialRunner, client: int) -> float:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        seed = derive_seed(0, RandomStream.PERSONAL, client)
        found = []
        with evaluating(host.module), torch.no_grad(), seeded_rng(seed, host.module.device):
            for batch in data.samples_of(client, test=True):
                found.append(self.metric(host.module, on_device(trainer, batch)).double())
        return float(torch.cat(found).mean())

    def _batches(self, client: int, round: int) -> Iterator[tuple[int, Any]]:
        """Yield an infinite stream of a client's batches, each with the seed of its step."""
        data: Any = self._loop.fit.data
        seed = derive_seed(self._loop.run_seed, RandomStream.PERSONAL, round, client)
        batches = data.steps_of(client, generator(seed, RandomStream.PERSONAL))
        for step, batch in enumerate(batches):
            yield derive_seed(seed, step), batch

    def _train(
        self, trainer: Trainer, host: SequentialRunner, batches: Iterable[tuple[int, Any]]
    ) -> None:
        """Run local steps and the hook at their end, as in a round."""
        module: Any = host.module
        module.train()
        with torch.enable_grad():
            for step, (seed, batch) in enumerate(batches):
                with seeded_rng(seed, module.device):
                    moved = on_device(trainer, batch, is_training=True)
                    host.optimizer.step(partial(self._loss, trainer, host, moved, step))
        call_hook(module, "on_client_end")

    def _loss(self, trainer: Trainer, host: SequentialRunner, batch: Any, step: int) -> float:
        """Compute the loss and its clipped gradients."""
        host.optimizer.zero_grad()
        with trainer.precision_plugin.train_step_context(), without_scale(trainer):
            out: Any = host.module.training_step(batch, step)
        loss: Tensor = out["loss"] if isinstance(out, Mapping) else out
        loss.backward()
        if value := trainer.gradient_clip_val:
            by_value = trainer.gradient_clip_algorithm == "value"
            clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(host.module.parameters(), value)
        return float(loss.detach())

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the initial global model if ``local_steps`` is set."""
        return {"first": self._first} if self.local_steps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the initial global model."""
        compare(state_dict, {str: Tensor | None}, "the checkpoint's PersonalizedEvaluation")
        self._first = state_dict.get("first")


def _copied(module: LightningModule, constants: Iterable[Tensor]) -> LightningModule:
    """Copy a module without its Trainer; the copy logs nothing.

    Functions set on it and constant tensors are shared, but functions that hold the module or a
    part of it hold the copy instead: Lightning's DDP, for example, sets ``forward`` on the module.
    """
    own = vars(module)
    functions = {k: v for k, v in own.items() if isinstance(v, FUNCTIONS)}
    attached, module._trainer = module._trainer, None
    for name in functions:
        del own[name]
    try:
        made = copy.deepcopy(module, {id(tensor): tensor for tensor in constants})
    finally:
        own.update(functions)
        module._trainer = attached
    copies = {
        id(part): copied for part, copied in zip(module.modules(), made.modules(), strict=True)
    }
    # The loop replaced configure_optimizers by a method bound to the original module.
    vars(made).update(
        {k: _rebound(v, copies) for k, v in functions.items() if k != "configure_optimizers"}
    )
    vars(made)["log"] = vars(made)["log_dict"] = lambda *args, **options: None
    return made


def _rebound(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """Return a function that holds the copies of modules, given by the ``id`` of the originals."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebound(value.__self__, copies))
    if isinstance(value, partial):
        args = [_rebound(each, copies) for each in value.args]
        named = {name: _rebound(each, copies) for name, each in value.keywords.items()}
        return partial(_rebound(value.func, copies), *args, **named)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return value
    held = [cell.cell_contents for cell in value.__closure__]
    if not any(id(getattr(each, "__self__", each)) in copies for each in held):
        return value
    cells = tuple(CellType(_rebound(each, copies)) for each in held)
    made = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    made.__kwdefaults__ = value.__kwdefaults__
    return made
