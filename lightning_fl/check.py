"""Check a federation: train it again with one thing changed, and compare the results.

Parameters, buffers and the optimizer belong to a client. Everything else on a module or a callback
is shared by all clients, as in a ``for`` loop over clients. Whether that matters is a property of
the whole run, so it is checked by whole runs, each in a separate process.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from lightning_fl.callbacks import FederatedLoop
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.errors import FederationError
from lightning_fl.files import write_atomically
from lightning_fl.functional.randomness import run_seed
from lightning_fl.objectives import ClientModule
from lightning_fl.options import check_choice, check_integer
from lightning_fl.policies import Schedule
from lightning_fl.runners import VectorizedClients, user_module
from lightning_fl.runners.tensors import wants_start

#: Maximum number of local steps of a client and round.
STEPS = 10
#: Largest difference, relative to the size of a tensor, that rounding in float64 explains. A tensor
#: smaller than ``SMALLEST`` may be rounding itself, as a bias whose gradient is 0.
ROUNDING, SMALLEST = 1e-7, 1e-6
#: Why a federation of one client may differ from Lightning without a loop.
ANCHOR = (
    "terms of the loss compare the client with the model at the start of the round, which Lightning"
    " without a loop does not have"
)
#: Messages of a fit that trains clients one after another though it is asked to vectorize them.
FALLBACK = "trains one client after another, not at once"


@dataclass
class Run:
    """A federation to check, made anew for each fit.

    Args:
        module: The module.
        data: The data module.
        loop: The loop.
        callbacks: Further callbacks.
        trainer: Options of the ``Trainer``, such as ``precision``.
    """

    module: pl.LightningModule
    data: FederatedDataModule
    loop: FederatedLoop
    callbacks: Sequence[pl.Callback] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckResult:
    """What a column shows.

    Args:
        column: Name of the column.
        outcome: ``equal``; ``different``; ``refused``, if the library refuses such a run with a
            reason; ``failed``, if the run ended with another error.
        difference: Largest difference of an entry of the final parameters and buffers.
        tensor: The first tensor that differs: of a client's update if known, else of the model.
        client: The first client whose update differs, if known.
        detail: Reason of a refusal, or attributes that may carry over, and the remedy. The
            attributes are those that differ at the end of the two fits, then those that training
            has changed.
    """

    column: str
    outcome: Literal["equal", "different", "refused", "failed"]
    difference: float = 0.0
    tensor: str | None = None
    client: int | None = None
    detail: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the run gives the same result, or is refused with a reason."""
        return self.outcome in ("equal", "refused")


class _Fit(NamedTuple):
    """How a fit differs from the first one."""

    is_reversed: bool = False
    is_vectorized: bool = False
    is_double: bool = False
    is_resumed: bool = False
    plain: Literal["", "federated", "lightning"] = ""
    rank: int = 0
    processes: int = 1


#: What each column changes: one or more fits that are compared with the first fit, or two with each
#: other, and the remedy.
#:
#: :meta hide-value:
COLUMNS: dict[str, tuple[list[_Fit], str]] = {
    "order": (
        [_Fit(is_reversed=True)],
        "store such a value in a buffer, or reset it in on_client_start of the module",
    ),
    "resume": (
        [_Fit(is_resumed=True)],
        "store such a value in a buffer, or in state_dict of the callback",
    ),
    "vectorized": (
        [_Fit(is_double=True), _Fit(is_double=True, is_vectorized=True)],
        "train without VectorizedClients",
    ),
    "processes": (
        [_Fit(rank=rank, processes=2) for rank in range(2)],
        "make the training independent of the process, its rank and its other clients",
    ),
    "plain": (
        [_Fit(is_double=True, plain="federated"), _Fit(is_double=True, plain="lightning")],
        "let the training depend on the client's own batches and steps only",
    ),
}


class _Settings(NamedTuple):
    """What all fits have in common."""

    make: Callable[[], Run]
    rounds: int
    clients: int | None
    folder: Path


