"""Files that describe a run: figures, participation of clients, environment."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.aggregators import Aggregator, NeuronMatching
from lightning_fl.callbacks.client_history import HISTORY, ClientHistory
from lightning_fl.callbacks.client_table import Points, line_figure
from lightning_fl.callbacks.federated_loop import FederatedLoop, loop_of
from lightning_fl.callbacks.hyperparameters import network_name
from lightning_fl.callbacks.personalized import PersonalizedEvaluation
from lightning_fl.contracts.update import ServerState
from lightning_fl.errors import first_line
from lightning_fl.extras import imported
from lightning_fl.federation.measures import accuracy, evaluate
from lightning_fl.files import csv_text, write_atomically
from lightning_fl.objectives import ClientModule, SampleAccountant
from lightning_fl.options import check_integer, describe
from lightning_fl.partition import plot
from lightning_fl.runners import ClientRunner, user_module
from lightning_fl.strategies import gathered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Table of clients.
CLIENTS = "participation.csv"
#: Format of environment.json and its version.
FORMAT = "lightning_fl environment 1"
#: Packages with versions listed in environment.json.
PACKAGES = (
    *("lightning_fl", "torch", "lightning", "torchmetrics", "torchvision", "torchaudio"),
    *("numpy", "scipy", "scikit-learn", "matplotlib"),
)
#: Maximum size of the picture of a split, classes times clients.
MOST_CELLS = 10_000_000


class RunReport(Callback):
    """Write the input files of ``lightning-fl report`` beside the table of rounds.

    At the start of a fit:

    - ``partition.json``: the manifest of the partition;
    - ``partition.png``: the distribution of classes over clients;
    - ``environment.json``: versions, machine, seed, number of parameters, rules, and how the fit
      ended, which is written after all other files.

    At the end of a fit, also after an interruption:

    - ``rounds.png``: accuracy and loss over rounds;
    - ``participation.csv``: one row per client with its number of training samples, the number of
      rounds in which it was sampled, the number of its dropped updates, and ``train_acc``, the
      accuracy of the global model on its training samples. ``train_acc`` is omitted if there is a
      :class:`PersonalizedEvaluation`, which uses test samples, or if the module does not classify.
      With :class:`~lightning_fl.objectives.DPSGD`, ``sample_epsilon`` is the privacy loss;
    - ``client_losses.csv.gz``: one row for each client of a round, with its ``outcome``
      (``arrived``, or the cause of the drop), its ``loss``, and its ``score``. The loss is that of
      the model which the client received, in its first local step. The score is the column
      ``server`` of a :class:`PersonalizedEvaluation` that comes before this callback, in the rounds
      in which it evaluates; clients that it evaluates without training have the outcome
      ``not_sampled``.

    Args:
        client_samples: Maximum number of training samples per client for ``train_acc``; 0 omits the
            column.

    Raises:
        FederationError: If ``client_samples`` is negative, or matplotlib is not installed (extra
            ``report``).
    """

    def __init__(self, client_samples: int = 200) -> None:
        imported("matplotlib", "RunReport", "report")
        self.client_samples = check_integer("client_samples", client_samples, min=0)
        #: Outcomes of clients by round; None if a resumed run lacks its first rounds.
        self.history: ClientHistory | None = None
        self._folder: Path | None = None
        #: Reason why ``train_acc`` is omitted.
        self._reason: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the partition and the environment."""
        self._reason = None
        if _loop(trainer).round == 0:
            self.history = ClientHistory()
        # Called on all processes: Lightning broadcasts the log folder from the first one.
        self._folder = run_folder(trainer)
        if self._folder is not None:
            self._begin(self._folder, trainer.datamodule)  # type: ignore[attr-defined]
            self._write_environment(trainer, "started")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the outcome, the loss and the score of each client."""
        loop, evaluation = _loop(trainer), _evaluation(trainer)
        if self.history is None or (plan := loop.plan_of_the_round) is None:
            return
        rows = evaluation.rows_of(loop.round) if evaluation is not None else []
        scores = {int(row["client"]): row["server"] for row in rows}
        dropped, losses = loop.dropped_in_the_round, loop.losses_in_the_round
        self.history.add(loop.round, plan.cohort.tolist(), dropped, losses, scores)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the global model on the training samples of each client."""
        if self._folder is None:
            return
        accuracies: list[float] | str = "PersonalizedEvaluation uses test samples"
        if not self.client_samples:
            accuracies = "client_samples=0"
        elif _evaluation(trainer) is None:
            accuracies = client_accuracies(trainer, self.client_samples)
        self._write_clients(trainer, accuracies)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the figures of the run, and that it is finished."""
        if self._folder is None:  # no rounds were left
            self._folder = run_folder(trainer)
            if self._folder is None or _is_finished(self._folder):
                return
            self._write_clients(trainer, "the run was killed before its end")
        self._end(trainer, self._folder, "finished")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the files of the run so far."""
        if self._folder is not None:
            self._write_clients(trainer, "the run was interrupted")
            self._end(trainer, self._folder, first_line(exception))

    @staticmethod
    @rank_zero_only
    def _begin(folder: Path, data: Any) -> None:
        """Write the partition, and remove the tables of clients of an earlier fit."""
        write_partition(folder, data)
        for name in (CLIENTS, HISTORY):
            (folder / name).unlink(missing_ok=True)

    def _end(self, trainer: Trainer, folder: Path, state: str) -> None:
        """Draw the figures. The state comes last: it says that all other files are written."""
        loop = _loop(trainer)
        if loop.rows:
            _save(round_figure(loop.rows), folder / "rounds.png")
        self._write_environment(trainer, state)
        self._folder = None

    @rank_zero_only
    def _write_clients(self, trainer: Trainer, accuracies: list[float] | str) -> None:
        """Write one row per client. A string gives the reason why there are no accuracies."""
        self._reason = accuracies if isinstance(accuracies, str) else None
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self._folder is None or not _loop(trainer).rows:
            return
        names, clients = data.client_names, range(len(data.num_samples))
        columns: dict[str, list[Any]] = {} if names is None else {"name": names[: len(clients)]}
        columns["train_samples"] = list(map(len, data.parts))  # of the whole stream
        if self.history is not None:
            for name, counts in zip(("rounds", "dropped"), self.history.counts(), strict=True):
                columns[name] = [counts[client] for client in clients]
            write_atomically(self._folder / HISTORY, self.history.csv_gz())
        if not isinstance(accuracies, str):
            columns["train_acc"] = accuracies
        for accountant in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(accountant, SampleAccountant):
                lost = accountant.epsilons()
                columns["sample_epsilon"] = [lost.get(client, 0.0) for client in clients]
        rows = zip(clients, *columns.values(), strict=True)
        write_atomically(self._folder / CLIENTS, csv_text(["client", *columns], rows))

    @rank_zero_only
    def _write_environment(self, trainer: Trainer, state: str) -> None:
        """Write the environment, without personal data such as user or host names."""
        assert self._folder is not None
        loop, device = _loop(trainer), trainer.strategy.root_device
        options = loop.options
        module, data = user_module(trainer.lightning_module), trainer.datamodule  # type: ignore[attr-defined]
        evaluation = _evaluation(trainer)
        terms = module.terms if isinstance(module, ClientModule) else ()
        described = {
            "format": FORMAT,
            "state": state,
            "rounds": trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None,
            "seed": loop.run_seed,
            "clients": len(data.num_samples),
            "batch_size": data.batch_size,
            "module": type(module).__name__,
            "network": network_name(module),
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "terms": list(map(describe, terms)),
            "optimizer": ", ".join(map(_optimizer, trainer.optimizers)),
            **options.plain,
            **{name: describe(vars(options)[name]) for name in ("aggregator", "policy", "sampler")},
            "update_transforms": list(map(describe, options.update_transforms)),
            "client_metric": None if evaluation is None else evaluation.metric_name,
            "no train_acc": self._reason,
            "machine": {
                "platform": f"{platform.system()} {platform.machine()}",
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
                "processes": trainer.world_size,
                "threads": torch.get_num_threads(),
                "precision": str(trainer.precision),
            },
            "versions": versions(),
        }
        write_atomically(self._folder / "environment.json", json.dumps(described, indent=2) + "\n")

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the history of clients."""
        return {} if self.history is None else self.history.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history of clients."""
        self.history = None
        if state_dict:
            self.history = ClientHistory()
            self.history.load_state_dict(state_dict)


