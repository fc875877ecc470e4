"""Optimizers that are not part of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_that,
    is_list,
)
from lightning_fl.runners.optimizer import is_elementwise, is_proportional


class Adaptive(torch.optim.Optimizer):
    r"""Implement Adagrad, Adam and Yogi for servers (Reddi et al., 2021, Algorithm 2).

    With :math:`\Delta = -g`, and without the bias correction of ``torch.optim.Adam``,

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad
        x \leftarrow x + \eta \frac{m}{\sqrt v + \tau},

    where :math:`v` is initialized to :math:`\tau^2` and becomes :math:`v + \Delta^2` (``adagrad``),
    :math:`\beta_2 v + (1 - \beta_2) \Delta^2` (``adam``), or
    :math:`v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2)` (``yogi``).

    Args:
        params: Parameters to optimize.
        rule: The update rule of :math:`v`: ``adagrad``, ``adam`` or ``yogi``.
        lr: Learning rate :math:`\eta`.
        betas: Decay rates :math:`\beta_1, \beta_2`; ``adagrad`` ignores the second.
        tau: Adaptivity :math:`\tau`. Smaller values are more adaptive.

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
        check_choice("rule", rule, "adagrad", "adam", "yogi")
        check_number("lr", lr, above=0)
        check_number("tau", tau, above=0)
        check_that("betas", betas, is_list(betas) and len(betas) == 2, "two numbers")
        for beta in betas:
            check_number("a value of betas", beta, min=0, below=1)
        options = {"rule": rule, "lr": lr, "betas": tuple(betas), "tau": tau}
        super().__init__(params, options)

    #: Whether clients may be vectorized; see ``docs/tutorials/your_module.md``.
    federated_elementwise = True
    _is_proportional = True  # its steps, to the learning rate

    def fresh(self, param: Tensor, name: str) -> Tensor:
        """Return the initial value of a parameter's state ``m`` or ``v``."""
        tau = next(g["tau"] for g in self.param_groups if any(p is param for p in g["params"]))
        return torch.full_like(param, tau**2 if name == "v" else 0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step."""
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
                    state.update({name: self.fresh(param, name) for name in ("m", "v")})
                m, v, square = state["m"], state["v"], param.grad.square()
                m.mul_(beta1).sub_(param.grad, alpha=1 - beta1)
                _move(group["rule"], v, square, beta2)
                param.add_(m / (v.sqrt() + tau), alpha=group["lr"])
        return loss


def _move(rule: str, v: Tensor, square: Tensor, beta2: float) -> None:
    if rule == "adagrad":
        v.add_(square)
    elif rule == "adam":
        v.mul_(beta2).add_(square, alpha=1 - beta2)
    else:
        v.sub_(square * (v - square).sign(), alpha=1 - beta2)


class Combined(torch.optim.Optimizer):
    """Step optimizers of different parameters as one optimizer.

    The parameter groups and the state are those of all optimizers together. A closure is passed to
    the first optimizer. The others use the gradients that it leaves, which are those of its last
    evaluation.

    Args:
        optimizers: The optimizers, before their first steps. Their parameters are disjoint.

    Raises:
        FederationError: If a parameter group is added later.

    Example:
        >>> w, v = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        >>> optimizer = Combined(torch.optim.SGD([w], lr=0.1), torch.optim.Adam([v], lr=0.5))
        >>> w.grad, v.grad = torch.ones(1), torch.ones(1)
        >>> optimizer.step()
        >>> w.data, v.data
        (tensor([-0.1000]), tensor([-0.5000]))
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = list(optimizers)
        self.num_groups = [len(optimizer.param_groups) for optimizer in optimizers]

    @property
    def federated_elementwise(self) -> bool:
        """Whether the steps of all optimizers are elementwise."""
        return all(map(is_elementwise, self.optimizers))

    @property
    def _is_proportional(self) -> bool:
        return all(map(is_proportional, self.optimizers))

    def __getstate__(self) -> dict[str, Any]:
        own = {"optimizers": self.optimizers, "num_groups": self.num_groups}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after the constructor: it has no optimizer."""
        if "num_groups" in vars(self):
            raise FederationError(
                "a parameter group cannot be added to Combined: create all groups in"
                " configure_optimizers"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single step of each optimizer."""
        loss, groups = None, list(self.param_groups)
        for optimizer, count in zip(self.optimizers, self.num_groups, strict=True):
            # Anew in each step, because load_state_dict replaces both.
            optimizer.state, optimizer.param_groups = self.state, groups[:count]
            groups = groups[count:]
            if optimizer is self.optimizers[0]:
                loss = optimizer.step(closure)
            else:
                optimizer.step()
        return loss


class PFedMe(torch.optim.Optimizer):
    r"""Implement a client's local step of pFedMe (Dinh et al., 2020, Algorithm 1).

    On a minibatch :math:`b`, a personal model :math:`\theta` approximates
    :math:`\arg\min_\theta \ell(\theta; b) + \frac\lambda2 \lVert \theta - w \rVert^2` by :math:`K`
    steps of gradient descent. Then the local model :math:`w` moves towards it:

    .. math:: \theta \leftarrow \theta - \eta_p (\nabla \ell(\theta; b) + \lambda (\theta - w))
        \quad K \text{ times}, \qquad w \leftarrow w - \eta \lambda (w - \theta).

    The loss is evaluated :math:`K` times, so ``step`` needs a closure, which Lightning passes.
    Without a closure, all inner steps use the same gradient. The learning rate of a policy is
    :math:`\eta`. The server's rule :math:`w^{t+1} = (1 - \beta) w^t + \beta \bar w` is
    :class:`~lightning_fl.aggregators.FedOpt` with SGD of learning rate :math:`\beta`. With
    ``optimizer_state="keep"``, each client keeps its personal model, in the state ``theta`` of each
    parameter, and continues from it in its next round.

    Args:
        params: Parameters to optimize.
        lr: Learning rate :math:`\eta` of the local model.
        personal_lr: Learning rate :math:`\eta_p` of the personal model. Convergence requires
            :math:`\eta_p (L + \lambda) < 2`.
        lam: Strength :math:`\lambda` of the penalty.
        inner_steps: Number :math:`K` of gradient steps on the personal model.
        warm: Whether a local step starts from the personal model of the previous one. Otherwise
            each starts from :math:`w`.

    Raises:
        FederationError: If a value is out of range.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> def loss():
        ...     w.grad = w.detach().clone()  # of w^2 / 2
        >>> PFedMe([w], lr=0.1, personal_lr=0.1, lam=2.0, inner_steps=1).step(loss)
        >>> w.data  # theta = 0.9
        tensor([0.9800])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.005,
        personal_lr: float = 0.09,
        lam: float = 15.0,
        inner_steps: int = 5,
        warm: bool = True,
    ) -> None:
        check_number("lr", lr, above=0)
        check_number("personal_lr", personal_lr, above=0)
        check_number("lam", lam, above=0)
        inner_steps = check_integer("inner_steps", inner_steps, min=1)
        options = {"lr": lr, "personal_lr": personal_lr, "lam": lam}
        options |= {"inner_steps": inner_steps, "warm": check_flag("warm", warm)}
        super().__init__(params, options)
        if len({group["inner_steps"] for group in self.param_groups}) > 1:
            raise FederationError(
                "inner_steps must be equal in all parameter groups, since they share the"
                " evaluations of the loss"
            )

    #: Whether clients may be vectorized.
    federated_elementwise = True
    _is_proportional = True  # its steps, to the learning rate

    def fresh(self, param: Tensor, name: str) -> Tensor:
        """Return the initial personal model of a client, which is its local model."""
        return param

    @property
    def evaluations(self) -> int:
        """Number of closure evaluations per step, which vectorized training needs to know."""
        return int(max(group["inner_steps"] for group in self.param_groups))

    @torch.no_grad()
    def federated_personalize(self, batches: Iterable[Any]) -> bool:
        """Load the personal model into the parameters.

        See :class:`~lightning_fl.callbacks.PersonalizedEvaluation`.

        Args:
            batches: Not used.

        Returns:
            Whether the state has a personal model.
        """
        personal = {p: state["theta"] for p, state in self.state.items() if "theta" in state}
        for param, theta in personal.items():
            param.copy_(theta)
        return bool(personal)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step; the closure is called once per inner step."""
        each = [(p, group) for group in self.param_groups for p in group["params"]]
        each = [(p, group) for p, group in each if p.requires_grad]
        local = [p.clone() for p, _ in each]
        for p, group in each:
            if group["warm"] and "theta" in self.state[p]:
                p.copy_(self.state[p]["theta"])
        loss = None
        for _ in range(self.evaluations):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for (p, group), w in zip(each, local, strict=True):
                if p.grad is not None:
                    pull = p.grad + group["lam"] * (p - w)
                    p.sub_(pull, alpha=group["personal_lr"])
        for (p, group), w in zip(each, local, strict=True):
            self.state[p]["theta"] = p.clone()
            p.copy_(w - group["lr"] * group["lam"] * (w - p))
        return loss
