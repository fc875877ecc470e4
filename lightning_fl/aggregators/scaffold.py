"""Control variates on clients and server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Literal

import torch
from torch import Tensor

from lightning_fl.aggregators.fedavg import FedAvg
from lightning_fl.aggregators.local_training import check_sgd
from lightning_fl.contracts.client_part import ClientContext, ClientPart
from lightning_fl.contracts.context import Federation
from lightning_fl.contracts.plan import RoundPlan
from lightning_fl.contracts.update import ClientUpdate
from lightning_fl.functional.drift import next_control
from lightning_fl.functional.summation import VectorSum, add_rows, sum_value
from lightning_fl.options import check_choice, check_number


class Scaffold(FedAvg):
    r"""Correct the drift of clients with control variates (SCAFFOLD; Karimireddy et al., 2020).

    Algorithm 1. The server has a model :math:`x` and a control variate :math:`c`, each client a
    control variate :math:`c_k`; all control variates are 0 at first. A sampled client makes
    :math:`K` local steps from :math:`y_k = x`,

    .. math:: y_k \leftarrow y_k - \eta_l (g_k(y_k) - c_k + c),

    and then replaces its control variate, by option I or II:

    .. math:: c_k^+ = \nabla f_k(x) \quad \text{(I)} \qquad
        c_k^+ = c_k - c + \frac{x - y_k}{K \eta_l} \quad \text{(II)}

    The server moves by what the clients that returned, :math:`S`, have sent:

    .. math:: x \leftarrow x + \frac{\eta_g}{|S|} \sum_{k \in S} (y_k - x), \qquad
        c \leftarrow c + \frac1N \sum_{k \in S} (c_k^+ - c_k)

    :math:`c` is the mean of all :math:`N` clients' :math:`c_k`, also of those that were not
    sampled. It takes the changes of a round that keeps the model, too. Floating buffers are
    averaged. Every client keeps :math:`c_k`, a vector of the model's size, which is saved in
    checkpoints; traffic is twice that of FedAvg each way. A client whose update is dropped keeps
    its former :math:`c_k`.

    Attacks and update transforms act on :math:`y_k - x` alone.

    If the clients' SGD has momentum :math:`\mu`, option II corrects the step and not the gradient,
    as the program of NIID-Bench (Li et al., 2022) does:

    .. math:: m_k \leftarrow \mu m_k + g_k(y_k), \qquad
        y_k \leftarrow y_k - \eta_l (m_k - c_k + c)

    :math:`c_k^+` is then the mean of :math:`m_k` over the local steps. With option I, the optimizer
    gets the corrected gradient, whichever optimizer it is.

    Args:
        option: ``II`` reuses the gradients of the local steps. It inverts the local solver, and
            needs SGD whose learning rate is constant in the round, without gradient clipping.
            ``I`` is a pass over all samples of the client, in evaluation mode; it needs a module
            with a method ``federated_losses(batch)``.
        lr: Learning rate :math:`\eta_g` of the server.
        weighting: ``uniform`` is the equations above: the mean over clients of :math:`f_k` is
            minimized. ``samples`` minimizes the mean weighted by the clients' numbers of samples
            :math:`n_k`: with :math:`n_k / \sum_{j \in S} n_j` in the place of :math:`1 / |S|`, and
            with :math:`n_k / \sum_{j \le N} n_j` in the place of :math:`1 / N`.

    Raises:
        FederationError: If an option is out of range; at the start of a fit, if local training is
            not what the option needs.

    Example:
        >>> from lightning_fl.types import Cohort
        >>> rule = Scaffold()
        >>> rule.setup(Federation(num_clients=4, sampling=Cohort(size=1, clients=4)))
        >>> rule.start(torch.zeros(2))
        >>> rule.update(ClientUpdate(torch.tensor([3]), torch.tensor([[1.0, -2.0]]),
        ...     torch.tensor([8]), extras={"control_change": torch.tensor([[-2.0, 4.0]])}))
        >>> rule.compute(), rule.control.tolist()
        (tensor([ 1., -2.]), [-0.5, 1.0])
    """

    control: Tensor
    change: VectorSum

    def __init__(
        self,
        option: Literal["I", "II"] = "II",
        lr: float = 1.0,
        weighting: Literal["uniform", "samples"] = "uniform",
    ) -> None:
        super().__init__(weighting)
        self.option = check_choice("option", option, "I", "II")
        self.lr = check_number("lr", lr, above=0)
        self.needs = ("losses" if option == "I" else "sgd", "constant_sizes")

    def client_parts(self) -> Sequence[ClientPart]:
        """Let clients correct their gradients."""
        return [ControlVariate(self.option)]

    def allocate(self, server: Tensor) -> None:
        """Declare the sums of a round, and the control variate of the server."""
        super().allocate(server)
        parameters = server[: self.num_parameters]
        self.add_sum("change", len(parameters))
        self.register_buffer("control", torch.zeros_like(parameters).double())

    def broadcast(self, plan: RoundPlan) -> Mapping[str, Tensor]:
        """Send the control variate of the server."""
        return {"control": self.control.to(self.server.dtype)}

    def update(self, clients: ClientUpdate) -> None:
        """Add the moves and the changes of control variates to their sums."""
        self.require_extras(clients, control_change=tuple(self.control.shape))
        super().update(clients)
        add_rows(self.change, clients.extras["control_change"], self._weights(clients))

    def compute(self) -> Tensor:
        """Return the next model, and move the control variate of the server."""
        self.control = self.control + sum_value(self.change) / self._weight_of_all()
        move = self._mean()
        move[: len(self.control)] *= self.lr
        return (self.server + move).to(self.server.dtype)

    def conclude(self, returned: int, min_clients: int) -> Tensor | None:
        """End a round: the control variate moves even where the model is kept."""
        model: Tensor = self.compute()
        return model if returned >= min_clients else None

    def metrics(self) -> dict[str, float]:
        """Return the norm of the server's control variate, an estimate of the gradient's."""
        return {"control_norm": float(self.control.norm())} if self.server.numel() else {}


class ControlVariate(ClientPart):
    """Correct a client's gradients by its control variate, which it remembers.

    Args:
        option: ``I`` or ``II``; see :class:`Scaffold`.
    """

    def __init__(self, option: Literal["I", "II"]) -> None:
        self.option = option
        self._server = self._gradients = torch.empty(0)

    def initial_memory(self, federation: Federation) -> dict[str, Tensor]:
        """Return a control variate of 0."""
        layout = federation.known_layout
        return {"control": torch.zeros(layout.num_parameters, dtype=layout.dtype)}

    def start(
        self, client: ClientContext, memory: dict[str, Tensor], broadcast: Mapping[str, Tensor]
    ) -> None:
        r"""Add :math:`c - c_k` to all local steps.

        Momentum sums what it gets, so that it gets :math:`c - c_k` in the first step, and
        :math:`(1 - \mu) (c - c_k)` in later ones.
        """
        layout = client.federation.known_layout
        self._server = broadcast["control"]
        correction = self._server - memory["control"]
        later = correction
        # First, since it refuses a module that optimizes manually.
        client.add_to_gradients(lambda params, gradients: next(terms))
        if self.option == "I":
            self._gradients = client.mean_gradients()
        elif momentum := check_sgd(Scaffold.__name__, client.federation):
            later = (1 - momentum) * correction
        terms = chain([layout.split(correction)], repeat(layout.split(later)))

    def end(self, client: ClientContext, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace the client's control variate; send the change."""
        before = memory["control"]
        if self.option == "I":
            after = self._gradients.to(before)
        else:
            delta = client.delta[:, : before.shape[1]]
            after = next_control(before, self._server, delta, client.num_steps, client.lr)
        if client.trained is not None:
            after = after.where(client.trained, before)
        memory["control"] = after
        return {"control_change": after - before}
