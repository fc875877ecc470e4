"""Names of the parameters and buffers that stay with each client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl.errors import FederationError
from lightning_fl.runners.constants import constant_parameters

#: Optional attribute of a module: names of parameters and buffers that stay with each client.
LOCAL_TENSORS = "federated_local_parameters"
#: Prefix of patterns that match the classes of layers instead of the names of tensors.
OF_TYPE = "type:"


def tensor_names(module: nn.Module) -> dict[str, str]:
    """Return all names of parameters and buffers, each with the first name of the same tensor.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> net[1].weight = net[0].weight
        >>> tensor_names(net)
        {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def matching_names(module: nn.Module, pattern: str) -> set[str]:
    """Return the names of parameters and buffers that a pattern matches.

    Args:
        module: The user's module.
        pattern: Pattern of names, as in ``fnmatch``: ``net.head.*``. With the prefix ``type:``, it
            matches the names of the classes of modules and of their base classes, and stands for
            all tensors within these modules: ``type:_BatchNorm``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        >>> sorted(matching_names(net, "type:_BatchNorm"))
        ['1.num_batches_tracked', '1.running_mean', '1.running_var']
        >>> sorted(matching_names(net, "*.weight"))
        ['0.weight']
    """
    names = tensor_names(module)
    if not pattern.startswith(OF_TYPE):
        return {name for name in names if fnmatchcase(name, pattern)}
    kind = pattern.removeprefix(OF_TYPE)
    owners = [
        f"{path}." if path else ""
        for path, part in module.named_modules(remove_duplicate=False)
        if any(fnmatchcase(base.__name__, kind) for base in type(part).__mro__)
    ]
    return {name for name in names if name.startswith(tuple(owners))}


def matched_tensors(module: nn.Module, patterns: Iterable[str], option: str) -> list[str]:
    """Return the tensors that any of several patterns matches, each by its first name.

    Args:
        module: The user's module.
        patterns: The patterns; see :func:`matching_names`.
        option: Name of the option for error messages.

    Raises:
        FederationError: If a pattern matches nothing.
    """
    names, matched = tensor_names(module), set[str]()
    for pattern in patterns:
        if not (found := matching_names(module, pattern)):
            raise FederationError(
                f"the pattern {pattern!r} in {option} matches no parameter or buffer of"
                f" {type(module).__name__}: the first names are {', '.join(list(names)[:5])}"
            )
        matched |= found
    return list(dict.fromkeys(first for name, first in names.items() if name in matched))


def named_local_tensors(module: LightningModule) -> list[str]:
    """Return the tensors that a module itself names (``federated_local_parameters``).

    Raises:
        FederationError: If a name or pattern matches nothing.
    """
    return matched_tensors(module, getattr(module, LOCAL_TENSORS, None) or (), LOCAL_TENSORS)


def local_tensors(module: LightningModule, patterns: Sequence[str] = ()) -> list[str]:
    """Return the names of all client-local tensors.

    Args:
        module: The user's module, with tensors that it names itself.
        patterns: Patterns of further tensors; see :func:`matching_names`.

    Raises:
        FederationError: If a name or a pattern matches nothing.
    """
    names = matched_tensors(module, patterns, "local_parameters")
    return list(dict.fromkeys([*named_local_tensors(module), *names]))


def split_tensors(
    module: LightningModule, exchange_frozen: bool, patterns: Sequence[str]
) -> tuple[dict[str, nn.Parameter], list[str]]:
    """Return the constant parameters and the names of the client-local tensors.

    A frozen parameter that clients do not exchange is constant, whether a pattern matches it or
    not. It is local only if the module itself names it.

    Args:
        module: The user's module.
        exchange_frozen: Whether frozen parameters are exchanged; see :func:`constant_parameters`.
        patterns: Patterns of client-local tensors; see :func:`matching_names`.

    Raises:
        FederationError: If no trained parameter is left to share.
    """
    constants = constant_parameters(module, exchange_frozen, named_local_tensors(module))
    local = [name for name in local_tensors(module, patterns) if name not in constants]
    shared = [param for name, param in module.named_parameters() if name not in local]
    if patterns and not exchange_frozen:
        shared = [param for param in shared if param.requires_grad]
    if local and not shared:
        raise FederationError(
            f"all trained parameters of {type(module).__name__} are local, so that none is left to"
            f" aggregate: leave one out of local_parameters or {LOCAL_TENSORS}"
        )
    return constants, local
