"""What a server and its clients have in common, and what a client keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.aggregators import Aggregator
from lightning_fl.callbacks.checkpoint import save_with_sums
from lightning_fl.files import check_sums, check_writable, error_context
from lightning_fl.options import describe
from lightning_fl.runners import ClientRunner


def client_side(rule: Aggregator) -> str:
    """Return a text that names a rule and its options if it has client-side work, else nothing.

    Args:
        rule: The rule, after its ``setup``.

    Example:
        >>> from lightning_fl.aggregators import FedAvg, FedDyn
        >>> client_side(FedDyn(alpha=0.5)), client_side(FedAvg())
        ("FedDyn(alpha=0.5, weighting='uniform')", '')
    """
    if not rule.client_parts():
        return ""
    return " of ".join(describe(each) for each in rule.modules() if isinstance(each, Aggregator))


def exchange_id(runner: ClientRunner) -> str:
    """Return a digest of what a server and its clients exchange, and of the phases of training.

    Args:
        runner: Runner of the module.
    """
    layout = runner.layout
    counters = {name: tuple(t.shape) for name, t in runner.named_counters.items()}
    shapes = {name: tuple(shape) for name, shape in layout.shapes.items()}
    kinds = (layout.num_parameters, str(layout.dtype), sorted(runner.private), runner.buffers)
    phases = [sorted(names) for names in runner.phases.names]
    return sha256(repr((shapes, counters, kinds, phases)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kept:
    """Hold the states that a client keeps: after its last used update, and after its last one.

    The server may not have used the last update, because it arrived too late or the server was
    killed. The client then continues from the state before, also if this happens several times.

    Args:
        states: State after an update, by the id of the update.

    Example:
        >>> import torch
        >>> kept = Kept().after(0, 11, {"c": torch.zeros(1)}).after(11, 12, {"c": torch.ones(1)})
        >>> kept.at(12)["c"], kept.at(11)["c"], kept.at(0)
        (tensor([1.]), tensor([0.]), {})
    """

    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def at(self, update: int) -> Mapping[str, Tensor]:
        """Return the state after an update; empty before the first, or if it is lost.

        Args:
            update: Id of the update; 0 is before the first.
        """
        if update and update not in self.states:
            rank_zero_warn(
                "this client has lost its state after its last used update, and continues without:"
                " control variates, optimizer state and local parameters start anew"
            )
        return self.states.get(update, {})

    def after(self, last: int, update: int, state: Mapping[str, Tensor]) -> Kept:
        """Return the states after a new update, and after the last used one.

        Args:
            last: Id of the client's last update that the server has used; 0 if there is none.
            update: Id of the new update.
            state: The state after it.
        """
        before = {last: self.states[last]} if last in self.states else {}
        return Kept({**before, update: state})

    @classmethod
    def read(cls, file: Path) -> Kept:
        """Return what :meth:`write` has written; nothing if the file does not exist.

        Raises:
            FederationError: If the file is damaged, or holds something else.
        """
        if not file.exists():
            return cls()
        remedy = "is damaged: restore it, or delete it to start anew"
        with error_context(f"the state of this client in {file} {remedy}", Exception):
            check_sums(file)
            return cls(torch.load(file, weights_only=True)["states"])

    def write(self, file: Path) -> None:
        """Write the states into a file, with checksums."""
        save_with_sums({"states": dict(self.states)}, file)


def file_of(client: int, folder: str | Path) -> Path:
    """Return the file in which a client keeps its states, which can be written.

    Raises:
        FederationError: If it cannot.
    """
    file = Path(folder, f"client-{client}.pt")
    check_writable(file)
    return file