def _is_finished(folder: Path) -> bool:
    """Return whether a fit in a folder has written all of its files."""
    path = folder / "environment.json"
    return path.is_file() and json.loads(path.read_text()).get("state") == "finished"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on.

    Example:
        >>> "torch" in versions()
        True
    """
    by_package = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            by_package[name] = version(name)
    return by_package


def client_accuracies(trainer: Trainer, most: int) -> list[float] | str:
    """Return the accuracy of the global model on training samples of each client.

    If the aggregator has several models, or the module has tensors that stay with the clients, the
    model from which the client would start is evaluated. The random state of the run does not
    change.

    Args:
        trainer: Trainer of a federation, between two rounds.
        most: Maximum number of samples per client.

    Returns:
        One accuracy per client, or the reason why it cannot be computed.
    """
    loop, data = _loop(trainer), trainer.datamodule  # type: ignore[attr-defined]
    data.restore_samples()  # of attackers, whose callback may come later
    rule, runner = loop.aggregator, loop.runner
    # Otherwise the module already contains the model of all clients.
    has_several = not isinstance(rule, NeuronMatching) and (
        runner.private or type(rule).models_for is not Aggregator.models_for
    )
    own: dict[int, float] = {}
    reason: str | None = None
    with _kept(runner) if has_several else nullcontext() as server:
        if server is not None:
            rule.start(server.vector)
        try:
            for client in range(trainer.global_rank, len(data.num_samples), trainer.world_size):
                if server is not None:
                    vector = rule.models_for(torch.tensor([client]))[0]
                    runner.write(ServerState(vector, server.counters))
                    runner.restore(loop.fit.memory.of_runner(client))
                batches = data.samples_of(client, most=most)
                scores = torch.cat(evaluate(trainer, runner.module, batches, accuracy, seed=0))
                own[client] = float(scores.mean())
        except Exception as error:  # in a user's module: must not fail a finished run
            reason = first_line(error)
    every = gathered((own, reason)) if trainer.world_size > 1 else [(own, reason)]
    if reasons := [reason for _, reason in every if reason is not None]:
        return reasons[0]
    accuracies = {client: value for each, _ in every for client, value in each.items()}
    return [accuracies[client] for client in range(len(accuracies))]


@contextmanager
def _kept(runner: ClientRunner) -> Iterator[ServerState]:
    """Restore the module on exit."""
    state = runner.read()
    tensors = runner.tensors.by_name
    private = {runner.row_name(n): tensors[n].detach().clone() for n in runner.private}
    try:
        yield state
    finally:
        runner.write(state)
        runner.restore(private)


def round_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Plot the accuracy and loss columns of a table of rounds.

    Args:
        rows: ``FederatedLoop.rows``, or the rows of ``rounds.csv``.

    Example:
        >>> figure = round_figure([{"round": 1, "val_acc": 0.5, "val_loss": 1.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['accuracy', 'loss']
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    panels: dict[str, dict[str, Points]] = {}
    for label, part in (("accuracy", "acc"), ("loss", "loss")):
        if columns := [name for name in names if part in name]:
            panels[label] = {name: _column(rows, name) for name in columns}
    return line_figure(panels or {"lr": {"lr": _column(rows, "lr")}}, "round")


def _column(rows: Sequence[dict[str, Any]], name: str) -> Points:
    return [(row["round"], row[name]) for row in rows if name in row]


def _evaluation(trainer: Trainer) -> PersonalizedEvaluation | None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, PersonalizedEvaluation)), None)


def _optimizer(optimizer: Any) -> str:
    """Return the class of an optimizer with the initial options that are set."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning may wrap it
    options = {name: value for name, value in optimizer.defaults.items() if value}
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{type(optimizer).__name__}({arguments})"


