"""Evaluation on the test samples of each client, before and after local fine-tuning."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.callbacks.federated_loop import loop_of
from lightning_fl.federation.compare import compare
from lightning_fl.federation.measures import accuracy, evaluating, on_device
from lightning_fl.federation.memory import runner_rows
from lightning_fl.federation.round import call_hook
from lightning_fl.files import write_atomically
from lightning_fl.functional.randomness import RandomStream, derive_seed, generator, seeded_rng
from lightning_fl.options import check_integer, check_number
from lightning_fl.runners import SequentialRunner, optimizers_in
from lightning_fl.strategies import gathered
from lightning_fl.types import FederationError, ServerState

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Evaluated models of a client, in the order of the table.
KINDS = ("server", "personal", "kept", "local")
#: Types of attributes that a copy of a module shares with the original.
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)


class PersonalizedEvaluation(Callback):
    r"""Evaluate each client on its test samples, before and after local fine-tuning.

    For each client, up to four models are evaluated:

    - ``server``: the model from which the client would start the next round;
    - ``personal``: the same model after local fine-tuning on the client's training samples, with
      the loss and optimizer of the module and the gradient clipping of the Trainer;
    - ``kept``: the personal model stored in the optimizer state
      (:class:`~lightning_fl.optimizers.PFedMe` with ``optimizer_state: keep``);
    - ``local``: a model trained on this client only, from the initial global model, with one local
      epoch per round.

    If the optimizer has a personal model, ``personal`` and ``local`` evaluate that model.

    For each kind, the callback logs the mean over clients, the mean weighted by test samples, the
    standard deviation, and the mean over the worst decile of clients, as ``personal/mean``,
    ``personal/weighted``, ``personal/std`` and ``personal/worst``. A table of clients and a figure
    are written beside the table of rounds.

    Requires ``FederatedDataModule(local_test_size=...)``.

    Args:
        steps: Number of local steps of ``personal``.
        local_steps: Number of local steps of ``local``; 0 omits it.
        lr: Learning rate of ``personal`` and ``local``. None uses the learning rate of the policy,
            or of the optimizer if the policy does not set one.
        every_n_rounds: Number of rounds between evaluations; None evaluates after the last round
            only.
        metric: Function of module and batch that returns one score per sample, higher is better;
            None is accuracy.
        name: Name of the files, without ``.csv`` and ``.png``.

    Raises:
        FederationError: If an option is out of range. At the start of a fit, if there is no
            :class:`FederatedLoop` or there are no local test samples.
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

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there are a FederatedLoop and local test samples."""
        if stage != "fit":
            return
        self._loop = loop_of(trainer, "PersonalizedEvaluation")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not getattr(data, "local_tests", None):
            raise FederationError(
                "PersonalizedEvaluation requires test samples for each client: set local_test_size"
                " of the data module (data.init_args.local_test_size=0.2)"
            )
        if isinstance(self._loop.aggregator, NeuronMatching):
            raise FederationError(
                "PersonalizedEvaluation does not support"
                f" {type(self._loop.aggregator).__name__}, which changes the width of the global"
                " network: remove one of them"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the initial global model."""
        if self._first is None and self._loop.round and self.local_steps:
            raise FederationError(
                "local_steps requires the initial global model, which the checkpoint does not"
                " contain: set local_steps=0, or set it from the start of a run"
            )
        now = self._loop.runner.read().vector
        self._first = now if self._first is None else self._first
        compare(self._first, now, "the first model of PersonalizedEvaluation")

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
            self._write(path.parent)
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
        vars(module)["log"] = vars(module)["log_dict"] = lambda *args, **options: None
        made = next(optimizers_in(module.configure_optimizers()))
        known = {id(param) for param in module.parameters()}
        if any(id(p) not in known for group in made.param_groups for p in group["params"]):
            raise FederationError(
                f"PersonalizedEvaluation trains a copy of {type(user).__name__}, but its optimizer"
                " has parameters of another module: use self.parameters() in configure_optimizers"
            )
        host = SequentialRunner(
            module, loop.options.buffer_policy, made, loop.runner.keep_optimizer, constants
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
        lr = self._rate(host, client)
        row: dict[str, float] = {
            "client": client,
            "train_samples": len(data.parts[client]),
            "test_samples": len(data.local_tests[client]),
        }
        self._load(host, state, rows, lr)
        if not rows and callable(adapt := getattr(host.module, "adapt", None)):
            adapt(self._all_of(trainer, client))  # the client has not trained yet
        row["server"] = self._score(trainer, host, client)
        if _to_personal(host):
            row["kept"] = self._score(trainer, host, client)
            self._load(host, state, rows, lr)
        batches = self._batches(client, round)
        if self.steps:
            self._train(trainer, host, islice(batches, self.steps))
            row["personal"] = self._trained_score(trainer, host, client)
        if self.local_steps and self._first is not None:
            alone, rows = ServerState(self._first[None], server.counters), {}
            batches, left = self._batches(client, round), self.local_steps
            each = int(data.batches_per_epoch[client])
            while left > 0:
                self._load(host, alone, rows, lr)
                self._train(trainer, host, islice(batches, min(each, left)))
                left -= each
                alone = ServerState(host.vector.read()[None], host.counters.read())
                rows = {name: kept.detach().clone() for name, kept in host.rows()[0].items()}
            row["local"] = self._trained_score(trainer, host, client)
        return row

    def _trained_score(self, trainer: Trainer, host: SequentialRunner, client: int) -> float:
        """Return the score of a client's model after training, including its personal state."""
        _to_personal(host)
        call_hook(
            host.module, "on_client_start"
        )  # mixtures load the weights that they learned from the samples
        return self._score(trainer, host, client)

    def _all_of(self, trainer: Trainer, client: int) -> Any:
        """Return all training samples of a client as one batch ``(x, y)``."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        batches = [on_device(trainer, batch) for batch in data.samples_of(client)]
        return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))

    def _load(
        self, host: SequentialRunner, state: ServerState, rows: Mapping[str, Tensor], lr: float
    ) -> None:
        """Load the state of a client at the start of a round."""
        host.load(state, [rows], [lr])
        call_hook(host.module, "on_client_start")

    def _rate(self, host: SequentialRunner, client: int) -> float:
        """Return the learning rate that a client would have in the next round."""
        if self.lr is not None:
            return self.lr
        loop = self._loop
        values = loop.policy.sample(loop.round, torch.tensor([client]))
        lr = float(values["lr"]) if "lr" in values else host.base_lr
        return lr * float(values.get("lr_factor", 1.0))

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
        """Run local steps, as in a round."""
        module: Any = host.module
        module.train()
        with torch.enable_grad():
            for step, (seed, batch) in enumerate(batches):
                with seeded_rng(seed, module.device):
                    moved = on_device(trainer, batch)
                    host.optimizer.step(partial(self._loss, trainer, host, moved, step))

    def _loss(self, trainer: Trainer, host: SequentialRunner, batch: Any, step: int) -> float:
        """Compute the loss and its clipped gradients."""
        host.optimizer.zero_grad()
        with trainer.precision_plugin.train_step_context():
            out: Any = host.module.training_step(batch, step)
        loss: Tensor = out["loss"] if isinstance(out, Mapping) else out
        loss.backward()
        if value := trainer.gradient_clip_val:
            by_value = str(trainer.gradient_clip_algorithm or "norm").endswith("value")
            clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(host.module.parameters(), value)
        return float(loss.detach())

    @rank_zero_only
    def _write(self, folder: Path) -> None:
        """Write the table of clients and a figure beside the table of rounds."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(folder / f"{self.name}.csv", text.getvalue())
        picture = partial(client_figure(self.rows).savefig, format="png", dpi=120)
        write_atomically(folder / f"{self.name}.png", picture)

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the initial global model if ``local_steps`` is set."""
        return {"first": self._first} if self.local_steps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the initial global model."""
        compare(state_dict, {str: Tensor | None}, "the checkpoint's PersonalizedEvaluation")
        self._first = state_dict.get("first")


def _to_personal(host: SequentialRunner) -> bool:
    """Load the personal model of the optimizer; return whether the optimizer has one."""
    found = {p: s["theta"] for p, s in host.optimizer.state.items() if "theta" in s}
    for param, theta in found.items():
        param.data = theta.clone()
    return bool(found)


def _copied(module: LightningModule, constants: Iterable[Tensor]) -> LightningModule:
    """Copy a module without its Trainer. Functions set on it and constant tensors are shared."""
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
    # The loop replaced configure_optimizers by a method bound to the original module.
    vars(made).update({k: v for k, v in functions.items() if k != "configure_optimizers"})
    return made


def summary(rows: Sequence[Mapping[str, float]], kind: str) -> dict[str, float]:
    """Return the mean, weighted mean, standard deviation and worst-decile mean over clients.

    Example:
        >>> rows = [{"test_samples": 1, "server": 0.5}, {"test_samples": 3, "server": 1.0}]
        >>> summary(rows, "server")
        {'mean': 0.75, 'weighted': 0.875, 'std': 0.25, 'worst': 0.5}
    """
    found = [(row[kind], row["test_samples"]) for row in rows if kind in row]
    if not found:
        return {}
    values, sizes = torch.tensor(found, dtype=torch.float64).unbind(1)
    worst = values.sort().values[: max(1, len(values) // 10)]
    return {
        "mean": float(values.mean()),
        "weighted": float((values * sizes).sum() / sizes.sum()),
        "std": float(values.std(correction=0)),
        "worst": float(worst.mean()),
    }


def client_figure(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Plot the sorted scores of clients, one line per kind.

    Example:
        >>> figure = client_figure([{"server": 0.5, "personal": 0.9}, {"server": 0.6}])
        >>> len(figure.axes[0].lines)
        2
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        values = sorted(row[kind] for row in rows if kind in row)
        if values:
            axes.plot(range(1, len(values) + 1), values, marker=".", label=kind)
    axes.set(xlabel="clients, worst first", ylabel="score on local test samples")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
