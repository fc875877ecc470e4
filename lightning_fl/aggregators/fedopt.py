"""Server optimizers: FedOpt, FedAvgM, FedAdagrad, FedAdam and FedYogi."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.errors import FederationError
from lightning_fl.optimizers import Adaptive
from lightning_fl.options import check_number


class FedOpt(FedAvg):
    r"""Update the global model with any optimizer (Reddi et al., 2021).

    .. math:: w^{t+1} = \operatorname{Opt}(w^t, g^t), \qquad
        g^t = w^t - \sum_{k \in S_t} \frac{n_k}{\sum_{j \in S_t} n_j} w_k

    The pseudo-gradient :math:`g^t` is the negative mean client update. SGD with learning rate 1 is
    :class:`FedAvg`. Floating-point buffers are averaged as in :class:`FedAvg`, because a variance
    with momentum could become negative. The optimizer state persists across rounds and is saved in
    the checkpoint. State and step are in float64. Parameters that clients do not train in a round
    are averaged, too: frozen ones keep their values, also with weight decay.

    Args:
        optimizer: Function that creates the optimizer from the parameters. None means SGD with
            learning rate 1.
        weighting: ``samples`` weights a client by its number of training samples. ``uniform``
            gives all clients equal weight.
        scheduler: Function that creates a scheduler from the optimizer, such as
            ``partial(torch.optim.lr_scheduler.StepLR, step_size=10)``. It makes a step after each
            round that changes the model. None keeps the learning rate.

    A resumed run has the options of the optimizer at the time of the checkpoint, except for those
    that are given other values now. With a scheduler, all are from the checkpoint.

    Raises:
        FederationError: If the weighting is unknown, if the optimizer or the scheduler rejects its
            options, or if it requires a closure (LBFGS) or a metric (ReduceLROnPlateau).

    Example:
        >>> from lightning_fl.types import ClientUpdate
        >>> rule = FedOpt(partial(torch.optim.SGD, lr=0.5))
        >>> rule.start(torch.zeros(1))
        >>> rule.update(ClientUpdate(torch.tensor([0]), torch.ones(1, 1), torch.tensor([8])))
        >>> rule.compute()
        tensor([0.5000])
    """

    needs_trained_mask = True

    #: The optimizer and the scheduler of a run; None before its first round.
    _optimizer: Any = None
    _scheduler: Any = None

    def __init__(
        self,
        optimizer: OptimizerCallable | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__(weighting)
        self.make_optimizer = optimizer or partial(torch.optim.SGD, lr=1.0)
        self.make_scheduler = scheduler
        #: Names and options of the optimizer and of the scheduler, for checkpoints and reports.
        self.optimizer, self.scheduler = self._tried()

    def allocate(self, server: Tensor) -> None:
        """Create the optimizer; see :meth:`FedAvg.allocate`."""
        super().allocate(server)
        # Not registered as a submodule: the global model is saved elsewhere in the checkpoint.
        self._make(nn.Parameter(torch.zeros_like(server[: self.num_parameters]).double()))

    def _make(self, param: nn.Parameter) -> None:
        """Create the optimizer and the scheduler, and note the options that were given."""
        self._optimizer = self.make_optimizer([param])
        make = self.make_scheduler
        # Any: ReduceLROnPlateau, which needs a metric, was refused.
        self._scheduler = None if make is None else make(self._optimizer)
        groups = self._optimizer.param_groups
        self._given = [{k: v for k, v in g.items() if k != "params"} for g in groups]

    def _tried(self) -> tuple[str, str | None]:
        """Take one step on one parameter to detect errors early; return the descriptions."""
        param = nn.Parameter(torch.ones(1, dtype=torch.float64))
        param.grad = torch.ones_like(param)
        try:
            self._make(param)
            options = {k: v for k, v in self._given[0].items() if v is not None}
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        except Exception as error:
            raise FederationError(f"invalid server optimizer: {error}") from error
        optimizer, scheduler = self._optimizer, self._scheduler
        del self._optimizer, self._scheduler  # those of the run are made when its size is known
        if scheduler is None:
            return _described(optimizer, options), None
        kept = {k: v for k, v in scheduler.state_dict().items() if not k.startswith("_")}
        return _described(optimizer, options), _described(scheduler, kept)

    def compute(self) -> Tensor:
        """Return the global model after one step, unchanged if no client returned."""
        if not self.weight:
            return self.server
        mean = self._mean()
        return self._stepped(mean[None], mean)

    def _stepped(self, moves: Tensor, mean: Tensor) -> Tensor:
        """Return the global model after one step for each row of ``moves``, ``[steps, P]``.

        What the optimizer does not move, buffers and parameters that are not trained, is averaged.
        """
        param: Tensor = self._optimizer.param_groups[0]["params"][0]
        server, n = self.server.double(), param.numel()
        average = server + mean
        param.data = server[:n].clone()
        if self.trained is not None:  # weight decay of 0 is 0, so that the state keeps none of it
            param.data.masked_fill_(~self.trained, 0)
        for move in moves:
            param.grad = -move[:n].double()
            self._optimizer.step()
        if self._scheduler is not None:
            self.round_metrics["server_lr"] = float(self._optimizer.param_groups[0]["lr"])
            self._scheduler.step()
        moved = param.detach()
        if self.trained is not None:
            moved = moved.where(self.trained, average[:n])
        return torch.cat([moved, average[n:]]).to(self.server.dtype)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the states of the optimizer and the scheduler for the checkpoint."""
        if self._optimizer is None:
            return {}
        state = {
            "kind": type(self._optimizer).__name__,
            **self._optimizer.state_dict(),
            "given": self._given,
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }
        return copy.deepcopy(state)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the optimizer and the scheduler; options that are given anew count."""
        if "kind" not in state:
            return
        if (was := state["kind"]) != (now := type(self._optimizer).__name__):
            raise FederationError(
                f"{type(self).__name__} cannot resume from the checkpoint: it was saved with the"
                f" optimizer {was}, and the current optimizer is {now}. Use the same"
                " optimizer, or remove ckpt_path"
            )
        groups = state["param_groups"]
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        else:
            options = zip(groups, state["given"], self._given, strict=True)
            groups = [
                {**saved, **{k: v for k, v in now.items() if k not in first or first[k] != v}}
                for saved, first, now in options
            ]
        self._optimizer.load_state_dict({"state": state["state"], "param_groups": groups})


def _described(made: object, options: Mapping[str, Any]) -> str:
    """Return the name and the options of an optimizer or a scheduler."""
    return f"{type(made).__name__}({', '.join(f'{k}={v}' for k, v in options.items())})"


class FedAvgM(FedOpt):
    r"""Server momentum (Hsu et al., 2019).

    .. math:: v \leftarrow \beta v + g, \qquad w \leftarrow w - \eta v

    Args:
        lr: Server learning rate :math:`\eta`.
        momentum: Momentum :math:`\beta`.
        scheduler: See :class:`FedOpt`.

    Example:
        >>> FedAvgM(momentum=0.5).momentum
        0.5
    """

    def __init__(
        self, lr: float = 1.0, momentum: float = 0.9, scheduler: LRSchedulerCallable | None = None
    ) -> None:
        check_number("lr", lr, min=0)
        check_number("momentum", momentum, min=0)
        optimizer = partial(torch.optim.SGD, lr=lr, momentum=momentum)
        super().__init__(optimizer, scheduler=scheduler)
        self.lr, self.momentum = lr, momentum


class _Adaptive(FedOpt):
    """Presets of :class:`~lightning_fl.optimizers.Adaptive`."""

    rule: Literal["adagrad", "adam", "yogi"]

    def __init__(
        self,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        optimizer = partial(Adaptive, rule=self.rule, lr=lr, betas=betas, tau=tau)
        super().__init__(optimizer, scheduler=scheduler)
        self.lr, self.betas, self.tau = lr, betas, tau


class FedAdagrad(_Adaptive):
    r"""Adagrad as the server optimizer; see :class:`~lightning_fl.optimizers.Adaptive`.

    Args:
        lr: Server learning rate :math:`\eta`.
        betas: Decay rate :math:`\beta_1` of the first moment, and a second value that is ignored.
        tau: Adaptivity :math:`\tau`.
        scheduler: See :class:`FedOpt`.
    """

    rule = "adagrad"


class FedAdam(_Adaptive):
    r"""Adam as the server optimizer; see :class:`~lightning_fl.optimizers.Adaptive`.

    Args:
        lr: Server learning rate :math:`\eta`.
        betas: Decay rates :math:`\beta_1, \beta_2` of the moments.
        tau: Adaptivity :math:`\tau`.
        scheduler: See :class:`FedOpt`.
    """

    rule = "adam"


class FedYogi(_Adaptive):
    r"""Yogi as the server optimizer; see :class:`~lightning_fl.optimizers.Adaptive`.

    Args:
        lr: Server learning rate :math:`\eta`.
        betas: Decay rates :math:`\beta_1, \beta_2` of the moments.
        tau: Adaptivity :math:`\tau`.
        scheduler: See :class:`FedOpt`.
    """

    rule = "yogi"