def check_federation(
    make: Callable[[], Run],
    *,
    rounds: int = 2,
    clients: int = 4,
    columns: Sequence[str] = tuple(COLUMNS),
) -> list[CheckResult]:
    """Train a small federation again with one thing changed, and compare the final models.

    Each fit runs in a forked process, so that nothing of one fit reaches another. Loggers and
    checkpoints of the federation are left out. The columns ``order``, ``resume`` and ``processes``
    must give the same bits. ``vectorized`` and ``plain`` are compared up to rounding in float64,
    with dropout off, since they draw other masks.

    Args:
        make: Function that returns new objects for a fit. It is called with the same seed each
            time.
        rounds: Number of rounds.
        clients: Maximum number of clients per round.
        columns: What to check: ``order`` (the clients in reverse order), ``resume`` (continued
            after the first round by a new process), ``vectorized``, ``processes`` (two), ``plain``
            (one client with all samples, beside Lightning without a loop).

    Returns:
        A result per column.

    Raises:
        FederationError: If an option is out of range, or the first fit fails, for example since
            CUDA is in use already, so that processes cannot be forked.
    """
    return list(check_columns(make, rounds, clients, columns))


def check_columns(
    make: Callable[[], Run], rounds: int, clients: int, columns: Sequence[str]
) -> Iterator[CheckResult]:
    """Yield the result of each column when it is known; see :func:`check_federation`."""
    check_integer("rounds", rounds, min=2)
    check_integer("clients", clients, min=2)
    for name in columns:
        check_choice("each of columns", name, *COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        settings = _Settings(make, rounds, clients, Path(folder))
        (base,) = _trained(settings, _Fit())
        if base.get("outcome") == "refused":  # some rules need all clients
            settings = settings._replace(clients=None)
            (base,) = _trained(settings, _Fit())
        if error := base.get("detail"):
            raise FederationError(f"the federation cannot be checked, as its fit fails: {error}")
        for column in columns:
            yield _column(column, settings, base)


def _column(column: str, settings: _Settings, base: dict[str, Any]) -> CheckResult:
    """Return the result of a column."""
    fits, _ = COLUMNS[column]
    found = _trained(settings, *fits)
    if fits[0].is_double:
        base, other = found
        result = _compared(column, base, other, ROUNDING)
        if column == "plain" and result.outcome == "different" and base["has_anchor"]:
            return replace(result, outcome="refused", detail=ANCHOR)
        return result
    # Other processes than one that failed say that one has failed.
    failed = [each for each in found if each.get("outcome") == "failed"]
    return _compared(column, base, (failed or found)[0], 0.0)


# --- comparison -----------------------------------------------------------------------------------


def _compared(
    column: str, base: dict[str, Any], found: dict[str, Any], tolerance: float
) -> CheckResult:
    """Compare what two fits have left."""
    for each in (base, found):
        if "outcome" in each:
            return CheckResult(column, **each)
    differences = {
        name: _difference(tensor, found["state"].get(name))
        for name, tensor in base["state"].items()
    }
    differs = [name for name, (_, relative) in differences.items() if relative > tolerance]
    largest = max((absolute for absolute, _ in differences.values()), default=0.0)
    if not differs:
        return CheckResult(column, "equal", largest)
    client, tensor = None, differs[0]
    if not tolerance:
        for at, own in base["updates"].items():
            other = found["updates"].get(at, own)
            if changed := [name for name, digest in own.items() if other.get(name) != digest]:
                client, tensor = at[1], changed[0]
                break
    one, other = base["attributes"], found["attributes"]
    differing = sorted(name for name in one if one[name] != other.get(name))
    candidates = list(dict.fromkeys([*differing, *base["changed"]]))
    named = f"perhaps {', '.join(candidates[:5])}: " if candidates and not tolerance else ""
    return CheckResult(column, "different", largest, tensor, client, named + COLUMNS[column][1])


def _difference(one: Tensor, other: Tensor | None) -> tuple[float, float]:
    """Return the largest difference of two tensors, and its ratio to their size."""
    if other is None or one.shape != other.shape:
        return torch.inf, torch.inf
    a, b = one.double(), other.double()
    is_same = (a == b) | (a.isnan() & b.isnan())
    if bool(is_same.all()):
        return 0.0, 0.0
    largest = float((a - b).abs()[~is_same].nan_to_num(torch.inf).max())
    return largest, largest / max(float(a.abs().nan_to_num(0, 0).max()), SMALLEST)


# --- fits -----------------------------------------------------------------------------------------


def _trained(settings: _Settings, *fits: _Fit) -> list[dict[str, Any]]:
    """Run fits at the same time, each in a process; return what they leave."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(dir=settings.folder))
    paths = [folder / f"{i}.pt" for i in range(len(fits))]
    failure = ""
    try:
        start_processes(_in_process, (settings, fits, port, paths), len(fits), start_method="fork")
    except ProcessException as error:
        failure = str(error)
    return [
        torch.load(path, weights_only=False) if path.exists() else _ended("failed", failure)
        for path in paths
    ]


def _in_process(
    i: int, settings: _Settings, fits: Sequence[_Fit], port: int, paths: Sequence[Path]
) -> None:
    """Run a fit and write what it leaves."""
    fit = fits[i]
    with open(os.devnull, "w") as devnull:
        for stream in (1, 2):
            os.dup2(devnull.fileno(), stream)
    torch.set_num_threads(1)  # a parallel region of OpenMP may never end in a forked process
    if fit.processes > 1:
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(fit.rank))
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(fit.processes))
        os.environ |= ranks | sizes | {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "check"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    write_atomically(paths[i], partial(torch.save, _attempt(settings, fit)))


def _attempt(settings: _Settings, fit: _Fit) -> dict[str, Any]:
    """Run a fit; return what it leaves, or the error that ended it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            left = _train(settings, fit)
        except MisconfigurationException as error:  # of Lightning or of this library
            return _ended("refused", str(error))
        except Exception as error:  # of the user's code, of any kind
            return _ended("failed", f"{type(error).__name__}: {error}")
    messages = [str(warning.message) for warning in seen] if fit.is_vectorized else []
    refusal = next((message for message in messages if FALLBACK in message), None)
    return left if refusal is None else _ended("refused", refusal)


def _ended(outcome: str, detail: str) -> dict[str, Any]:
    return {"outcome": outcome, "detail": detail}


def _train(settings: _Settings, fit: _Fit) -> dict[str, Any]:
    """Run a fit; return the final model, digests of the updates and of attributes."""
    pl.seed_everything(run_seed(None), verbose=False)
    run = settings.make()
    torch.set_num_threads(1)  # which make may have changed
    module, data, loop = user_module(run.module), run.data, run.loop
    options: dict[str, Any] = {"limit_val_batches": 2, **run.trainer}
    given = tree_leaves([options.pop("callbacks", None) or [], run.callbacks])  # one or a list
    # Checkpoints of the user's own runs are left alone.
    callbacks = [each for each in given if not isinstance(each, Checkpoint)]
    if fit.plain:
        callbacks = [each for each in callbacks if not _is_of_the_library(each)]
        loop = FederatedLoop(buffers="average", optimizer_state="keep")
    loop.table_name = None
    shown = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options |= dict.fromkeys(shown, False) | {"logger": DummyLogger(), "num_sanity_val_steps": 0}
    options |= {"max_epochs": settings.rounds, "default_root_dir": str(settings.folder)}
    strategy = "client_parallel" if fit.processes > 1 else "auto"
    options |= {"devices": fit.processes, "strategy": strategy}
    if torch.cuda.is_available():
        options.setdefault("deterministic", "warn")
    if fit.is_double:
        options["precision"] = "64-true"
        for layer in module.modules():
            if isinstance(layer, _DropoutNd):
                layer.p = 0.0
    change = _Change(fit, settings, loop)
    loops = [] if fit.plain == "lightning" else [loop]
    trainer = pl.Trainer(callbacks=[change, *loops, *callbacks], **options)
    wrapped = module
    if fit.is_vectorized:
        wrapped = VectorizedClients(module, settings.clients or 10, compile=False)
    saved = settings.folder / "first.ckpt"
    if fit.is_resumed and not saved.exists():
        raise FederationError("the run ends in its first round, so that there is nothing to resume")
    starts = dict(_attributes(module, *callbacks))
    path = str(saved) if fit.is_resumed else None
    trainer.fit(wrapped, datamodule=data, ckpt_path=path, weights_only=False)
    ends = dict(_attributes(module, *callbacks))
    return {
        "state": {name: t.detach().cpu().clone() for name, t in module.state_dict().items()},
        "has_anchor": wants_start(module),
        "updates": change.updates,
        "attributes": ends,
        "changed": sorted(name for name in ends if ends[name] != starts.get(name)),
    }


def _is_of_the_library(callback: pl.Callback) -> bool:
    return type(callback).__module__.partition(".")[0] == "lightning_fl"


class _Change(pl.Callback):
    """Make a federation small or of one client, change its plans, and note digests of its updates.

    It stands before the loop, so that the loop is set up with the changes.
    """

    def __init__(self, fit: _Fit, settings: _Settings, loop: FederatedLoop) -> None:
        # Other names than those of the arguments, with which noise for privacy is keyed.
        self._fit, self._settings, self._loop = fit, settings, loop
        #: Digest of each tensor of an update, by round and client.
        self.updates: dict[tuple[int, int], dict[str, str]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Change the data, which are set up already, and the options of the loop."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set by the connector
        clients, options = self._settings.clients, self._loop.options
        if self._fit.plain:
            _give_all_samples_to_one_client(data)
            steps = min(STEPS, int(data.batches_per_epoch[0]))
            self._loop.options = replace(options, policy=Schedule(num_steps=steps))
            self._loop.seed = run_seed(data.seed)
            if self._fit.plain == "lightning":
                trainer.limit_train_batches = steps
        elif clients is not None and clients < len(data.num_samples):
            number = min(clients, options.clients_per_round or clients)
            self._loop.options = replace(options, clients_per_round=number, client_fraction=None)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Limit the local steps, and reverse the clients."""
        if self._loop._prepared is not None:
            self._loop._prepared.planner.change = self._changed

    def _changed(self, plan: RoundPlan) -> RoundPlan:
        steps = plan.num_steps
        if not self._loop.policy.learns_from:  # a policy may learn from the steps that it has set
            steps = steps.clamp(max=STEPS)
        return replace(plan, num_steps=steps, is_reversed=self._fit.is_reversed)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save at the start of the second round of the first fit."""
        if trainer.current_epoch == 1 and self._fit == _Fit():
            trainer.save_checkpoint(self._settings.folder / "first.ckpt")

    def on_client_updates(
        self, plan: RoundPlan, clients: Tensor, delta: Tensor, dropped: dict[int, str]
    ) -> Tensor:
        """Note the updates of clients."""
        tensors = self._loop.runner.layout.split(delta)
        for row, client in enumerate(clients.tolist()):
            self.updates[plan.round, client] = {
                name: _digest(rows[row].cpu().flatten().view(torch.uint8).numpy().tobytes())
                for name, rows in tensors.items()
            }
        return delta


def _give_all_samples_to_one_client(data: FederatedDataModule) -> None:
    parts = [torch.cat(data.parts).sort().values]
    data.split = replace(data.split, names=[], parts=parts, local_tests=[], stream_steps=[parts])
    data.stream_steps = 1
    data.repeat_client(1)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _attributes(module: pl.LightningModule, *callbacks: pl.Callback) -> Iterator[tuple[str, str]]:
    """Yield the name and a digest of each attribute of a module and of callbacks of the user."""
    base = ClientModule(nn.Identity()) if isinstance(module, ClientModule) else pl.LightningModule()
    known = set(vars(base))
    for owner in (module, *(each for each in callbacks if not _is_of_the_library(each))):
        for name, value in vars(owner).items():
            if name not in known and not name.startswith("_hparams"):
                with suppress(Exception):  # what cannot be pickled is left out
                    _Pickler(stream := io.BytesIO()).dump(value)
                    yield f"{type(owner).__name__}.{name}", _digest(stream.getvalue())


class _Pickler(pickle.Pickler):
    """Pickle tensors by value: torch's pickles of equal tensors differ."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return str, (f"{value.dtype}{value.tolist()}",)
        return NotImplemented
