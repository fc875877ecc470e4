"""Optimisers that PyTorch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.types import FederationError


class Adaptive(torch.optim.Optimizer):
    r"""Adagrad, Adam and Yogi as servers use them (Reddi et al., 2021, Algorithm 2).

    With :math:`\Delta = -g`, and without the correction of the bias that ``torch.optim.Adam`` has,

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad
        x \leftarrow x + \eta \frac{m}{\sqrt v + \tau},

    where :math:`v`, which begins at :math:`\tau^2`, becomes :math:`v + \Delta^2` (``adagrad``),
    :math:`\beta_2 v + (1 - \beta_2) \Delta^2` (``adam``), or
    :math:`v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2)` (``yogi``).

    Args:
        params: What to optimise.
        rule: How :math:`v` moves.
        lr: :math:`\eta`.
        betas: :math:`\beta_1, \beta_2`; ``adagrad`` has no use for the second.
        tau: :math:`\tau`, how adaptive: the smaller, the more.

    Raises:
        FederationError: If a value is out of range.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(1))
        >>> x.grad = torch.ones(1)
        >>> Adaptive([x], "adagrad", lr=1.0, betas=(0.0, 0.99), tau=1e-3).step()
        >>> x.data
        tensor([-0.9990])
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: Literal["adagrad", "adam", "yogi"],
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
    ) -> None:
        if rule not in ("adagrad", "adam", "yogi"):
            raise FederationError(f"rule must be adagrad, adam or yogi, got {rule!r}")
        if not 0 < lr < float("inf") or not 0 < tau < float("inf"):
            raise FederationError(f"lr and tau must be positive and finite, got {lr} and {tau}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise FederationError(f"betas must be two numbers in [0, 1), got {betas}")
        self.rule = rule
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), tau = group["betas"], group["tau"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["m"] = torch.zeros_like(param)
                    state["v"] = torch.full_like(param, tau**2)
                m, v, square = state["m"], state["v"], param.grad.square()
                m.mul_(beta1).sub_(param.grad, alpha=1 - beta1)
                self._move(v, square, beta2)
                param.add_(m / (v.sqrt() + tau), alpha=group["lr"])
        return loss

    def _move(self, v: Tensor, square: Tensor, beta2: float) -> None:
        if self.rule == "adagrad":
            v.add_(square)
        elif self.rule == "adam":
            v.mul_(beta2).add_(square, alpha=1 - beta2)
        else:
            v.sub_(square * (v - square).sign(), alpha=1 - beta2)
