"""Tensors of a network that stay with each client."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.options import check_flag

#: Name of a module's network, ``ClientModule.net``.
NET = "net"


class LocalNetwork(nn.Module):
    """Hold other values of the trained parameters and the buffers of a network.

    Frozen parameters are those of the network, since they exist once. Part of a term with
    ``stays_local``, so each client has its own values; a new client starts from the received model.

    Args:
        net: The network, a module's ``net``.
        is_trained: Whether the optimizer trains the parameters. Otherwise they are constant.
        has_parameters: Whether to hold the parameters; otherwise only the buffers.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> local = LocalNetwork(net, is_trained=True)
        >>> local.start(net)
        >>> list(local.tensors()), torch.equal(local.tensors()["net.weight"], net.weight)
        (['net.weight', 'net.bias'], True)
    """

    started: Tensor

    def __init__(self, net: nn.Module, is_trained: bool, has_parameters: bool = True) -> None:
        super().__init__()
        check_flag("is_trained", is_trained)
        check_flag("has_parameters", has_parameters)
        self._params = list(trained_parameters(net))
        own = {n: t for n, t in _tensors(net).items() if has_parameters or n not in self._params}
        self._names = list(own)
        device = next(net.parameters()).device
        #: Whether the client has participated in a round.
        started = torch.zeros((), dtype=torch.bool, device=device)
        self.register_buffer("started", started, persistent=False)
        for name, tensor in own.items():
            value = tensor.detach().clone(memory_format=torch.contiguous_format)
            if is_trained and name in self._params:
                self.register_parameter(_key(name), nn.Parameter(value))
            else:
                self.register_buffer(_key(name), value, persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, by their name in the module of the network."""
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: own[_key(name)] for name in self._names}

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Return the values of the trained parameters of the network, by name in the module."""
        own = self.tensors()
        return {name: own[name] for name in self._params}

    @torch.no_grad()
    def start(self, net: nn.Module) -> None:
        """Copy the tensors of the network if the client is new.

        Args:
            net: The network, with the received model.

        Raises:
            FederationError: If parameters were frozen or unfrozen since the start of the fit.
        """
        if list(trained_parameters(net)) != self._params:
            raise FederationError(
                "the trained parameters of the network changed during the fit, but a term keeps a"
                " second model with those of the start: freeze or unfreeze parameters before the"
                " fit, or remove the term"
            )
        now = _tensors(net)
        for name, tensor in self.tensors().items():
            tensor.copy_(torch.where(self.started, tensor, now[name]))
        self.started.fill_(True)

    @torch.no_grad()
    def copy(self, net: nn.Module) -> None:
        """Copy the tensors of the network.

        Args:
            net: The network.
        """
        now = _tensors(net)
        for name, tensor in self.tensors().items():
            tensor.copy_(now[name])


@torch.no_grad()
def load_tensors(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a network.

    Args:
        net: The network, a module's ``net``.
        tensors: Parameters and buffers by name in the module.
    """
    own = _tensors(net)
    for name, value in tensors.items():
        own[name].copy_(value)


def evaluation_copy(net: nn.Module) -> nn.Module:
    """Return a copy of a network in evaluation mode, which shares its parameters."""
    shared = {id(parameter): parameter for parameter in net.parameters()}
    return copy.deepcopy(net, shared).eval()


def trained_parameters(net: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters of a network, by name in the module."""
    return {name: p for name, p in net.named_parameters(prefix=NET) if p.requires_grad}


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters and the buffers of a network, by name in the module."""
    return trained_parameters(net) | dict(net.named_buffers(prefix=NET))


def _key(name: str) -> str:
    """Return the name of an attribute; a dot would be a submodule."""
    return name.replace(".", "/")
