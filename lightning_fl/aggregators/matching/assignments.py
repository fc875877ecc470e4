"""Tables of assignments from client neurons to atoms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fl.functional.neuron_matching import Matching

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Atoms of the neurons of each hidden layer, by client.
Assignments = Mapping[int, Sequence[Sequence[int]]]


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


def draw_assignments(assignments: Assignments, widths: Sequence[int]) -> Figure:
    """Draw the atoms of each client, one panel per hidden layer.

    Args:
        assignments: Atoms of at least one client.
        widths: Number of atoms of each hidden layer.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 2.2 * len(widths)), layout="constrained")
    panels = figure.subplots(len(widths), 1, squeeze=False)[:, 0]
    for layer, (axes, width) in enumerate(zip(panels, widths, strict=True)):
        has = torch.zeros(len(assignments), width)
        for row, layers in enumerate(assignments.values()):
            has[row, layers[layer]] = 1
        order = has.sum(0).argsort(descending=True, stable=True)
        axes.imshow(has[:, order].numpy(), aspect="auto", cmap="Greys", interpolation="nearest")
        axes.set(
            xlabel=f"{width} neurons, by decreasing number of clients",
            ylabel=f"client, layer {layer + 1}",
            yticks=range(len(assignments)),
            yticklabels=list(assignments),
        )
    return figure
