"""Base class of additional loss terms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.step_module import StepModule
from lightning_fl.objectives.parameter_groups import ParameterGroup
from lightning_fl.objectives.recorder import Recorder, Trace


class TermModule(StepModule):
    """Base class of modules with terms: what a term may use of :class:`ClientModule`."""

    net: nn.Module

    def loss_with(self, batch: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch, without terms, for other tensors of the network.

        Args:
            batch: Batch ``(x, y)``.
            tensors: Parameters and buffers that replace those of the module, by name. Buffers are
                updated in place, as by a training step.
        """
        raise NotImplementedError

    def mean_of(self, values: Tensor) -> Tensor:
        """Return the mean over the samples of a batch, without padding.

        Args:
            values: One value per sample, ``[batch]``.
        """
        weight = self._sample_weight
        return values.mean() if weight is None else values @ weight


@dataclass(frozen=True)
class ModelView:
    """View of the client model or the global model for a term.

    Args:
        params: Parameters by name.
        outputs: Network outputs for the batch. None for the global model.
        trace: Recorded activations, if a term requires them.
        module: Module in training, for its loss with other tensors
            (:meth:`ClientModule.loss_with`) and its mean over samples
            (``module.mean_of``). None for the global model.
    """

    params: dict[str, Tensor]
    outputs: Tensor = None  # type: ignore[assignment]  # the global model has none
    trace: Trace = None  # type: ignore[assignment]  # only for terms that want it
    module: TermModule = None  # type: ignore[assignment]  # the global model has none


class Term(nn.Module, ABC):
    """Base class of additional loss terms, set in ``model.init_args.terms``.

    A term compares the local model with the global model of the round. It may also keep tensors
    for each client (:attr:`stays_local`), such as the client's model at the end of its last round
    (:class:`~lightning_fl.objectives.MOON`) or a second model that is trained beside the first
    (:class:`~lightning_fl.objectives.Ditto`): it creates them in :meth:`prepare`, and sets them in
    :meth:`on_client_start` and :meth:`on_client_end`. The tutorial "Your rule" has examples.
    """

    #: True if the term uses the samples other than through :meth:`ClientModule.loss_with` and
    #: ``module.mean_of``. Vectorized clients are then not padded with samples of
    #: weight 0.
    uses_batch = True
    #: True if the term uses recorded activations of the client model. :meth:`Term.build` is then
    #: called before the first step.
    wants_trace = False
    #: True if the term also uses those of the global model, in the mode of the client model.
    wants_global_trace = True
    #: True if the parameters and buffers of the term are local to each client: kept across rounds,
    #: and neither sent nor averaged. The state of the module does not contain them.
    stays_local = False
    #: Names of its parameters and buffers that are exchanged all the same, as those of the network.
    exchanged: Sequence[str] = ()
    #: True if the parameters of the term are a second network that must not change the training of
    #: the client model. Gradient clipping by norm is refused, because it would couple the two.
    is_independent = False
    #: True if half precision would round a sum over samples; it is refused.
    sums_samples = False
    #: Names of the modules with outputs to record. None records every point-wise non-linearity.
    points: Sequence[str] | None = None
    #: Attributes with a number that a policy may set for each round and client, with the allowed
    #: range as arguments of :func:`~lightning_fl.options.check_number`. In :meth:`Term.forward`,
    #: such an attribute is then a tensor without dimensions.
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Attributes that the loop sets to tensors of the client in training: ``class_counts``, its
    #: number of training samples per class, ``[classes]``, or a name that the aggregator
    #: broadcasts. The check of the first round has no broadcasts, so that they are as before.
    inputs: Sequence[str] = ()

    def __init__(self) -> None:
        super().__init__()
        hooks: Any = self  # untyped in torch
        hooks.register_state_dict_post_hook(_forget_local)
        hooks.register_load_state_dict_pre_hook(_miss_nothing_local)

    def prepare(self, module: TermModule) -> None:
        """Create tensors that depend on the network, at the start of a fit.

        Args:
            module: Module of the term.
        """

    def check(self, federation: Federation) -> None:
        """Raise a ``FederationError`` if the term does not fit the run, at the start of a fit.

        Args:
            federation: Description of the run.
        """

    def build(self, recorder: Recorder, trace: Trace) -> None:
        """Build modules that depend on the shapes of activations.

        Args:
            recorder: Recorder of the network.
            trace: Trace of an example batch.
        """

    def on_client_start(self, module: TermModule) -> None:
        """Set tensors of the term before the first local step of a client in a round.

        Called for each client, also vectorized. Write to tensors in place (``copy_``).

        Args:
            module: Module of the term, with the received model and the tensors of the client.
        """

    def on_client_end(self, module: TermModule) -> None:
        """Set tensors of the term after the last local step of a client in a round.

        Called for each client, also vectorized. Write to tensors in place (``copy_``).

        Args:
            module: Module of the term, with the trained model and the tensors of the client.
        """

    def personal_model(self, module: TermModule) -> dict[str, Tensor] | None:
        """Return the personal model of the client; None if the term has none.

        Args:
            module: Module of the term, with the received model and the tensors of the client.

        Returns:
            Parameters and buffers that differ from those of the module, by name.
        """
        return None

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Return the parameters with optimizer options of their own."""
        return ()

    @abstractmethod
    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the value of the term for a batch, a scalar.

        Args:
            client_model: Client model in training.
            global_model: Initial model of the client in this round; constant.
            batch: Batch ``(x, y)``.
        """


def settable(terms: Sequence[Term]) -> dict[str, tuple[int, str]]:
    """Return the numbers of terms that a policy may set.

    The name of a number is that of its attribute, such as ``mu``. If terms share it, the name is
    ``Proximal.mu``, and ``terms.0.mu`` for several terms of one class.

    Args:
        terms: The terms.

    Returns:
        Index of the term and attribute, by name.

    Example:
        >>> from lightning_fl.objectives import Proximal, RepresentationMatching, WeightDivergence
        >>> list(settable([Proximal(0.1), WeightDivergence(), RepresentationMatching()]))
        ['mu', 'WeightDivergence.coefficient', 'RepresentationMatching.coefficient']
    """
    numbers = [(i, each) for i, term in enumerate(terms) for each in term.hyperparameters]
    kinds = [type(term).__name__ for term in terms]
    short = [each for _, each in numbers]
    full = [f"{kinds[i]}.{each}" for i, each in numbers]
    found = {}
    for at, (i, each) in enumerate(numbers):
        name = f"terms.{i}.{each}" if full.count(full[at]) > 1 else full[at]
        found[each if short.count(each) == 1 else name] = i, each
    return found


def _forget_local(term: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove the local tensors of a term from the state of the module."""
    if isinstance(term, Term) and term.stays_local:
        kept = {prefix + name for name in term.exchanged}
        for name in [name for name in state if name.startswith(prefix) and name not in kept]:
            del state[name]


def _miss_nothing_local(term: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept a state without the local tensors of a term."""
    if isinstance(term, Term) and term.stays_local:
        for name, parameter in term.named_parameters():
            state.setdefault(prefix + name, parameter.detach())
