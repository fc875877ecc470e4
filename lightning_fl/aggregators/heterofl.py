"""HeteroFL and FedRolex: clients with narrower networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.errors import FederationError
from lightning_fl.functional.randomness import RandomStream, generator, seeded_rng
from lightning_fl.functional.sub_networks import held_entries, held_units, mean_over_holders
from lightning_fl.functional.summation import sum_value
from lightning_fl.options import check_choice, check_flag, check_number, check_that, is_list
from lightning_fl.transforms.compression import Compression

#: Layers with units: weights are ``[out, in, ...]``.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class HeteroFL(FedAvg):
    r"""Average networks of different widths, entry by entry (Diao et al., 2021).

    A client with the rate :math:`r_k` trains the first :math:`\lceil r_k d \rceil` of the :math:`d`
    units of every hidden layer, with all inputs of the network and all classes. These are the
    entries :math:`H_k` of the global model, and

    .. math:: x_i \leftarrow x_i + \frac{1}{|\{k: i \in H_k\}|} \sum_{k: i \in H_k} (y_{ki} - x_i);

    entries that no client of the round holds do not change. ``window="rolling"`` is FedRolex (Alam
    et al., 2022): the units begin at unit :math:`t` in round :math:`t`, cyclically, so that each
    entry is trained.

    Clients train at full width, with the entries outside of :math:`H_k` at 0, where they stay (the
    noise of :class:`~lightning_fl.objectives.DPSGD` moves them during training). The traffic is
    that of :math:`H_k`; arithmetic and memory are those of the whole network. The global model is
    validated at full width; :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates the
    units of the last round. Rates of 1 are :class:`FedAvg` with uniform weights.

    The network is a stack of ``nn.Linear`` and ``nn.Conv1d`` to ``nn.Conv3d``, registered in the
    order in which they run; a check on two samples at the start of a fit refuses others.
    Activations map 0 to 0. Normalization is per channel and uses the statistics of the batch
    (``track_running_stats=False``), since running statistics of different widths have no common
    mean.

    Left out are the authors' scaler, which divides activations by the rate in training and has no
    effect before such a normalization, the cross-entropy of the client's own classes (see
    :class:`~lightning_fl.objectives.FedRS` with ``alpha=0``), and rates that change from round to
    round.

    Args:
        rates: Rates in (0, 1]. Client :math:`k` has the rate :math:`k` modulo their number, so that
            a list with one rate per client gives each its own. The default is the authors'.
        drawn: Whether the rates are distributed among the clients at random, with the run's seed.
        window: ``first`` takes the first units in all rounds, and ``rolling`` moves on by a unit
            in each round.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module is no
            stack of layers, has buffers, or has parameters that are frozen or local; if clients of
            a rolling window keep what belongs to entries.

    Example:
        >>> from lightning_fl import FederatedLoop
        >>> loop = FederatedLoop(HeteroFL(rates=[1, 0.5, 0.25]))
    """

    def __init__(
        self,
        rates: Sequence[float] = (1.0, 0.5, 0.25, 0.125, 0.0625),
        drawn: bool = False,
        window: Literal["first", "rolling"] = "first",
    ) -> None:
        super().__init__("uniform")
        check_that("rates", rates, is_list(rates) and len(rates) > 0, "a list of one or more rates")
        self.rates = [check_number("each of rates", rate, above=0, max=1) for rate in rates]
        #: The distinct rates, in ascending order.
        self.distinct = sorted(set(self.rates))
        self.drawn = check_flag("drawn", drawn)
        self.window = check_choice("window", window, "first", "rolling")
        #: Place of the rate of each client in ``distinct``, ``[num_clients]``; known in a fit.
        self.levels = torch.empty(0, dtype=torch.int64)
        #: Number of inputs of the network and of units of each layer, and by name of a tensor the
        #: places of its rows and columns in this list; known in a fit.
        self.widths: list[int] = []
        self.axes: dict[str, tuple[int, int | None]] = {}
        # Mask of the entries of each distinct rate in the round, [rates, P]; all outside of a fit.
        held = torch.ones(len(self.distinct), 1, dtype=torch.bool)
        self.register_buffer("held", held, persistent=False)

    # --- the run ----------------------------------------------------------------------------------

    def setup(self, federation: Federation) -> None:
        """Find the layers, and determine the rate of each client."""
        super().setup(federation)
        levels = torch.tensor([self.distinct.index(rate) for rate in self.rates])
        self.levels = levels[torch.arange(federation.num_clients) % len(levels)]
        if self.drawn:
            random = generator(federation.seed, RandomStream.RANKS)
            self.levels = self.levels[torch.randperm(len(self.levels), generator=random)]
        if federation.layout is None:
            return
        name, transforms = type(self).__name__, federation.update_transforms
        keeps = any(isinstance(t, Compression) and t.error_feedback for t in transforms)
        if self.window == "rolling" and (keeps or federation.optimizer_state != "reset"):
            raise FederationError(
                f"{name} moves the units of a client in each round, so clients cannot keep"
                " optimizer states or errors of a compression: set optimizer_state: reset and"
                " error_feedback: false, or window: first"
            )
        self.widths, self.axes = stack_of(name, federation.module, federation.layout)
        # A server of remote clients has no example; its clients check.
        if (example := federation.data.example()) is not None:
            self._check(federation.module, example)
        self._hold(0)

    @torch.no_grad()
    def _check(self, module: LightningModule, example: Any) -> None:
        """Check that units without weights are 0, and that units act through weights only."""
        name = type(self).__name__
        x = example[0] if isinstance(example, list | tuple) else None
        if not isinstance(x, Tensor) or type(module).forward is LightningModule.forward:
            raise FederationError(
                f"{name} checks layers by forward(x) of a tensor x of a batch (x, ...): return such"
                f" tuples from the dataset, and implement forward in {type(module).__name__}"
            )
        weights = dict(module.named_parameters())
        dtype = next(iter(weights.values())).dtype if x.is_floating_point() else x.dtype
        x = x.to(module.device, dtype)

        def output(kept: Mapping[str, Tensor]) -> Tensor:
            """Return the output of a network of random weights of which some are not 0."""
            with seeded_rng(0, module.device):  # of dropout, too
                drawn = {n: torch.randn_like(p) * kept[n].to(p.device) for n, p in weights.items()}
                value: Tensor = functional_call(module, drawn, (x,))
                return value

        is_stack, first = True, int(self.window == "rolling")
        for rate in self.distinct:
            held, rows = self._masks(rate, first), self._masks(rate, first, rows=True)
            cut, loose = output(held), {n: held[n] | ~rows[n] for n in held}
            near = 1e-3 * float(cut.std())
            is_stack &= all(torch.allclose(cut, output(m), 1e-3, near) for m in (rows, loose))
        if not is_stack:
            raise FederationError(
                f"{name} requires a stack of layers whose units are 0 without weights and act on"
                f" others through weights only, and {type(module).__name__} is none: use layers in"
                " the order of their definition, normalization per channel, and ReLU or tanh"
            )

    # --- entries ----------------------------------------------------------------------------------

    def _masks(self, rate: float, first: int, rows: bool = False) -> dict[str, Tensor]:
        """Return the masks of the entries of a rate by name, or of whole rows."""
        inner = range(1, len(self.widths) - 1)
        units = [held_units(d, rate if i in inner else 1, first) for i, d in enumerate(self.widths)]
        shapes = self.known_federation.known_layout.shapes
        return {
            name: held_entries(shapes[name], units[r], None if c is None or rows else units[c])
            for name, (r, c) in self.axes.items()
        }

    def _hold(self, first: int) -> None:
        """Set the entries of each rate."""
        masks = [self._masks(rate, first).values() for rate in self.distinct]
        rows = [torch.cat([mask.flatten() for mask in each]) for each in masks]
        self.held = torch.stack(rows).to(self.device)

    def _of(self, clients: Tensor) -> Tensor:
        """Return the mask of the entries that each client holds, ``[k, P]``."""
        return self.held[self.levels[clients.cpu()].to(self.held.device)]

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Move a rolling window; nothing is sent in addition to the model."""
        if self.window == "rolling":
            self._hold(plan.round)
        return {}

    def models_for(self, clients: Tensor) -> Tensor:
        """Return the global model with zeros outside of the entries of each client, ``[k, P]``."""
        return self.server * self._of(clients)

    def unused_entries(self, clients: Tensor) -> Tensor:
        """Return the number of entries that a client does not hold, ``[k]``."""
        return (~self._of(clients)).sum(1).cpu()

    # --- the average ------------------------------------------------------------------------------

    def allocate(self, server: Tensor) -> None:
        """Declare the sum of the updates, and the number of clients of each rate."""
        super().allocate(server)
        self.add_counts(*(f"holders_{level}" for level in range(len(self.distinct))))

    def update(self, clients: ClientUpdate) -> None:
        """Add what clients hold; what attacks and update transforms add beyond it is not sent."""
        super().update(replace(clients, delta=clients.delta * self._of(clients.clients)))
        counts = self.levels[clients.clients.cpu()].bincount(minlength=len(self.distinct))
        holders: Mapping[str, Any] = self.metric_state
        for level, count in enumerate(counts.tolist()):
            holders[f"holders_{level}"].add_(count)

    def compute(self) -> Tensor:
        """Return the global model with the mean over the holders of each entry."""
        count = torch.zeros(self.held.shape[1], dtype=torch.float64, device=self.held.device)
        holders: Mapping[str, Any] = self.metric_state
        for level, held in enumerate(self.held):
            count += held * holders[f"holders_{level}"]
        return mean_over_holders(self.server, sum_value(self.total), count)


