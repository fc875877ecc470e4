"""Checks of the local steps of clients that train at once, when they are made."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fl.runners.attributes import Attributes, left_alone
from lightning_fl.runners.carried import carried, comparison
from lightning_fl.runners.check import mixes_samples, why_not_mapped
from lightning_fl.runners.later_rounds import OF_LIGHTNING, Operations, ReadsRound, Switches
from lightning_fl.runners.samples import Padded, Samples
from lightning_fl.runners.tuning import tune
from lightning_fl.runners.vectorized import VectorizedStep
from lightning_fl.types import FederationError

#: Number of different steps that are checked in a fit.
MOST_CALLS = 20


class StepChecks:
    """Check the first step of a fit, and later steps that may do something else.

    A module may begin with something after a warm-up. Then attributes have changed since the last
    round, or a step that reads the round calls other functions of torch.

    Args:
        step: The step of the clients.
        is_timed: Whether to choose the faster of vectorized and sequential steps by timing.
        compile: Whether to compile; see :func:`tune`.
    """

    def __init__(
        self, step: VectorizedStep, is_timed: bool, compile: bool | Literal["auto"]
    ) -> None:
        self._step, self._is_timed, self._compile = step, is_timed, compile
        #: Whether :func:`tune` has chosen how to train, in this fit or in the one that it resumes.
        self.is_tuned = False
        #: Whether :func:`check_state` and :func:`check_rates` were called.
        self._has_checked_state = self._has_checked_rates = False
        #: Attributes after ``on_client_start`` of the first client, for :func:`check_start`.
        self._first_start: Attributes | None = None
        #: Kinds of starts for which attributes were noted: whether clients start from different
        #: tensors.
        self._noted_starts = set[bool]()
        self._switches = Switches(step.module)
        #: Whether a step reads the round.
        self._reads_round = ReadsRound(step.module)
        self._round, self._known = -1, set[tuple[Any, ...]]()

    def note_start(self, starts_differ: bool) -> None:
        """Note attributes after ``on_client_start`` of the first client.

        Args:
            starts_differ: Whether the clients start from different tensors. Attributes are noted
                once for each kind of start.
        """
        if starts_differ not in self._noted_starts:
            self._noted_starts.add(starts_differ)
            self._first_start = Attributes(self._step.module)

    def begin_step(self, samples: Samples, steps_per_batch: int) -> None:
        """Check a step before it is made, and choose how to train at the first one.

        Args:
            samples: The samples of the local step.
            steps_per_batch: Number of local steps in a Lightning batch.

        Raises:
            FederationError: See the single checks.
        """
        step = self._step
        if self._first_start is not None:
            check_start(step, samples, self._first_start)
            self._first_start = None
        if step.stacks.count > 1 and not self.is_tuned:
            self.is_tuned = self._has_checked_state = True
            with self._reads_round.noted():
                check_state(step, samples)
                check_mapping(step, samples, is_first=True)
                if step.stacks.at_once:
                    tune(step, samples, self._is_timed, self._compile, steps_per_batch)
            self._may_differ(samples)  # notes what the step does
        elif not self._has_checked_state:
            self._has_checked_state = True
            with self._reads_round.noted():
                check_state(step, samples)
            if self._reads_round.is_read:  # a resumed run may begin with something
                check_mapping(step, samples)
            self._may_differ(samples)
        elif step.local.batch_idx == 0 and self._may_differ(samples):
            check_state(step, samples)
            check_mapping(step, samples)
        if step.rate_ratios and not self._has_checked_rates:
            self._has_checked_rates = True
            check_rates(step, samples)

    def _may_differ(self, samples: Samples) -> bool:
        """Return whether a step may do something that it has not done before."""
        return self._switches.have_changed() or self._calls_others(samples)

    def _calls_others(self, samples: Samples) -> bool:
        before, self._round = self._round, self._step.module.current_epoch
        is_same = before == self._round or not self._reads_round.is_read
        if is_same or len(self._known) >= MOST_CALLS:
            return False
        with Operations() as operations:
            self._step.tried_first(samples)
        is_new = (calls := tuple(operations.calls)) not in self._known
        self._known.add(calls)
        return is_new


def check_state(step: VectorizedStep, samples: Samples) -> None:
    """Check that clients affect each other only through parameters and buffers.

    Args:
        step: The step.
        samples: The samples of a local step.

    Raises:
        FederationError: If a step depends on what an earlier step has set; see :func:`carried`.
    """
    if names := carried(step, samples):
        name = type(step.module).__name__
        raise FederationError(
            f"{name}.training_step depends on values that an earlier step has set"
            f" ({', '.join(names[:3])}). Clients that train at once would share them. Store them in"
            " buffers (register_buffer), which are separate for each client, or train the module"
            " without VectorizedClients"
        )


def check_start(step: VectorizedStep, samples: Samples, first: Attributes) -> None:
    """Check that no step depends on an attribute that ``on_client_start`` sets for one client.

    Args:
        step: The step.
        samples: The samples of the first local step of the clients.
        first: The attributes as ``on_client_start`` has set them for the first client.

    Raises:
        FederationError: If one does; clients that train at once share the attributes of the last.
    """
    names = [name for name in first.changed() if name not in OF_LIGHTNING]

    def result(*of_first: str) -> list[Tensor]:
        """Return the gradients of a step with some attributes of the first client."""
        with left_alone(step.module):
            first.restore(of_first)
            return list(step.tried_first(samples).values())

    if names and (differs := comparison(result)) is not None and differs(*names):
        name = type(step.module).__name__
        raise FederationError(
            f"{name}.training_step depends on {' and '.join(names[:3])}, which on_client_start sets"
            " to another value for each client. Clients that train at once would share it. Store it"
            " in a buffer (register_buffer), or train the module without VectorizedClients"
        )


def check_mapping(step: VectorizedStep, samples: Samples, is_first: bool = False) -> None:
    """Check vectorized steps; if they are wrong, train clients one after another.

    Args:
        step: The step.
        samples: The samples of a local step.
        is_first: Whether it is the first check. In later ones, samples that cannot be stacked or
            that do not tell whether a step mixes them are not checked.
    """
    why = samples.why_not_stacked()
    if not step.stacks.maps or (why and not is_first):
        return
    if why := why or why_not_mapped(step, samples.pair()):
        _train_one_by_one(step, why, "" if is_first else " from here on")
    elif isinstance(samples, Padded) and step.weighted and (is_first or samples.sizes.max() > 1):
        step.weighted = not mixes_samples(step, samples.tensors)


def check_rates(step: VectorizedStep, samples: Samples) -> None:
    """Train clients one after another if a step reads the learning rate, which differs.

    Clients that train at once share the optimizer, and so the rate that a step finds there.

    Args:
        step: The step of clients with different learning rates.
        samples: The samples of the local step.
    """
    if not step.stacks.maps:
        return
    groups = step.optimizer.param_groups
    own, seen = list(groups), [_Group(group) for group in groups]
    groups[:] = seen
    try:
        step.tried_first(samples)
    finally:
        groups[:] = own
    if any(group.is_read for group in seen):
        why = "training_step reads the optimizer's learning rate, which differs between clients"
        _train_one_by_one(step, why)


class _Group(dict[str, Any]):
    """A parameter group that notes whether its learning rate is read."""

    is_read = False

    def __getitem__(self, key: str) -> Any:
        self.is_read |= key == "lr"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.is_read |= key == "lr"
        return super().get(key, default)


def _train_one_by_one(step: VectorizedStep, why: str, since: str = "") -> None:
    """Train clients one after another, and warn of it."""
    step.stacks.train_one_by_one()
    rank_zero_warn(
        f"{type(step.module).__name__} is trained one client after another{since}, not at once:"
        f" {why}"
    )
