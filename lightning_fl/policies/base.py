"""Base classes of hyperparameter policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.feedback import Feedback
from lightning_fl.contracts.hyperparameters import Declared
from lightning_fl.contracts.phases import Phase, check_phases
from lightning_fl.contracts.plan import full
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, generator, run_seed
from lightning_fl.functional.tables import with_rows_of
from lightning_fl.options import check_exclusive, check_integer, check_number


def local_steps(values: Mapping[str, Tensor], batches_per_epoch: Tensor) -> Tensor:
    """Return the number of local steps for given hyperparameters, ``[k]``.

    Args:
        values: Hyperparameters with ``num_steps`` or ``local_epochs``. The default is one epoch.
        batches_per_epoch: Number of batches per local epoch of each client, ``[k]``.

    Example:
        >>> local_steps({"local_epochs": torch.tensor(1.5)}, torch.tensor([4, 5]))
        tensor([6, 8])
    """
    if (steps := values.get("num_steps")) is not None:
        return full(steps, batches_per_epoch)
    epochs = values.get("local_epochs", torch.ones(()))
    return (epochs * batches_per_epoch).round().clamp(min=1).long()


#: Hyperparameters of the loop, which must be positive.
POSITIVE = {"lr", "lr_factor", "num_steps", "local_epochs"}
#: Feedback signals that a policy may learn from.
Signal = Literal["val_loss", "client_losses", "contributions"]


class HyperparameterPolicy(nn.Module, ABC):
    """Choose the hyperparameters of each round and client, optionally learned from feedback.

    Keep learned values in buffers, which are saved in the checkpoint. A buffer keeps its shape:
    what grows belongs to ``get_extra_state``.

    Args:
        monitor: Name of the logged metric that is the validation loss, for policies that learn from
            ``val_loss``.
        phases: Phases of the local training of each client, in order, which train some of the
            parameters (:class:`~lightning_fl.runners.Phase`). They divide the local steps that the
            policy sets. By default, all parameters are trained together.

    Raises:
        FederationError: If not exactly one phase has no amount.
    """

    #: Fields of :class:`~lightning_fl.contracts.feedback.Feedback` that the policy learns from, in
    #: addition to the logged metrics. ``val_loss``: validation loss, also of the initial model.
    #: ``client_losses``: losses that clients report. ``contributions``: effect of each client on
    #: the validation loss, which requires a forward and backward pass over the validation samples.
    learns_from: frozenset[Signal] = frozenset()
    monitor: str
    phases: list[Phase]

    def __init__(self, monitor: str = "val_loss", phases: Sequence[Phase] = ()) -> None:
        super().__init__()
        check_phases(phases)
        self.monitor, self.phases = monitor, list(phases)

    def setup(self, federation: Federation) -> None:
        """Configure the policy for a run at the start of a fit.

        A policy that is incompatible with the run raises a ``FederationError`` here. The module has
        no optimizer yet, and ``federation.layout`` is None.

        Args:
            federation: Description of the run.
        """

    @abstractmethod
    def sample(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return hyperparameters by name, as a scalar for all clients or one value per client.

        ``lr`` is the learning rate (default: that of the module), and ``lr_factor`` multiplies it.
        The amount of local work is ``num_steps`` local steps or ``local_epochs`` epochs.
        ``participates`` is False for clients to exclude from the round. A number that the module
        declares, such as ``mu`` of a :class:`~lightning_fl.objectives.Proximal` term, is used in
        the local steps of the client. Other names are passed on in the plan. The result must depend
        only on the arguments and on saved state, because the method may be called twice per round.

        Args:
            round: Round index, from 0.
            clients: Indices of the sampled clients, ``[k]``.
        """

    def drawn(self, round: int, clients: Tensor) -> dict[str, Tensor]:
        """Return the result of :meth:`sample` on the CPU, with one value per client.

        Args:
            round: Round index, from 0.
            clients: Indices of the sampled clients, ``[k]``.
        """
        values = self.sample(round, clients).items()
        return {name: full(torch.as_tensor(value).cpu(), clients) for name, value in values}

    def max_local_steps(self, round: int, batches_per_epoch: Tensor) -> int:
        """Return an upper bound on the local steps of any client in a round.

        ``trainer.estimated_stepping_batches`` is the sum over all rounds of the run. A policy that
        learns the amount of local work must override this method and return its largest value.

        Args:
            round: Round index, from 0.
            batches_per_epoch: Number of batches per local epoch of each client, ``[num_clients]``.

        Raises:
            FederationError: If the policy learns the amount of local work and does not override
                this method.
        """
        values = self.drawn(round, torch.arange(len(batches_per_epoch)))
        if self.learns and values.keys() & {"num_steps", "local_epochs"}:
            name = type(self).__name__
            raise FederationError(
                f"trainer.estimated_stepping_batches is unknown: {name} overrides update, so the"
                f" local steps of later rounds may change. Override {name}.max_local_steps(round,"
                " batches_per_epoch) to return the largest number of local steps"
            )
        return int(local_steps(values, batches_per_epoch).max())

    def update(self, feedback: Feedback) -> None:  # most policies do not learn
        """Learn from a completed round in which clients trained.

        Args:
            feedback: Plan and outcome of the round.
        """

    @property
    def learns(self) -> bool:
        """True if the policy overrides :meth:`update`."""
        return type(self).update is not HyperparameterPolicy.update

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last round. They are logged and written to the table of rounds."""
        return {}


class RandomPolicy(HyperparameterPolicy):
    """Base class of stochastic policies. Draws are a function of the seed and the round.

    Args:
        seed: Seed of the draws. None uses the seed of the ``FederatedLoop``, else that of
            ``seed_everything``, else 0. A resumed run keeps its seed.
        monitor: See :class:`HyperparameterPolicy`.
        phases: See :class:`HyperparameterPolicy`.

    Raises:
        FederationError: If the seed is negative.
    """

    drawn_from: Tensor

    def __init__(
        self, seed: int | None, monitor: str = "val_loss", phases: Sequence[Phase] = ()
    ) -> None:
        super().__init__(monitor, phases)
        self.seed = check_integer("seed", seed, min=0, optional=True)
        #: Seed of the run, if known.
        self.run_seed: int | None = None
        #: Seed of the draws; -1 before the first draw.
        self.register_buffer("drawn_from", torch.tensor(-1))

    def setup(self, federation: Federation) -> None:
        """Take the seed of the run."""
        super().setup(federation)
        self.run_seed = federation.seed

    def random(self, purpose: RandomStream, round: int) -> torch.Generator:
        """Return the random generator of a round.

        Args:
            purpose: Random stream of the draws.
            round: Round index, from 0.
        """
        if self.drawn_from < 0:
            own = self.run_seed if self.seed is None else self.seed
            self.drawn_from.fill_(run_seed(own))
        return generator(int(self.drawn_from), purpose, round)


class ChoicePolicy(RandomPolicy):
    """Base class of policies that learn which of some values to choose.

    What they learn is small, and stays on the CPU in float64.
    """

    #: Name of the option with the values, for error messages.
    option: ClassVar[str]
    #: Names of the buffers whose number of rows is that of the checkpoint.
    tables: ClassVar[Sequence[str]]
    #: Values to choose from, by name of the hyperparameter.
    choices: Mapping[str, Sequence[float]]

    def setup(self, federation: Federation) -> None:
        """Raise an error if a value is out of the range that the module declares."""
        super().setup(federation)
        check_declared(f"{type(self).__name__}({self.option}=...)", self.choices, federation)

    def max_local_steps(self, round: int, batches_per_epoch: Tensor) -> int:
        """Return the local steps for the largest value to choose from."""
        most = {name: torch.tensor(max(values)) for name, values in self.choices.items()}
        return int(local_steps(most, batches_per_epoch).max())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Resize the tables to those of the checkpoint; refuse NaN."""
        for name, buffer in list(self.named_buffers()):
            saved = state_dict.get(prefix + name, buffer)
            if name in self.tables:
                setattr(self, name, with_rows_of(buffer, saved))
            if saved.isnan().any():
                raise FederationError(f"{name} of the policy in the checkpoint is NaN")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self


