"""DP-SGD: local training that is differentially private for single samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.errors import FederationError
from lightning_fl.functional.privacy import check_delta, clipped_sum, sample_epsilon
from lightning_fl.objectives.two_passes import TwoPassModule
from lightning_fl.options import check_integer, check_number

#: Samples whose gradients exist at once.
AT_ONCE = 64


class DPSGD(TwoPassModule):
    r"""Train each client with DP-SGD, so that its model hides single samples.

    Abadi et al. (2016). A local step draws each sample of the client with probability
    :math:`q_k = \min(1, L / n_k)`, independently, and steps with

    .. math:: \tilde g = \frac1L \Bigl( \sum_{i \in b} g_i
        \min\bigl(1, \tfrac{C}{\lVert g_i \rVert}\bigr) + N(0, z^2 C^2 I) \Bigr),

    where :math:`g_i` is the gradient of one sample with respect to all trained parameters. Any
    optimizer that evaluates one gradient per step makes the step. The module draws the samples, so
    a batch must have all samples of the client: set ``batch_size=None`` of the data module, and the
    number of local steps with a policy, such as ``Schedule(num_steps=10)``.

    The callback :class:`SampleAccountant`, which the module brings with it, computes
    :math:`\varepsilon` of each client with Opacus. In the table of rounds, ``sample_epsilon`` is
    the largest one of all clients so far, over all fits of the module;
    :class:`~lightning_fl.callbacks.RunReport` writes all of them to its table of clients. The
    guarantee is :math:`(\varepsilon, \delta)`-differential privacy with respect to adding or
    removing one sample of a client. It covers all models that the client has sent, against
    observers who do not know the seed of the run, from which the noise derives. It covers neither
    the numbers of samples nor the losses that clients log. Noise is drawn from a generator that is
    not cryptographically secure: use the module to simulate privacy, not to protect data.

    Clients train one after another: drawn batches differ in size, and vectorized ones cannot.

    Args:
        net: Network from inputs to logits, ``[batch, classes]``.
        noise_multiplier: Noise multiplier :math:`z`. 0 gives no privacy.
        clip_norm: Clipping norm :math:`C` of the gradient of a sample.
        batch_size: Expected number :math:`L` of samples in a local step.
        delta: :math:`\delta` of the guarantee, less than 1 divided by the samples of a client.
        optimizer: Function that creates the optimizer from the parameters.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if Opacus is not
            installed, the network has BatchNorm, batches are not all samples of a client, processes
            share the samples of a client, the aggregator adds work to local training, or the policy
            learns from losses of clients; if parameters have half precision.

    Example:
        >>> module = DPSGD(nn.Linear(4, 3), noise_multiplier=1.0, batch_size=2)
        >>> module.training_step((torch.ones(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])), 0).shape
        torch.Size([])
    """

    needs_whole_batches = True
    #: Whether half precision rounds a sum over samples; refused.
    sums_samples = True

    def __init__(
        self,
        net: nn.Module,
        noise_multiplier: float = 1.0,
        clip_norm: float = 1.0,
        batch_size: int = 32,
        delta: float = 1e-5,
        optimizer: OptimizerCallable = torch.optim.SGD,
    ) -> None:
        super().__init__(net, optimizer)
        self.noise_multiplier = float(check_number("noise_multiplier", noise_multiplier, min=0))
        self.clip_norm = float(check_number("clip_norm", clip_norm, above=0))
        self.batch_size = check_integer("batch_size", batch_size, min=1)
        self.delta = check_number("delta", delta, above=0, below=1)
        #: Local steps of each client, by noise multiplier and sampling rate.
        self._steps: dict[int, dict[tuple[float, float], int]] = {}

    def setup(self, stage: str) -> None:
        """Refuse what would mix samples, or is not accounted for."""
        super().setup(stage)
        if stage != "fit":
            return
        if mixing := [n for n, part in self.net.named_modules() if isinstance(part, _BatchNorm)]:
            raise FederationError(
                f"{type(self).__name__} needs a gradient for each sample, and BatchNorm"
                f" ({mixing[0]}) mixes the samples: replace it, for example with GroupNorm"
            )
        sample_epsilon({(1.0, 1.0): 1}, self.delta)  # raises early if Opacus is missing

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return the accountant of the privacy loss, which counts all fits of the module."""
        return [SampleAccountant(self)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean loss of drawn samples; its gradient is the noisy one."""
        w = self._trained_now()
        fixed = {name: p.detach() for name, p in w.items()}
        count = len(batch[1])
        rate = min(1.0, self.batch_size / count)
        is_drawn = torch.rand(count, device=self.device) < rate
        drawn = tree_map(lambda t: t[is_drawn], batch)
        one = torch.func.grad_and_value(self._loss_of_one)
        total = {name: torch.zeros_like(p) for name, p in fixed.items()}
        losses = [torch.zeros(0, device=self.device)]
        parts = zip(*(t.split(AT_ONCE) for t in drawn), strict=True)
        for part in parts if is_drawn.any() else ():
            each = torch.vmap(one, (None, 0), randomness="different")
            gradients, values = each(fixed, part)
            losses.append(values)
            for name, found in clipped_sum(gradients, self.clip_norm).items():
                total[name] += found
        deviation = self.noise_multiplier * self.clip_norm
        noisy = {n: g + deviation * torch.randn_like(g) for n, g in total.items()}
        loss = torch.cat(losses).sum() / max(len(drawn[1]), 1)
        self._record(loss, len(drawn[1]))
        # Of value 0 and with the noisy gradient.
        products = [((p - fixed[n]) * noisy[n]).sum() / self.batch_size for n, p in w.items()]
        return loss + torch.stack(products).sum()

    def _loss_of_one(self, params: Mapping[str, Tensor], sample: Any) -> Tensor:
        buffers = {n: b.clone() for n, b in self.net.named_buffers(prefix="net")}
        return self.loss_with(tree_map(lambda t: t[None], sample), {**params, **buffers})


class SampleAccountant(Callback):
    """Count the local steps of each client of a :class:`DPSGD` module, and log the privacy loss.

    The steps of all rounds are saved in checkpoints. Clients whose updates were dropped count, too.
    Without a ``FederatedLoop`` nothing is counted.

    Args:
        module: The module.
    """

    def __init__(self, module: DPSGD) -> None:
        self.module, self.steps = module, module._steps
        #: Client, number of steps and sampling rate of all clients of the round.
        self._round: list[tuple[int, int, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse batches without all samples, and a delta that is too large for a client."""
        if (data := _federated(trainer)) is None:
            return
        sizes = data.batch_sizes(torch.arange(len(data.num_samples)), 0, 1)[0]
        if (sizes != data.num_samples).any() or data.replacement:
            raise FederationError(
                f"{type(self.module).__name__} draws from all samples of a client, and a batch has"
                " others: set batch_size=None and replacement=False of the data module"
            )
        check_delta(self.module.delta, int(data.num_samples.max()), "samples of a client")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the steps of the round. A stream has other samples in the next one."""
        if (data := _federated(trainer)) is None:
            return
        plan: RoundPlan = data.plan()
        rates = (self.module.batch_size / data.num_samples[plan.clients].double()).clamp(max=1)
        columns = (plan.clients, plan.num_steps, rates)
        self._round = list(zip(*(column.tolist() for column in columns), strict=True))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the steps of the round, and log the largest epsilon of a client."""
        self._count()
        if _federated(trainer) is not None:
            pl_module.log("sample_epsilon", max(self.epsilons().values(), default=0.0))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Count the steps of a round that does not end: its models may have been sent."""
        self._count()

    def _count(self) -> None:
        for client, count, rate in self._round:
            steps, kind = self.steps.setdefault(client, {}), (self.module.noise_multiplier, rate)
            steps[kind] = steps.get(kind, 0) + count
        self._round = []

    def epsilons(self) -> dict[int, float]:
        r"""Return :math:`\varepsilon` of each client that has trained."""
        delta = self.module.delta
        return {client: sample_epsilon(steps, delta) for client, steps in self.steps.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps of all clients."""
        return {"steps": {c: [[*k, n] for k, n in of.items()] for c, of in self.steps.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the steps of all clients."""
        saved = state_dict["steps"].items()
        self.steps.clear()
        self.steps |= {c: {(noise, rate): n for noise, rate, n in rows} for c, rows in saved}


def _federated(trainer: Trainer) -> Any:
    """Return the data module of a federation, None without a ``FederatedLoop``."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return None if getattr(data, "plan", None) is None else data
