"""Representation matching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, derive_seed, seeded_rng
from lightning_fl.functional.representation import matching_error, pad_to, unpool
from lightning_fl.objectives.parameter_groups import ParameterGroup
from lightning_fl.objectives.recorder import Recorder, Trace
from lightning_fl.objectives.terms import ModelView, Term
from lightning_fl.options import check_choice, check_integer, check_number, check_that

CONVOLUTIONS: dict[int, Any] = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


class RepresentationMatching(Term):
    r"""Penalize the error of reconstructing global representations from client representations.

    Each layer of the global model is reconstructed from the next higher layer of the client model.
    Mostafa (2019), eq. 1 and 2: with activations :math:`a_j` at the points of interest (the input,
    every point-wise non-linearity, the top layer)

    .. math:: c \sum_j \frac1{|b|} \sum_{x \in b}
        \lVert f_j(a_{j+1}(x; w); \theta_j) - a_j(x; w^t) \rVert^2

    A matching layer :math:`f_j` is linear if its source is flat, and a convolution if its source
    is spatial. The non-linearity of the target follows. Max pooling between two points is
    reversed with the switches of the client model: before the matching layer if the pooling follows
    a convolution, otherwise after it. With ``source="same"`` the source is :math:`a_j(x; w)`, no
    pooling is reversed, and the input is not a target.

    The parameters :math:`\theta` are local to each client: kept across rounds, and never sent or
    averaged. The state of the module does not contain them. Their learning rate is ``lr_factor``
    times the client's. ``optimizer`` gives them another optimizer than the network; its state is
    kept across rounds with ``optimizer_state="local"`` of the loop.

    The global model runs in the same mode as the client model: it draws its own dropout masks, and
    normalizes by batch statistics if the client model does.

    The sum grows with the number of features. Its relative weight depends on the scale of the
    input, on ``coefficient`` and on ``reduction``. The default is that of the author's published
    program.

    Args:
        coefficient: Factor :math:`c`, at least 0. A policy may set it for each round and client.
        reduction: ``sum`` adds the squared errors of a layer's features (the paper). ``mean``
            averages them, and needs larger coefficients, such as 0.1.
        points: Names of the modules with outputs that are the points. None selects all
            non-linearities. The non-linearity of a target is applied only if the point itself is a
            non-linearity.
        seed: Seed of the initial matching layers of a client.
        source: Layer of the client model from which a layer of the global model is reconstructed:
            ``next``, the next higher one (the paper), or ``same``, the corresponding one (which the
            paper found to be worse).
        kernel_size: Size of the kernels of convolutions, odd.
        lr_factor: Learning rate of the matching layers, as a multiple of the client's.
        optimizer: Function that creates the optimizer of the matching layers, such as
            ``torch.optim.Adam``, with the learning rate of ``lr_factor``. None uses that of the
            module.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the network cannot
            be traced or the shapes of two neighboring points are incompatible.

    Example:
        >>> from lightning_fl import ClientModule
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> module = ClientModule(net, terms=[RepresentationMatching()])
        >>> module.build_terms(torch.zeros(1, 4))
        >>> module.terms[0].layers
        ModuleList(
          (0): Linear(in_features=3, out_features=4, bias=True)
          (1): Linear(in_features=2, out_features=3, bias=True)
        )
    """

    wants_trace = True
    stays_local = True
    hyperparameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {"coefficient": {"min": 0}}
    recorder: Recorder

    def __init__(
        self,
        coefficient: float = 1e-4,
        reduction: Literal["sum", "mean"] = "sum",
        points: Sequence[str] | None = None,
        seed: int = 0,
        source: Literal["next", "same"] = "next",
        kernel_size: int = 3,
        lr_factor: float = 1.0,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__()
        self.coefficient = check_number("coefficient", coefficient, min=0)
        self.reduction = check_choice("reduction", reduction, "sum", "mean")
        self.source = check_choice("source", source, "next", "same")
        self.seed = check_integer("seed", seed, min=0)
        self.kernel_size = check_integer("kernel_size", kernel_size, min=1)
        check_that("kernel_size", kernel_size, kernel_size % 2 == 1, "odd")
        self.lr_factor = check_number("lr_factor", lr_factor, above=0)
        self.optimizer = optimizer
        self.points = None if points is None else list(points)
        #: Matching layers, from the input up, available from the start of a fit.
        self.layers = nn.ModuleList()

    def build(self, recorder: Recorder, trace: Trace) -> None:
        """Create the matching layers for the shapes of the activations."""
        self.recorder = recorder
        for j, activation in enumerate(trace.activations):
            if not isinstance(activation, Tensor) or activation.ndim < 2:
                raise FederationError(
                    f"representation matching requires activations [batch, features, ...], and"
                    f" activation {j} is {type(activation).__name__}"
                    f" {list(getattr(activation, 'shape', []))}: use other points"
                )
        layers = []
        with seeded_rng(derive_seed(self.seed, RandomStream.MATCHING)):
            for at, j in self._pairs(len(trace.activations)):
                source, target = trace.activations[at], trace.activations[j]
                if source.ndim == 2:
                    layer: nn.Module = nn.Linear(source.shape[1], target[0].numel())
                elif source.ndim == target.ndim and source.ndim in CONVOLUTIONS:
                    convolution = CONVOLUTIONS[source.ndim]
                    size = self.kernel_size
                    layer = convolution(source.shape[1], target.shape[1], size, padding=size // 2)
                else:
                    raise FederationError(
                        f"representation matching cannot reconstruct activation {j}, of shape"
                        f" {list(target.shape[1:])}, from activation {at}, of shape"
                        f" {list(source.shape[1:])}: use other points"
                    )
                layers.append(layer.to(source.dtype))
        self.layers = nn.ModuleList(layers)

    def parameter_groups(self) -> Sequence[ParameterGroup]:
        """Return the matching layers, if they have optimizer options of their own."""
        if self.lr_factor == 1 and self.optimizer is None:
            return []
        params = list(self.layers.parameters())
        return [ParameterGroup(params, self.lr_factor, optimizer=self.optimizer)]

    def _pairs(self, points: int) -> list[tuple[int, int]]:
        """Return the index of the source and of the target of each matching layer."""
        if self.source == "same":
            return [(j, j) for j in range(1, points)]
        return [(j + 1, j) for j in range(points - 1)]

    def forward(self, client_model: ModelView, global_model: ModelView, batch: Any) -> Tensor:
        """Return the weighted sum of the errors of all layers."""
        return self.coefficient * torch.stack(self.per_layer(client_model, global_model)).sum()

    def per_layer(self, client_model: ModelView, global_model: ModelView) -> list[Tensor]:
        """Return the error of each layer, from the input up, without the coefficient."""
        own, fixed = client_model.trace.activations, global_model.trace.activations
        errors = []
        for layer, (at, j) in zip(self.layers, self._pairs(len(own)), strict=True):
            source, target = own[at], fixed[j]
            if source.ndim == 2 or at == j:
                guess = layer(source)
            else:
                guess = self._spatial(layer, j, client_model.trace, target)
            if (nonlinearity := self.recorder.points[j].nonlinearity) is not None:
                guess = nonlinearity(guess)
            errors.append(matching_error(guess.flatten(1), target.flatten(1), self.reduction))
        return errors

    def _spatial(self, layer: nn.Module, j: int, trace: Trace, target: Tensor) -> Tensor:
        """Reconstruct spatial maps from the next higher maps, and reverse poolings in between."""
        guess, size = trace.activations[j + 1], target.shape[2:]
        flags = self.recorder.points[j + 1].unpool_first
        pools = list(zip(trace.switches[j + 1], flags, strict=True))[::-1]
        for (index, inside), comes_first in pools:
            if comes_first:
                guess = unpool(pad_to(guess, index.shape[2:]), index, inside)
        later = [pool for pool, comes_first in pools if not comes_first]
        guess = layer(pad_to(guess, later[0][0].shape[2:] if later else size))
        for index, inside in later:
            guess = unpool(pad_to(guess, index.shape[2:]), index, inside)
        return pad_to(guess, size)