class PolicyWrapper(HyperparameterPolicy):
    """Base class of policies that change some hyperparameters of another policy."""

    policy: HyperparameterPolicy

    def setup(self, federation: Federation) -> None:
        """Set up both policies; see :meth:`HyperparameterPolicy.setup`."""
        super().setup(federation)
        self.policy.setup(federation)

    def max_local_steps(self, round: int, batches_per_epoch: Tensor) -> int:
        """Return the upper bound of the other policy."""
        return self.policy.max_local_steps(round, batches_per_epoch)

    def update(self, feedback: Feedback) -> None:
        """Update the other policy."""
        self.policy.update(feedback)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the other policy."""
        return self.policy.metrics()


def validated(policy: HyperparameterPolicy, feedback: Feedback) -> tuple[float, float]:
    """Return the validation loss before and after a round.

    Args:
        policy: Policy that requires it, for the error message.
        feedback: Outcome of the round.

    Raises:
        FederationError: If the model before or after the round was not validated.
    """
    before, after = feedback.val_loss_before, feedback.val_loss
    if before is None or after is None:
        raise FederationError(
            f"{type(policy).__name__} requires the validation loss after every round, and round"
            f" {feedback.plan.round + 1} was not validated: set trainer.check_val_every_n_epoch=1,"
            " keep validation samples (limit_val_batches), or use loss='clients'"
        )
    return before, after


def shared_monitor(policies: Iterable[HyperparameterPolicy]) -> str:
    """Return the metric that is the validation loss for all policies of a run.

    Args:
        policies: The policies. Those that do not learn from the validation loss are ignored.

    Raises:
        FederationError: If they monitor different metrics.
    """
    names = sorted({policy.monitor for policy in policies if "val_loss" in policy.learns_from})
    if len(names) > 1:
        raise FederationError(
            f"the policies of a run must learn from one validation loss, got {' and '.join(names)}:"
            " set the same monitor"
        )
    return names[0] if names else "val_loss"


def check_values(option: str, values: Mapping[str, Sequence[float]]) -> None:
    """Check the values from which a policy chooses.

    Args:
        option: Name of the option for error messages.
        values: Values of each hyperparameter.

    Raises:
        FederationError: If a value is not finite, a value of ``lr``, ``lr_factor``, ``num_steps``
            or ``local_epochs`` is not positive, ``num_steps`` has a fraction, or ``num_steps`` and
            ``local_epochs`` are both given.
    """
    check_exclusive(num_steps=values.get("num_steps"), local_epochs=values.get("local_epochs"))
    for name, given in values.items():
        for value in given:
            above = 0 if name in POSITIVE else None
            check_number(f"{name} in {option}", value, above=above)
            if name == "num_steps" and value % 1:  # a config turns 5 into 5.0
                check_integer(f"num_steps in {option}", value, min=1)


def check_declared(
    source: str,
    values: Mapping[str, Sequence[float]],
    federation: Federation,
    required: bool = False,
) -> None:
    """Check the values that a policy sets against the ranges that the module declares.

    Args:
        source: Policy and option for error messages.
        values: Values of each hyperparameter.
        federation: Description of the run. Outside of a fit nothing is checked.
        required: Whether the module must declare all names. Otherwise those of the loop, such as
            ``lr``, are allowed, too.

    Raises:
        FederationError: If a value is out of the range of a number of the module, or the module
            does not declare a required name.
    """
    declared = Declared(federation.module)
    for name, given in values.items():
        if required and federation.module is not None and name not in declared.values:
            raise FederationError(
                f"{source} sets {name}, and {type(federation.module).__name__} declares"
                f" {sorted(declared.values)}: add a term with this number to"
                " model.init_args.terms, or a module with federated_hyperparameters"
            )
        declared.check(source, name, given)
