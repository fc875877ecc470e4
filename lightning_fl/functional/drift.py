"""Control variates, normalized updates and dynamic regularizers to correct client drift."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fl.errors import FederationError


def next_control(
    control: Tensor, server_control: Tensor, delta: Tensor, num_steps: Tensor, lr: Tensor
) -> Tensor:
    r"""Return the new client control variates from the local updates.

    SCAFFOLD, option II (Karimireddy et al., 2020, eq. 4):
    :math:`c_k^+ = c_k - c + \frac{x - y_k}{K \eta_l}`, where the last term is the mean
    local gradient. This holds for SGD with a learning rate that is constant in the round; with
    momentum, it is the mean step divided by the rate.

    Args:
        control: Client control variates :math:`c_k`, ``[k, P]``.
        server_control: Server control variate :math:`c`, ``[P]``.
        delta: Client updates :math:`y_k - x`, ``[k, P]``.
        num_steps: Number of local steps :math:`K` of each client, ``[k]``.
        lr: Learning rate :math:`\eta_l` of each client, ``[k]``. Clients with a learning rate of 0
            keep their control variates.

    Returns:
        New client control variates :math:`c_k^+`, ``[k, P]``.

    Example:
        >>> import torch
        >>> zeros, steps, lr = torch.zeros(1, 2), torch.tensor([5]), torch.tensor([0.1])
        >>> next_control(zeros, zeros[0], torch.tensor([[1.0, -2.0]]), steps, lr)
        tensor([[-2.,  4.]])
    """
    way = (num_steps * lr).to(delta)[:, None]
    moved = control - server_control - delta / way.where(way > 0, 1)
    return moved.where(way > 0, control)


def dynamic_term(params: Tensor, start: Tensor, gradient: Tensor, alpha: Tensor) -> Tensor:
    r"""Return the gradient of the dynamic regularizer of clients, :math:`\alpha_k (y - x) - g_k`.

    FedDyn (Acar et al., 2021, Algorithm 1): a client minimizes
    :math:`f_k(y) - \langle g_k, y \rangle + \frac{\alpha_k}{2} \lVert y - x \rVert^2`.

    Args:
        params: Local parameters :math:`y`, ``[k, ...]``.
        start: Parameters :math:`x` from which the clients started, ``[k, ...]``.
        gradient: Linear terms :math:`g_k`, ``[k, ...]``.
        alpha: Strength :math:`\alpha_k` of each client, ``[k]``.

    Returns:
        The gradient, ``[k, ...]``.

    Example:
        >>> import torch
        >>> y, x, g = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2)
        >>> dynamic_term(y, x, g, torch.tensor([0.5]))
        tensor([[ 0., -1.]])
    """
    return alpha.to(params).view(-1, *[1] * (params.ndim - 1)) * (params - start) - gradient


def next_gradient(gradient: Tensor, delta: Tensor, alpha: Tensor) -> Tensor:
    r"""Return the new linear terms of clients, :math:`g_k - \alpha_k (y_k - x)`.

    FedDyn (Acar et al., 2021, Algorithm 1). If :math:`y_k` minimizes the objective of
    :func:`dynamic_term`, the result is :math:`\nabla f_k(y_k)`.

    Args:
        gradient: Linear terms :math:`g_k`, ``[k, P]``.
        delta: Client updates :math:`y_k - x`, ``[k, P]``.
        alpha: Strength :math:`\alpha_k` of each client, ``[k]``.

    Returns:
        New linear terms, ``[k, P]``.

    Example:
        >>> import torch
        >>> next_gradient(torch.ones(1, 2), torch.tensor([[2.0, -2.0]]), torch.tensor([0.5]))
        tensor([[0., 2.]])
    """
    return gradient - alpha.to(delta)[:, None] * delta


def effective_steps(num_steps: Tensor, momentum: float = 0.0, pull: Tensor | None = None) -> Tensor:
    r"""Return the effective number of local steps, :math:`\lVert a \rVert_1`.

    The change of a local solver is :math:`x - y = \eta \sum_i a_i g_i` (Wang et al., 2020, section
    3.1; FedNova). For :math:`\tau` steps of

    - SGD: :math:`\lVert a \rVert_1 = \tau`;
    - SGD with momentum :math:`\rho`:
      :math:`\frac{1}{1 - \rho} \left( \tau - \rho \frac{1 - \rho^\tau}{1 - \rho} \right)`;
    - SGD with a proximal term of strength :math:`\mu`, where :math:`m = \eta \mu`:
      :math:`\frac{1 - (1 - m)^\tau}{m}`.

    Args:
        num_steps: Number of local steps :math:`\tau` of each client, ``[k]``.
        momentum: Momentum :math:`\rho`, in [0, 1).
        pull: Product :math:`m` of each client, ``[k]``. None means 0. Only without momentum.

    Returns:
        :math:`\lVert a \rVert_1` of each client, ``[k]``, in float64.

    Raises:
        FederationError: If there are both a momentum and a proximal term.

    Example:
        >>> import torch
        >>> effective_steps(torch.tensor([1, 2]), momentum=0.5)
        tensor([1.0000, 2.5000], dtype=torch.float64)
        >>> effective_steps(torch.tensor([2]), pull=torch.tensor([0.5]))
        tensor([1.5000], dtype=torch.float64)
    """
    tau = num_steps.double()
    if pull is not None:
        if momentum:
            raise FederationError(f"pull requires momentum=0, got momentum={momentum}")
        m = pull.double()
        power = torch.expm1(tau * torch.log1p(-m.clamp(max=0.5)))  # (1 - m)^tau - 1
        power = power.where(m <= 0.5, (1 - m) ** tau - 1)
        return (-power / m.where(m > 0, 1)).where(m > 0, tau)
    if not momentum:
        return tau
    return (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
