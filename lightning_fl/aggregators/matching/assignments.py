"""Tables of assignments from client neurons to atoms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fl.functional.neuron_matching import Matching


def assignment_table(clients: Sequence[int], matchings: Sequence[Matching]) -> Tensor:
    """Return assignments as one tensor, ``[clients, layers, 1 + neurons]``.

    A row holds the client index, the atom of each neuron, and padding of -1.

    Args:
        clients: Client indices.
        matchings: Matching of each hidden layer.
    """
    most = max(len(atoms) for matching in matchings for atoms in matching.assignments)
    table = torch.full((len(clients), len(matchings), most + 1), -1)
    for layer, matching in enumerate(matchings):
        for row, atoms in enumerate(matching.assignments):
            table[row, layer, 0] = clients[row]
            table[row, layer, 1 : len(atoms) + 1] = atoms
    return table


def read_table(table: Tensor) -> dict[int, list[list[int]]]:
    """Return the assignments of :func:`assignment_table`, by client and hidden layer.

    Example:
        >>> read_table(torch.tensor([[[7, 2, 0, -1]], [[9, 0, 1, 2]]]))
        {7: [[2, 0]], 9: [[0, 1, 2]]}
    """
    return {
        layers[0][0]: [[atom for atom in row[1:] if atom >= 0] for row in layers]
        for layers in table.tolist()
    }
