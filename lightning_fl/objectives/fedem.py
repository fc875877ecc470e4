"""FedEM: a mixture of shared models for each client."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call

from lightning_fl.errors import FederationError
from lightning_fl.functional.initial import draw_parameters
from lightning_fl.functional.mixture import log_responsibilities, mixture_log_probabilities
from lightning_fl.functional.randomness import run_seed
from lightning_fl.objectives.client_module import ClientModule
from lightning_fl.options import check_integer


class FedEM(ClientModule):
    r"""Train :math:`M` shared models, with mixture weights per client (Marfoq et al., 2021).

    In each round client :math:`k` with mixture weights :math:`\pi_k` computes the responsibilities
    of the received components for each sample,
    :math:`q_i(m) \propto \pi_{km} e^{-\ell(\theta_m; x_i, y_i)}` (the E step, with components in
    evaluation mode), and trains all components with the loss

    .. math:: \frac{1}{|b|} \sum_{i \in b} \sum_m q_i(m)\, \ell(\theta_{km}; x_i, y_i).

    The next :math:`\pi_{km}` is the mean of :math:`q_i(m)` over the training samples of the round,
    which are all samples of the client if it trains full epochs. Mixture weights stay on the
    client. Components are aggregated by the server (:class:`~lightning_fl.aggregators.FedAvg`, or
    :class:`~lightning_fl.aggregators.Gossip` without a server). The prediction of a mixture is
    :math:`\log \sum_m \pi_{km} \operatorname{softmax}(h_m(x))`; the global model has equal
    weights.

    Mixture weights are stored as logarithms to avoid underflow. As in the authors' program
    (omarfoq/FedEM) they have no lower bound: the weight of a component with a poor fit decreases.

    Args:
        net: Network of one component, from inputs to logits. All components have this architecture
            and independent initial parameters.
        components: Number :math:`M` of components.
        optimizer: Function that creates the optimizer from the parameters.
        seed: Seed of the initial parameters. Component :math:`m` uses seed + m. None uses the seed
            of ``seed_everything``, or 0.

    Raises:
        FederationError: If there is no component, the network has buffers (BatchNorm), or its
            parameters cannot be initialized again; at the start of a fit, if they have half
            precision.

    Example:
        >>> module = FedEM(nn.Linear(4, 3), components=2)
        >>> probabilities = module(torch.zeros(5, 4)).exp()
        >>> torch.allclose(probabilities.sum(1), torch.ones(5))
        True
    """

    #: Whether half precision rounds a sum over samples; refused.
    sums_samples = True

    def __init__(
        self,
        net: nn.Module,
        components: int = 3,
        optimizer: OptimizerCallable = torch.optim.SGD,
        seed: int | None = None,
    ) -> None:
        check_integer("components", components, min=1)
        check_integer("seed", seed, min=0, optional=True)
        if any(True for _ in net.buffers()):
            raise FederationError(
                f"{type(net).__name__} has buffers (BatchNorm), which FedEM does not support: use a"
                " network without buffers, for example with GroupNorm"
            )
        first = run_seed(seed)
        nets = nn.ModuleList(_drawn(net, first + m) for m in range(components))
        if components > 1 and all(map(torch.equal, nets[0].parameters(), nets[1].parameters())):
            raise FederationError(
                f"all components have equal parameters and would stay equal: implement"
                f" {type(net).__name__}.reset_parameters() to initialize them randomly"
            )
        super().__init__(nets, (), optimizer)
        # In a tuple, so that it is not a submodule: it evaluates the initial components.
        self._template = (copy.deepcopy(net).eval(),)
        like = next(net.parameters())
        equal = like.new_full((components,), 1 / components)
        #: Logarithms of the mixture weights, logarithms of the summed responsibilities of a round
        #: (0 before its first batch), and the number of samples in this sum.
        self.log_weights = nn.Parameter(equal.log(), requires_grad=False)
        self.log_expected = nn.Parameter(torch.zeros_like(equal), requires_grad=False)
        self.seen = nn.Parameter(like.new_zeros(()), requires_grad=False)
        self.federated_global_parameters = {}
        self._knows_weights = True

    @property
    def federated_local_parameters(self) -> list[str]:
        """Names of the parameters that stay with each client."""
        return ["log_weights", "log_expected", "seen"]

    @property
    def weights(self) -> Tensor:
        """Mixture weights, ``[M]``."""
        return self.log_weights.detach().exp()

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-probabilities of the mixture, ``[batch, classes]``."""
        logits = torch.stack([net(x) for net in self._components])
        return mixture_log_probabilities(logits, self.log_weights)

    @property
    def _components(self) -> Sequence[nn.Module]:
        nets: Any = self.net
        return list(nets)

    @torch.no_grad()
    def on_client_start(self) -> None:
        """Set the mixture weights from the responsibilities of the last round."""
        mean = self.log_expected - self.seen.clamp(min=1).log()
        self.log_weights.copy_(torch.where(self.seen > 0, mean, self.log_weights))
        self.log_expected.zero_()
        self.seen.zero_()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the components, weighted by their responsibilities."""
        x, y = batch
        params = dict(self.net.named_parameters(prefix="net"))
        if not self.federated_global_parameters:  # outside a federation
            self.federated_global_parameters = {n: p.detach().clone() for n, p in params.items()}
        with torch.no_grad():
            start = self._sample_losses(x, y, self.federated_global_parameters)
            log_q = log_responsibilities(start, self.log_weights)
        own = torch.stack(
            [F.cross_entropy(net(x), y, reduction="none") for net in self._components], 1
        )
        losses = (log_q.exp() * own).sum(1)
        weight = self._sample_weight
        there = torch.ones_like(losses) if weight is None else (weight > 0).to(losses)
        with torch.no_grad():
            batch_sum = (log_q + there.log()[:, None]).logsumexp(0)
            so_far = torch.logaddexp(self.log_expected, batch_sum)
            self.log_expected.copy_(torch.where(self.seen > 0, so_far, batch_sum))
            self.seen.add_(there.sum())
        loss = self.mean_of(losses)
        self._record(loss, len(losses))
        return loss

    def _sample_losses(self, x: Tensor, y: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Return the loss of each sample under the given components, ``[n, M]``."""
        (template,) = self._template
        each = []
        for m in range(len(self._components)):
            prefix = f"net.{m}."
            own = {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
            each.append(F.cross_entropy(functional_call(template, own, (x,)), y, reduction="none"))
        return torch.stack(each, 1)

    def _adapt(self, batches: Iterable[Any]) -> None:
        """Adapt to a client that has not trained yet; see :meth:`adapt`."""
        self.adapt(tuple(torch.cat(parts) for parts in zip(*batches, strict=True)))

    @torch.no_grad()
    def adapt(self, batch: Any) -> Tensor:
        """Set the mixture weights for an unseen client with one E step from equal weights.

        Args:
            batch: Batch ``(x, y)`` with all samples of the client.

        Returns:
            The new mixture weights, ``[M]``.
        """
        params = {n: p.detach() for n, p in self.net.named_parameters(prefix="net")}
        losses = self._sample_losses(batch[0], batch[1], params)
        equal = torch.zeros_like(self.log_weights)  # the scale does not matter
        log_mean = log_responsibilities(losses, equal).logsumexp(0) - math.log(len(losses))
        self.log_weights.copy_(log_mean)
        return self.weights


def _drawn(net: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a network with newly initialized parameters."""
    made = copy.deepcopy(net)
    draw_parameters(made, seed)
    return made
