"""What a run leaves behind: pictures, who took part, what it ran with."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_fl.aggregators import Aggregator
from lightning_fl.aggregators.matching import NeuronMatching
from lightning_fl.callbacks.federated_loop import FederatedLoop, loop_of, user_module
from lightning_fl.callbacks.personalized import PersonalizedEvaluation
from lightning_fl.federation.checkpoint_checks import COUNT, check
from lightning_fl.federation.measures import evaluating, on_device
from lightning_fl.federation.memory import runner_rows
from lightning_fl.files import write_atomically
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.partition import plot
from lightning_fl.runners import ClientRunner
from lightning_fl.strategies import gathered
from lightning_fl.types import FederationError, ServerState, describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Names what environment.json is, and its version.
FORMAT = "lightning_fl environment 1"
#: Of which a reader wants to know the version.
PACKAGES = (
    "lightning_fl",
    "torch",
    "lightning",
    "torchmetrics",
    "torchvision",
    "torchaudio",
    "numpy",
    "scipy",
    "scikit-learn",
    "matplotlib",
)


class RunReport(Callback):
    """Write, beside the table of rounds, what ``lightning-fl report`` makes a page of.

    At the start ``partition.json`` (the manifest), ``partition.png``, and ``environment.json``:
    versions, machine, seed, size of the module, rules, and how the run ended, once it has. At the
    end, also after an interruption, ``rounds.png`` (accuracy and loss over rounds),
    ``aggregator.png`` where the server's rule has a picture of its own (the tree of clusters),
    ``policy.png`` likewise, and ``participation.csv``, a row a client: its training samples, the
    rounds it took part in, how many of its updates were dropped, and ``train_acc``, the accuracy
    of the server's model on its own training samples. With a :class:`PersonalizedEvaluation`, which
    looks at test samples, that is left out; and where a module's output is no class either.

    Args:
        client_samples: How many training samples of each client ``train_acc`` looks at, the first;
            0 leaves it out.

    Raises:
        FederationError: If ``client_samples`` is negative.
    """

    def __init__(self, client_samples: int = 200) -> None:
        if client_samples < 0 or int(client_samples) != client_samples:
            raise FederationError(
                f"client_samples must be a whole number from 0 up, got {client_samples}"
            )
        self.client_samples = int(client_samples)
        #: Rounds that each client took part in, and updates of it that were dropped, ``[2, n]``;
        #: None where a resumed run does not know of its first rounds.
        self.counts: Tensor | None = None
        self._counted = 0
        self._folder: Path | None = None
        #: Why there is no accuracy of clients.
        self._reason: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write how the data were split, and what the run runs with."""
        loop, data = _loop(trainer), trainer.datamodule  # type: ignore[attr-defined]
        self._reason = None
        if loop.round == 0:
            self.counts, self._counted = torch.zeros(2, len(data.num_samples)).int(), 0
        elif self._counted != loop.round or not _fits(self.counts, len(data.num_samples)):
            self.counts = None
        # Asked by all, and now: Lightning lets the first process tell the others.
        self._folder = _folder(trainer)
        if self._folder is not None:
            _write_partition(self._folder, data)
            self._write_environment(trainer, "started")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count who took part."""
        loop = _loop(trainer)
        if self.counts is not None and (plan := loop.plan_of_the_round) is not None:
            self.counts[0, plan.cohort] += 1
            self.counts[1, [int(c) for c in loop.rows[-1]["dropped_clients"].split()]] += 1
            self._counted = loop.round

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the server's model on the samples of each client."""
        if self._folder is None:
            return
        found: list[float] | str = "PersonalizedEvaluation looks at test samples"
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not self.client_samples:
            found = "client_samples=0"
        elif not any(isinstance(c, PersonalizedEvaluation) for c in callbacks):
            found = client_accuracies(trainer, self.client_samples)
        self._write_clients(trainer, found)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw how the run went."""
        if self._folder is None:  # Nothing was left to train: it was killed at its very end.
            self._folder = _folder(trainer)
            if self._folder is not None and not (self._folder / "participation.csv").exists():
                self._write_clients(trainer, "the run was killed before")
                self._write_environment(trainer, "finished")
        else:
            self._write_environment(trainer, "finished")
        self._draw(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Draw how far the run went."""
        _loop(trainer)
        if self._folder is not None:
            self._write_clients(trainer, "the run was interrupted")
            self._write_environment(trainer, type(exception).__name__)
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        loop, folder, self._folder = _loop(trainer), self._folder, None
        if folder is None or not loop.rows:
            return
        _save(round_figure(loop.rows), folder / "rounds.png")
        has_begun = loop.aggregator.server.numel() > 0
        if has_begun and (figure := loop.aggregator.plot()) is not None:
            _save(figure, folder / "aggregator.png")
        if (figure := loop.policy.plot(loop.rows)) is not None:
            _save(figure, folder / "policy.png")

    @rank_zero_only
    def _write_clients(self, trainer: Trainer, accuracies: list[float] | str) -> None:
        """Write a row a client; for accuracies there may be the reason why there are none."""
        self._reason = accuracies if isinstance(accuracies, str) else None
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self._folder is None or not _loop(trainer).rows:
            return
        columns: dict[str, list[Any]] = {"train_samples": data.num_samples.tolist()}
        if self.counts is not None:
            columns |= dict(zip(("rounds", "dropped"), self.counts.tolist(), strict=True))
        if not isinstance(accuracies, str):
            columns["train_acc"] = accuracies
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["client", *columns])
        writer.writerows(zip(range(len(data.num_samples)), *columns.values(), strict=True))
        write_atomically(self._folder / "participation.csv", text.getvalue())

    @rank_zero_only
    def _write_environment(self, trainer: Trainer, state: str) -> None:
        """Write what the run runs with: of the machine what matters, of its owner nothing."""
        assert self._folder is not None
        loop, device = _loop(trainer), trainer.strategy.root_device
        module, data = user_module(trainer.lightning_module), trainer.datamodule  # type: ignore[attr-defined]
        found = {
            "format": FORMAT,
            "state": state,
            "rounds": trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None,
            "seed": loop.run_seed,
            "clients": len(data.num_samples),
            "batch_size": getattr(data, "batch_size", None),
            "module": type(module).__name__,
            "network": type(module.net).__name__ if hasattr(module, "net") else None,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "clients_per_round": loop.clients_per_round,
            "client_fraction": loop.client_fraction,
            **{name: describe(getattr(loop, name)) for name in ("aggregator", "policy", "sampler")},
            "update_transforms": [describe(transform) for transform in loop.update_transforms],
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
        write_atomically(self._folder / "environment.json", json.dumps(found, indent=2) + "\n")

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return who took part so far."""
        return {} if self.counts is None else {"counts": self.counts, "rounds": self._counted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over who took part."""
        if state_dict:
            check(state_dict, {"counts": Tensor, "rounds": COUNT}, "RunReport")
            self.counts, self._counted = state_dict["counts"], state_dict["rounds"]


def _fits(counts: Tensor | None, clients: int) -> bool:
    """Say whether counts of a checkpoint are of these clients."""
    return counts is not None and counts.shape == (2, clients) and not counts.is_floating_point()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on.

    Example:
        >>> "torch" in versions()
        True
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def client_accuracies(trainer: Trainer, most: int) -> list[float] | str:
    """Return the accuracy of the server's model on training samples of each client.

    Of a rule with several models, and of a module with parameters that stay with the clients, it is
    that of what the client would start from. The run's random numbers are left alone.

    Args:
        trainer: Between two rounds of a federation.
        most: How many samples of each client to look at, the first.

    Returns:
        One a client; or, where it cannot be found, the reason.
    """
    loop, data = _loop(trainer), trainer.datamodule  # type: ignore[attr-defined]
    rule, lane = loop.aggregator, loop.runner
    # Else the module has the one model of all.
    has_several = not isinstance(rule, NeuronMatching) and (
        lane.private or type(rule).models_for is not Aggregator.models_for
    )
    own: dict[int, float] = {}
    reason: str | None = None
    with ExitStack() as undo:
        undo.enter_context(evaluating(lane.module))
        undo.enter_context(torch.no_grad())
        undo.enter_context(seeded_rng(0, lane.module.device))
        if has_several:
            server = undo.enter_context(_kept(lane))
            rule.start(server.vector)
        try:
            for client in range(trainer.global_rank, len(data.num_samples), trainer.world_size):
                if has_several:
                    vector = rule.models_for(torch.tensor([client]))[0]
                    lane.write(ServerState(vector, server.counters))
                    for name, row in runner_rows(loop.store, client).items():
                        if name.startswith("parameter."):
                            lane.named_parameters[name.removeprefix("parameter.")].copy_(row)
                own[client] = _accuracy(trainer, lane.module, data.samples_of(client), most)
        except Exception as error:  # of a user's module: a run that is through must not fail
            reason = f"{type(error).__name__}: {error}"
    every = gathered((own, reason)) if trainer.world_size > 1 else [(own, reason)]
    if reasons := [reason for _, reason in every if reason is not None]:
        return reasons[0]
    found = {client: value for each, _ in every for client, value in each.items()}
    return [found[client] for client in range(len(found))]


@contextmanager
def _kept(lane: ClientRunner) -> Iterator[ServerState]:
    """Put the module, and what its optimizer learned, back to what they were."""
    state = lane.read()
    private = {name: lane.named_parameters[name].detach().clone() for name in lane.private}
    with lane.optimizer_state.held():
        try:
            yield state
        finally:
            lane.write(state)
            for name, row in private.items():
                lane.named_parameters[name].detach().copy_(row)


def _accuracy(
    trainer: Trainer, module: LightningModule, batches: Iterable[Any], most: int
) -> float:
    """Return how often the largest output is the right class, of the first ``most`` samples."""
    right, count = torch.zeros((), dtype=torch.int64, device=module.device), 0
    for batch in batches:
        x, y = (part[: most - count] for part in on_device(trainer, batch))
        with trainer.precision_plugin.val_step_context():
            out = module(x)
        if y.ndim != 1 or y.is_floating_point() or out.ndim != 2 or out.shape[1] < 2:
            raise ValueError("the samples have no classes, or the module's output is none")
        right += (out.argmax(1) == y).sum()
        if (count := count + len(y)) >= most:
            break
    return int(right) / count


def round_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw accuracy and loss over rounds, whatever of them a table of rounds has.

    Args:
        rows: ``FederatedLoop.rows``, or as much of ``rounds.csv``.

    Example:
        >>> figure = round_figure([{"round": 1, "val_acc": 0.5, "val_loss": 1.2}])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['accuracy', 'loss']
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row))
    panels = {
        label: [n for n in names if part in n]
        for label, part in (("accuracy", "acc"), ("loss", "loss"))
    }
    panels = {label: found for label, found in panels.items() if found} or {"lr": ["lr"]}
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, (label, found) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name in found:
            points = [(row["round"], row[name]) for row in rows if name in row]
            axes.plot(
                *zip(*points, strict=True), marker="." if len(points) < 40 else "", label=name
            )
        axes.set(xlabel="round", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _loop(trainer: Trainer) -> FederatedLoop:
    if (loop := loop_of(trainer)) is None:
        raise FederationError("RunReport reports rounds: add a FederatedLoop to callbacks")
    return loop


def _folder(trainer: Trainer) -> Path | None:
    path = _loop(trainer).table_path(trainer)
    return None if path is None else path.parent


@rank_zero_only
def _write_partition(folder: Path, data: Any) -> None:
    manifest = data.manifest()
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write(folder / "partition.json")
    labels = data.class_labels
    if labels is not None and not labels.is_floating_point():
        _save(plot(data.parts, labels), folder / "partition.png")


@rank_zero_only
def _save(figure: Figure, path: Path) -> None:
    write_atomically(path, partial(figure.savefig, format="png", dpi=120))
