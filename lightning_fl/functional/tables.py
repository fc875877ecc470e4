"""Growing tables with one row per client index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

#: Initial number of rows.
PLACES = 64


def with_place(table: Tensor, ids: Tensor, fill: float = 0) -> Tensor:
    """Return a table with a row for every id: the same table, or one at least twice as long.

    Args:
        table: Table, ``[places, ...]``.
        ids: Client indices, ``[k]``.
        fill: Value of new rows.

    Example:
        >>> import torch
        >>> with_place(torch.ones(2), torch.tensor([2]), fill=-1)
        tensor([ 1.,  1., -1., -1.])
    """
    if (most := int(ids.max()) + 1) <= len(table):
        return table
    grown = table.new_full((max(most, 2 * len(table)), *table.shape[1:]), fill)
    grown[: len(table)] = table
    return grown


def with_rows_of(table: Tensor, saved: Tensor) -> Tensor:
    """Return zeros with as many rows as a saved table, or the table if columns differ.

    Args:
        table: Current table, ``[places, ...]``.
        saved: Saved table.

    Example:
        >>> import torch
        >>> with_rows_of(torch.ones(2), torch.ones(3))
        tensor([0., 0., 0.])
    """
    same = saved.ndim > 0 and saved.shape[1:] == table.shape[1:]
    return table.new_zeros(saved.shape) if same else table


def make_place(
    module: nn.Module, names: Iterable[str], state_dict: Mapping[str, Any], prefix: str
) -> None:
    """Resize buffers of a module to their shapes in a state dictionary before loading it.

    Args:
        module: Module with the buffers.
        names: Names of the buffers. Names missing in the module or the dictionary are ignored.
        state_dict: State dictionary to load.
        prefix: Prefix of the names in the dictionary.

    Example:
        >>> import torch
        >>> module = nn.Module()
        >>> module.register_buffer("rows", torch.zeros(1))
        >>> make_place(module, ["rows"], {"rows": torch.ones(3)}, prefix="")
        >>> module.rows
        tensor([0., 0., 0.])
    """
    for name in names:
        buffer, saved = module._buffers.get(name), state_dict.get(prefix + name)
        if buffer is not None and saved is not None:
            module._buffers[name] = buffer.new_zeros(saved.shape)
