"""A mixture of models for each client."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fl.functional.mixture import mixture_log_probabilities, responsibilities
from lightning_fl.functional.randomness import run_seed, seeded_rng
from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.types import FederationError

#: The least weight of a component: one of 0 would stay so.
LEAST = 1e-6


class FedEM(ClientModule):
    r"""Let all clients share :math:`M` models, of which each has a mixture (Marfoq et al., 2021).

    In a round client :math:`k`, which has mixture weights :math:`\pi_k`, gives each sample to the
    components that it was sent, :math:`q_i(m) \propto \pi_{km} e^{-\ell(\theta_m; x_i, y_i)}` (the
    E step, by components in evaluation), and trains all of them by

    .. math:: \frac{1}{|b|} \sum_{i \in b} \sum_m q_i(m)\, \ell(\theta_{km}; x_i, y_i).

    The next round's :math:`\pi_{km}` is the mean of :math:`q_i(m)` over the samples that it trained
    on: all of them, where it makes whole passes. Weights stay with the client; components are
    averaged by the server's rule (:class:`~lightning_fl.aggregators.FedAvg`, or
    :class:`~lightning_fl.aggregators.Gossip` without a server). A mixture predicts
    :math:`\log \sum_m \pi_{km} \operatorname{softmax}(h_m(x))`; the server has equal weights.

    Args:
        net: A component, from inputs to logits. The others are like it, each drawn anew.
        components: :math:`M`.
        optimizer: Makes the optimiser from the parameters.
        seed: Component :math:`m` is drawn from seed + m; None is that of ``seed_everything``, else
            0.

    Raises:
        FederationError: If there is no component, the network has buffers (BatchNorm), or its
            parameters cannot be drawn anew.

    Example:
        >>> module = FedEM(nn.Linear(4, 3), components=2)
        >>> module(torch.zeros(5, 4)).exp().sum(1)
        tensor([1., 1., 1., 1., 1.], grad_fn=<SumBackward1>)
    """

    def __init__(
        self,
        net: nn.Module,
        components: int = 3,
        optimizer: OptimizerCallable = torch.optim.SGD,
        seed: int | None = None,
    ) -> None:
        if components < 1 or int(components) != components:
            raise FederationError(f"components must be a whole number from 1 up, got {components}")
        if any(True for _ in net.buffers()):
            raise FederationError(
                f"{type(net).__name__} has buffers (BatchNorm), and the E step looks at components"
                " without changing them: use a network without, GroupNorm for example"
            )
        first = run_seed(seed)
        nets = nn.ModuleList(_drawn(net, first + m) for m in range(components))
        for one, other in combinations(nets, 2):
            if all(map(torch.equal, one.parameters(), other.parameters())):
                raise FederationError(
                    f"all components are equal, and would stay so: give {type(net).__name__} a"
                    " method reset_parameters() that draws its parameters"
                )
        super().__init__(nets, (), optimizer)
        # Not a child: it lends its forward to the components that the round started from.
        self._template = (copy.deepcopy(net).eval(),)
        like = next(net.parameters())
        equal = like.new_full((components,), 1 / components)
        #: Weights of the mixture; the sum of what samples were given to, and their number.
        self.weights = nn.Parameter(equal, requires_grad=False)
        self.expected = nn.Parameter(torch.zeros_like(equal), requires_grad=False)
        self.seen = nn.Parameter(like.new_zeros(()), requires_grad=False)
        self.fixed = {}
        self.knows_weights = True

    @property
    def local_parameters(self) -> list[str]:
        """Names of the parameters that stay with each client."""
        return ["weights", "expected", "seen"]

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixture's log-probabilities, ``[batch, classes]``."""
        logits = torch.stack([net(x) for net in self._components])
        return mixture_log_probabilities(logits, self._log_weights)

    @property
    def _components(self) -> Sequence[nn.Module]:
        nets: Any = self.net
        return list(nets)

    @property
    def _log_weights(self) -> Tensor:
        return self.weights.clamp(min=LEAST).log()

    @torch.no_grad()
    def on_client_start(self) -> None:
        """Take over the weights that the last round has led to."""
        mean = self.expected / self.seen.clamp(min=1)
        self.weights.copy_(torch.where(self.seen > 0, mean, self.weights))
        self.expected.zero_()
        self.seen.zero_()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the components' losses, each weighted by what the sample is of."""
        x, y = batch
        params = dict(self.net.named_parameters(prefix="net"))
        if not self.fixed:  # outside of a federation
            self.fixed = {n: p.detach().clone() for n, p in params.items()}
        with torch.no_grad():
            q = responsibilities(self._sample_losses(x, y, self.fixed), self._log_weights)
        own = torch.stack(
            [F.cross_entropy(net(x), y, reduction="none") for net in self._components], 1
        )
        losses = (q * own).sum(1)
        weight = self.sample_weight
        there = torch.ones_like(losses) if weight is None else (weight > 0).to(losses)
        with torch.no_grad():
            self.expected.add_(there @ q)
            self.seen.add_(there.sum())
        loss = losses.mean() if weight is None else losses @ weight
        self.record(loss, len(losses))
        return loss

    def _sample_losses(self, x: Tensor, y: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Return each sample's loss by the components with these parameters, ``[n, M]``."""
        (template,) = self._template
        each = []
        for m in range(len(self._components)):
            prefix = f"net.{m}."
            own = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
            each.append(F.cross_entropy(functional_call(template, own, (x,)), y, reduction="none"))
        return torch.stack(each, 1)

    @torch.no_grad()
    def adapt(self, batch: Any) -> Tensor:
        """Find the weights of a client that took no part: one E step, from equal weights.

        Args:
            batch: ``(x, y)``, all of its samples.

        Returns:
            The weights, ``[M]``, which the module has from now on.
        """
        params = {n: p.detach() for n, p in self.net.named_parameters(prefix="net")}
        equal = torch.full_like(self.weights, 1 / len(self.weights)).log()
        q = responsibilities(self._sample_losses(batch[0], batch[1], params), equal)
        self.weights.copy_(q.mean(0))
        return self.weights.detach().clone()


def _drawn(net: nn.Module, seed: int) -> nn.Module:
    """Return a network like another, with parameters of its own."""
    made = copy.deepcopy(net)
    with seeded_rng(seed):
        for part in made.modules():
            for name in ("_reset_parameters", "reset_parameters"):  # torch's attention has the one
                if callable(reset := getattr(part, name, None)):
                    reset()
    return made