def stack_of(
    rule: str, module: LightningModule, layout: VectorLayout
) -> tuple[list[int], dict[str, tuple[int, int | None]]]:
    """Return the widths of a stack of layers, and the layers of the axes of each tensor.

    Args:
        rule: Name of the rule for error messages.
        module: The module.
        layout: Layout of the exchanged tensors.

    Returns:
        The number of inputs and of the units of each layer, and by name the places of rows and
        columns in this list.

    Raises:
        FederationError: If the module has buffers, parameters that are frozen or local, or tensors
            that do not fit the layer before.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 2, bias=False))
        >>> shapes = {name: p.shape for name, p in net.named_parameters()}
        >>> stack_of("HeteroFL", net, VectorLayout(shapes, 112))
        ([1, 4, 2], {'0.weight': (1, 0), '0.bias': (1, None), '2.weight': (2, 1)})
    """
    if layout.has_buffers:
        raise FederationError(
            f"{rule} does not average buffers of networks of different widths, and"
            f" {type(module).__name__} has some: set track_running_stats=False in BatchNorm layers"
        )
    weights = {f"{n}.weight": m for n, m in module.named_modules() if isinstance(m, LAYERS)}
    widths, axes = list[int](), dict[str, tuple[int, int | None]]()
    for name, param in module.named_parameters():
        size, is_weight = layout.shapes.get(name), name in weights
        if size is None or not param.requires_grad:
            raise FederationError(
                f"{rule} cuts all parameters of a network, and {name} is frozen or stays with the"
                " clients: train and exchange it, or use FedAvg"
            )
        if is_weight and not widths:
            widths.append(size[1])
        fits = bool(widths) and size[is_weight] % widths[-1] == 0 and (is_weight or len(size) == 1)
        if not fits:
            raise FederationError(
                f"{rule} does not know which entries of {name}, {list(size)}, belong to a unit: use"
                " a stack of nn.Linear and nn.Conv layers with normalization per channel, or FedAvg"
            )
        if is_weight:
            widths.append(size[0])
        axes[name] = (len(widths) - 1, len(widths) - 2 if is_weight else None)
    return widths, axes
