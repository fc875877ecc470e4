"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_fl.callbacks.federated_loop import FederatedLoop, loop_of
from lightning_fl.partition import plot
from lightning_fl.types import FederationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunReport(Callback):
    """Write, beside the table of rounds, how the data were split and how the run went.

    ``partition.json`` (the manifest) and ``partition.png`` at the start, ``rounds.png`` (accuracy
    and loss over rounds) at the end, also after an interruption, and ``aggregator.png`` where the
    server's rule has a picture of its own (the tree of clusters), ``policy.png`` likewise.

    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write how the data were split."""
        if (folder := _folder(trainer)) is not None:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            _write_partition(folder, data)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw how the run went."""
        rows = _loop(trainer).rows
        if (folder := _folder(trainer)) is not None and rows:
            _save(round_figure(rows), folder / "rounds.png")
            loop = _loop(trainer)
            has_begun = loop.aggregator.server.numel() > 0
            if has_begun and (figure := loop.aggregator.figure()) is not None:
                _save(figure, folder / "aggregator.png")
            if (figure := loop.policy.figure(rows)) is not None:
                _save(figure, folder / "policy.png")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Draw how far the run went."""
        self.on_fit_end(trainer, pl_module)


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
    figure.savefig(path, dpi=120)
