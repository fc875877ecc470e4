"""FedALA: clients start from a learned mixture of their own model and the global model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.contracts.client_part import ClientContext, ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.layout import VectorLayout
from lightning_fl.functional.interpolation import between, next_weights
from lightning_fl.options import check_integer, check_number


class FedALA(FedAvg):
    r"""Average, and let clients start between their own and the global model (Zhang et al., 2023).

    Adaptive local aggregation: a client with the model :math:`v` at the end of its last round
    starts from

    .. math:: t = v + (x - v) \odot W, \qquad W \leftarrow \Pi_{[0, 1]}
        \bigl(W - \eta\, \nabla f(t; b) \odot (x - v)\bigr),

    where :math:`x` is the global model, and :math:`W` has a weight for each entry of the last
    ``tensors`` parameter tensors. The other parameters are those of :math:`x`, and so are buffers
    that do not stay with the client. :math:`W` is 1 at first, and learned on batches :math:`b` of
    the client's training samples before its local steps. Gradients are those in evaluation mode.
    The server adds the mean of :math:`y_k - x`, so that the next model is the mean of local models.

    In its first round a client starts from :math:`x`. In its second one it learns :math:`W` in
    ``first_passes`` passes over its samples, later in one. The authors' program passes until the
    standard deviation of ten losses is small, at least 11 times. A pass takes a share ``fraction``
    of the batches of an epoch. A client outside the round, or with a dropped update, keeps
    :math:`v` and :math:`W`, which are saved in checkpoints.

    :class:`~lightning_fl.callbacks.PersonalizedEvaluation` evaluates :math:`t` in the column
    ``kept``. ``lr=0`` is :class:`FedAvg`.

    Args:
        tensors: Number of parameter tensors, from the last one, with weights; a linear layer has
            two. 0 takes all.
        lr: Step :math:`\eta` of the weights, at least 0.
        fraction: Share of the batches of an epoch in a pass, above 0 and at most 1.
        first_passes: Number of passes in the second round of a client.
        weighting: ``samples`` or ``uniform``.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if the module returns
            no losses of samples.

    Example:
        >>> from lightning_fl import FederatedLoop
        >>> loop = FederatedLoop(FedALA(tensors=2))
    """

    needs = ("losses",)

    def __init__(
        self,
        tensors: int = 2,
        lr: float = 1.0,
        fraction: float = 0.8,
        first_passes: int = 11,
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        super().__init__(weighting)
        self.tensors = check_integer("tensors", tensors, min=0)
        self.lr = check_number("lr", lr, min=0)
        self.fraction = check_number("fraction", fraction, above=0, max=1)
        self.first_passes = check_integer("first_passes", first_passes, min=1)

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients learn where to start."""
        return [LearnedStart(self.tensors, self.lr, self.fraction, self.first_passes)]


class LearnedStart(ClientPart):
    """Start between the client's own model and the received one.

    Args:
        tensors: See :class:`FedALA`.
        lr: See :class:`FedALA`.
        fraction: See :class:`FedALA`.
        first_passes: See :class:`FedALA`.
    """

    def __init__(self, tensors: int, lr: float, fraction: float, first_passes: int) -> None:
        self.tensors, self.lr = tensors, lr
        self.fraction, self.first_passes = fraction, first_passes

    def _mixed(self, layout: VectorLayout) -> slice:
        """Return the place of the entries with weights."""
        ends = torch.tensor(layout.sizes).cumsum(0)
        count = int((ends <= layout.num_parameters).sum())
        first = int(ends[count - self.tensors - 1]) if 0 < self.tensors < count else 0
        return slice(first, layout.num_parameters)

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        """Return weights of 1, and no model."""
        layout = federation.known_layout
        at = self._mixed(layout)
        return {
            "model": torch.zeros(at.stop - at.start, dtype=layout.dtype),
            "weights": torch.ones(at.stop - at.start, dtype=layout.dtype),
            "rounds": torch.zeros((), dtype=torch.int64),
        }

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        """Learn the weights, and start from the mixture."""
        at = self._mixed(client.federation.known_layout)
        rounds = memory["rounds"].cpu()
        passes = torch.tensor([0, self.first_passes, 1])[rounds.clamp(max=2)]
        part = (self.fraction * client.num_batches.double() - 1e-9).ceil()  # 0.1 * 30 is not 4
        steps = passes * part.long()
        way, weights = self._way(client.received[:, at], memory), memory["weights"]
        models = self.personal_models(client.federation, client.received, memory)
        for step in range(int(steps.max())):
            learned = next_weights(weights, client.batch_gradients(models)[:, at], way, self.lr)
            # Clients of a group whose passes are over wait for the others.
            weights = torch.where((step < steps).to(weights.device)[:, None], learned, weights)
            models[:, at] = between(client.received[:, at], way, weights)
        client.start_from(models)
        memory["weights"] = weights

    def personal_models(
        self, federation: Federation, received: Tensor, memory: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the mixtures of the received models and the clients' own."""
        at, models = self._mixed(federation.known_layout), received.clone()
        way = self._way(received[:, at], memory)
        models[:, at] = between(received[:, at], way, memory["weights"])
        return models

    def _way(self, received: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """Return the received entries minus the clients' own; 0 for new clients."""
        return torch.where(memory["rounds"][:, None] > 0, received - memory["model"], 0)

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep the local model; send nothing in addition to the update."""
        at = self._mixed(client.federation.known_layout)
        memory["model"] = client.received[:, at] + client.delta[:, at]
        memory["rounds"] = memory["rounds"] + 1
        return {}