def _loop(trainer: Trainer) -> FederatedLoop:
    return loop_of(trainer, "RunReport")


def run_folder(trainer: Trainer) -> Path | None:
    """Return the folder of the files of a run; None without a table of rounds."""
    path = _loop(trainer).table_path(trainer)
    return None if path is None else path.parent


def write_partition(folder: Path, data: Any) -> list[Path]:
    """Write the manifest of a split, and its picture if the classes are known.

    Args:
        folder: Folder of the files; it is created.
        data: The data module, after its setup.

    Returns:
        The files, ``partition.json`` and ``partition.png``.
    """
    manifest, files = data.manifest(), [folder / "partition.json"]
    manifest.write(files[0])
    labels, picture = data.class_labels, folder / "partition.png"
    has_classes = labels is not None and not labels.is_floating_point()
    # Other numbers than classes, such as times, would make a picture of gigabytes.
    has_classes = has_classes and len(labels.unique()) * len(data.parts) <= MOST_CELLS
    _save(plot(data.parts, labels) if has_classes else None, picture)
    return [*files, picture] if has_classes else files


@rank_zero_only
def _save(figure: Figure | None, path: Path) -> None:
    """Write a figure; without one, remove that of an earlier run in the same folder."""
    if figure is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, partial(figure.savefig, format="png", dpi=120))
