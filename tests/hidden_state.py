"""Small optimizers that keep what they learn in the places that packages use."""

from collections import OrderedDict, defaultdict

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_fl.runners.client_optimizers import ClientOptimizer


class Counting(Optimizer):
    """A counter in the parameter groups, as timm's Lamb and schedulefree."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = self.rate(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, group), alpha=rate)
        return loss

    def rate(self, group):
        group["step"] = group.get("step", 0) + 1
        return group["lr"] / group["step"]

    def update(self, p, group):
        return p.grad


class Attribute(Counting):
    """A counter that is an attribute, and a tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.calls, self.total = 0, torch.zeros(())

    def rate(self, group):
        return group["lr"]

    def update(self, p, group):
        self.calls += 1
        self.total = self.total + self.calls
        return p.grad / self.total.to(p)


class Lookahead(Optimizer):
    """As timm's: slow weights around another optimizer, without Optimizer.__init__."""

    def __init__(self, params, lr=0.1):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner = SGD(params, lr=lr, momentum=0.9)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                slow = self.inner.state[p].setdefault("slow", p.detach().clone())
                if group["count"] % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Learned(Counting):
    """A scale that is learned for all parameters together, as Prodigy's d."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["d"] = 1e-3

    def rate(self, group):
        total = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        group["d"] = max(group["d"], total / (1 + total))
        return group["lr"] * group["d"]


class GlobalNorm(Counting):
    """Gradients clipped by the norm of all of them, as in Lamb."""

    def update(self, p, group):
        grads = [q.grad.norm() for q in group["params"] if q.grad is not None]
        return p.grad / torch.stack(grads).norm().clamp(min=1)


class Relative(Counting):
    """No learning rate, as transformers' Adafactor."""

    def __init__(self, params):
        super().__init__(params, lr=None)

    def rate(self, group):
        return 0.1


class SlowCopy(Counting):
    """A copy of the parameters that is made when the optimizer is, not in its first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()


class AnchorAttribute(Counting):
    """The same in an attribute."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]


#: Optimizers that learn outside of their state, and can be made fresh.
LEARNERS = [Counting, Attribute, Lookahead, Learned]


def state_of(kind, **options):
    """The state of an optimizer of a matrix, a vector and a number."""
    shapes = (3, 2), (2,), ()
    return ClientOptimizer(kind([nn.Parameter(torch.rand(shape)) for shape in shapes], **options))
