"""Optimizers of the server."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.optimizers import Adaptive
from lightning_fl.types import FederationError


class FedOpt(FedAvg):
    r"""Let any optimizer step from the server's model to the clients' average (Reddi et al., 2021).

    .. math:: w^{t+1} = \operatorname{Opt}(w^t, g^t), \qquad
        g^t = w^t - \sum_{k \in S_t} \frac{n_k}{\sum_{j \in S_t} n_j} w_k

    Floating buffers are averaged, as by :class:`FedAvg`: a variance with momentum may become
    negative. SGD with learning rate 1 is :class:`FedAvg`. The optimizer's state outlives the round,
    and is in the checkpoint. It and the step are in float64.

    Args:
        optimizer: Makes the optimizer from the parameters; None is SGD with learning rate 1.
        weighting: See :class:`FedAvg`.

    Raises:
        FederationError: If the weighting is unknown, or the optimizer refuses its options or wants
            to ask for a loss (LBFGS).

    Example:
        >>> from lightning_fl.types import ClientUpdate
        >>> rule = FedOpt(partial(torch.optim.SGD, lr=0.5))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.tensor([0]), torch.ones(1, 1), torch.tensor([8])))
        >>> rule.compute()
        tensor([0.5000])
    """

    def __init__(
        self,
        optimizer: OptimizerCallable | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        self.make_optimizer = optimizer or partial(torch.optim.SGD, lr=1.0)
        #: What the optimizer is, in words: another one cannot go on from its state.
        self.optimizer = _tried(self.make_optimizer)

    def allocate(self, server: Tensor) -> None:
        """Make the optimizer; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        # Neither it nor its parameter is part of the state: the server's model is saved elsewhere.
        self._optimizer = self.make_optimizer(
            [nn.Parameter(torch.zeros_like(server[: self.num_parameters], dtype=torch.float64))]
        )

    def compute(self) -> Tensor:
        """Return the server's model after a step; the server itself when nobody returned."""
        return self._stepped(self._mean()[None]) if self.weight else self.server

    def _stepped(self, moves: Tensor) -> Tensor:
        """Return the server's model after a step for each move, ``[steps, P]``."""
        param: Tensor = self._optimizer.param_groups[0]["params"][0]
        server, mean, n = self.server.double(), self._mean(), param.numel()
        param.data = server[:n].clone()
        for move in moves:
            param.grad = -move[:n].double()
            self._optimizer.step()
        return torch.cat([param.detach(), (server + mean)[n:]]).to(self.server.dtype)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the optimizer's state, for the checkpoint."""
        made = getattr(self, "_optimizer", None)  # none before the first round
        if made is None:
            return {}
        return {"kind": type(made).__name__, "state": copy.deepcopy(made.state_dict()["state"])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over the optimizer's state of a checkpoint; options are those that are given now."""
        if not state:
            return
        if (was := state.get("kind")) != (now := type(self._optimizer).__name__):
            raise FederationError(
                f"{type(self).__name__} cannot go on from the checkpoint: its optimizer was"
                f" {was!s:.50}, now it is {now}. Go back to the former, or leave out ckpt_path"
            )
        own: dict[str, Any] = self._optimizer.state_dict()
        param: nn.Parameter = self._optimizer.param_groups[0]["params"][0]
        saved = state.get("state")
        # A copy makes a step first: what is in the state only the optimizer knows.
        tried = self.make_optimizer([nn.Parameter(param.detach().clone())])
        try:
            tried.load_state_dict({**own, "state": copy.deepcopy(saved)})
            tried.param_groups[0]["params"][0].grad = torch.zeros_like(param)
            tried.step()
            self._optimizer.load_state_dict({**own, "state": saved})
        except Exception as error:  # of many kinds
            raise FederationError(
                f"{type(self).__name__} cannot go on from the checkpoint: {now} has no use for what"
                f" is there ({type(error).__name__})"
            ) from error


def _tried(make: Any) -> str:
    """Make an optimizer and a step with it, so that it complains now and not in round 1."""
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    try:
        made = make([param])
        made.step()
    except FederationError:
        raise
    except Exception as error:
        raise FederationError(f"the server's optimizer cannot be used: {error}") from error
    options = {k: v for k, v in made.param_groups[0].items() if k != "params" and v is not None}
    return f"{type(made).__name__}({', '.join(f'{k}={v}' for k, v in options.items())})"


class FedAvgM(FedOpt):
    r"""Momentum on the server (Hsu et al., 2019).

    .. math:: v \leftarrow \beta v + g, \qquad w \leftarrow w - \eta v

    Args:
        lr: :math:`\eta`.
        momentum: :math:`\beta`.

    Example:
        >>> FedAvgM(momentum=0.5).momentum
        0.5
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(partial(torch.optim.SGD, lr=lr, momentum=momentum))
        self.lr, self.momentum = lr, momentum


class _Adaptive(FedOpt):
    """Presets of :class:`~lightning_fl.optimizers.Adaptive`."""

    rule: Literal["adagrad", "adam", "yogi"]

    def __init__(
        self, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
    ) -> None:
        super().__init__(partial(Adaptive, rule=self.rule, lr=lr, betas=betas, tau=tau))
        self.lr, self.betas, self.tau = lr, betas, tau


class FedAdagrad(_Adaptive):
    r"""Adagrad on the server; see :class:`~lightning_fl.optimizers.Adaptive`.

    Args:
        lr: :math:`\eta`.
        betas: :math:`\beta_1`, and a number without a use.
        tau: :math:`\tau`.
    """

    rule = "adagrad"


class FedAdam(_Adaptive):
    r"""Adam on the server; see :class:`~lightning_fl.optimizers.Adaptive`.

    Args:
        lr: :math:`\eta`.
        betas: :math:`\beta_1, \beta_2`.
        tau: :math:`\tau`.
    """

    rule = "adam"


class FedYogi(_Adaptive):
    r"""Yogi on the server; see :class:`~lightning_fl.optimizers.Adaptive`.

    Args:
        lr: :math:`\eta`.
        betas: :math:`\beta_1, \beta_2`.
        tau: :math:`\tau`.
    """

    rule = "yogi"
