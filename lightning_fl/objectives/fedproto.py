"""FedProto: clients exchange class means of features instead of networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_fl.contracts.context import Federation
from lightning_fl.errors import FederationError
from lightning_fl.functional.prototypes import class_indicators, prototype_distances
from lightning_fl.objectives.calibrated import check_classes
from lightning_fl.objectives.recorder import LAST_INPUT, Recorder, Trace
from lightning_fl.objectives.terms import ModelView, Term, TermModule
from lightning_fl.options import check_choice, check_number

#: Mean weight below which no client had a class: updates are summed with rounding errors.
LEAST = 1e-9


class FedProto(Term):
    r"""Pull features towards the mean features of their class on all clients.

    FedProto (Tan et al., 2022), with the features :math:`f` of the :math:`h` inputs of the last
    layer and the prototype :math:`c_y` of a class:

    .. math:: \frac{\lambda}{|b|\, h} \sum_{i \in b} \lVert f(x_i) - c_{y_i} \rVert^2, \qquad
        c_y = \frac{\sum_k a_k b_{ky} c_{ky}}{\sum_k a_k b_{ky}}

    :math:`c_{ky}` are the means of :math:`f` by class over the local steps of client :math:`k` in
    the round, in training mode. :math:`a_k` is the weight of a client in the aggregation rule; the
    authors have 1, ``FedAvg("uniform")``. :math:`b_{ky}` is 1 if the client has the class, else 0,
    or the number of its samples in these local steps. A class without a client in a round has no
    prototype in the next one, and its samples add 0; so there is no term in the first round.
    Equation 6 of the paper divides by the number of clients once more, which would shrink the
    prototypes; here it does not.

    Clients exchange :math:`b_{ky} c_{ky}` and :math:`b_{ky}`. Keep the network on the clients
    with ``local_parameters=["net.*"]`` of the loop; otherwise the rule averages networks as well.
    The own head of a client predicts: :class:`~lightning_fl.callbacks.PersonalizedEvaluation`
    evaluates it in the column ``server``. ``strength=0`` is local training.

    Args:
        strength: Strength :math:`\lambda`, at least 0. The authors use 1, and 0.1 for CIFAR-10. A
            policy may set it for each round and client.
        weighting: Weights :math:`b_{ky}`: ``uniform`` as in the authors' program, or ``samples``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the labels of the
            data are not classes, or the network cannot be traced or does not end with a linear
            layer, or has half precision.

    Example:
        >>> from lightning_fl import ClientModule
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> module = ClientModule(net, terms=[FedProto()])
    """

    wants_trace = True
    wants_global_trace = False
    points = LAST_INPUT
    stays_local = True
    sums_samples = True
    exchanged = ("weighted", "weights")
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"strength": {"min": 0}}
    #: Prototypes that the client received, and whether a class has one.
    prototypes: Tensor
    known: Tensor
    #: Sums of features and numbers of samples by class, of the local steps so far.
    sums: Tensor
    seen: Tensor

    def __init__(
        self, strength: float = 1.0, weighting: Literal["uniform", "samples"] = "uniform"
    ) -> None:
        super().__init__()
        self.strength = check_number("strength", strength, min=0)
        self.weighting = check_choice("weighting", weighting, "uniform", "samples")
        self._allocate(torch.zeros(0, 0))

    def _allocate(self, like: Tensor) -> None:
        """Create all tensors, for prototypes of a shape.

        What the federation learns are parameters. They have no gradient: steps of the optimizer do
        not matter, since :meth:`on_client_end` writes to them.
        """
        number = like.new_zeros(len(like))
        #: Weighted prototypes, ``[classes, h]``, and their weights, ``[classes]``.
        self.weighted = nn.Parameter(torch.zeros_like(like))
        self.weights = nn.Parameter(number.clone())
        for rows, numbers in (("prototypes", "known"), ("sums", "seen")):
            self.register_buffer(rows, torch.zeros_like(like), persistent=False)
            self.register_buffer(numbers, number.clone(), persistent=False)

    def prepare(self, module: TermModule) -> None:
        """Check that samples have classes."""
        check_classes(self, module)

    def check(self, federation: Federation) -> None:
        """Refuse what does not exchange means of the prototypes of all samples."""
        rule, name = federation.aggregator, type(federation.aggregator).__name__
        wrong = [name] * (name not in ("FedAvg", "ToServer"))  # a server checks its own rule
        wrong += ["normalization='all'"] * (getattr(rule, "normalization", None) == "all")
        wrong += ["an update transform"] * bool(federation.update_transforms)
        if wrong:
            raise FederationError(
                f"FedProto exchanges weighted means and their weights, and {wrong[0]} would change"
                " them or their scale: use FedAvg(normalization='round') without update transforms"
            )
        if federation.shares_samples:
            raise FederationError(
                "FedProto needs all samples of a client in one process:"
                " use strategy='client_parallel'"
            )

    def build(self, recorder: Recorder, trace: Trace) -> None:
        """Create the prototypes for the shapes of features and outputs."""
        features, outputs = (each.flatten(1) for each in trace.activations[-2:])
        if self.weighted.shape != (outputs.shape[1], features.shape[1]):
            self._allocate(features.new_zeros(outputs.shape[1], features.shape[1]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the shape of the prototypes from the state, as it is known in a fit only."""
        if not state_dict[f"{prefix}weighted"].numel():  # of a module that was not fitted
            zeros = {prefix + n: torch.zeros_like(p) for n, p in self.named_parameters()}
            state_dict = {**state_dict, **zeros}
        saved = state_dict[f"{prefix}weighted"]
        if saved.shape != self.weighted.shape:
            self._allocate(saved.to(self.weighted))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def on_client_start(self, module: TermModule) -> None:
        """Compute the prototypes, and start the means of the round."""
        self.known.copy_(self.weights > LEAST)
        self.prototypes.copy_(self.weighted / self.weights.where(self.known > 0, 1)[:, None])
        self.sums.zero_()
        self.seen.zero_()

    @torch.no_grad()
    def on_client_end(self, module: TermModule) -> None:
        """Write the prototypes of the client, which it sends."""
        weights = self.seen if self.weighting == "samples" else (self.seen > 0).to(self.seen)
        self.weights.copy_(weights)
        self.weighted.copy_(self.sums * (weights / self.seen.clamp(min=1))[:, None])

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the mean distance to the prototypes, and add the features to their means."""
        features = client_model.trace.activations[-2].flatten(1)
        indicators = class_indicators(batch[1], len(self.seen), features)
        self.sums.add_(indicators.mT @ features.detach())
        self.seen.add_(indicators.sum(0, dtype=self.seen.dtype))
        distances = prototype_distances(features, indicators, self.prototypes, self.known)
        return self.strength * client_model.module.mean_of(distances)
