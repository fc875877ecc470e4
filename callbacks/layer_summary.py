"""Summary of the layers of a module."""

from __future__ import annotations

from typing import Any

import rich.console
import rich.table
from lightning.pytorch.callbacks import ModelSummary

from lightning_fl.options import check_integer


class LayerSummary(ModelSummary):
    """Show the layers of the module at the start of a fit, with the numbers of their parameters.

    As Lightning's ``RichModelSummary``, but floating-point operations are a column only if they
    were counted, which requires an ``example_input_array`` of the module.

    Args:
        max_depth: Depth of nested layers to show: 1 shows the top level, -1 all, 0 nothing.

    Raises:
        FederationError: If ``max_depth`` is less than -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        super().__init__(check_integer("max_depth", max_depth, min=-1))

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the table."""
        columns = {name: each for name, each in summary_data if name != "FLOPs" or total_flops}
        table = rich.table.Table(header_style="bold")
        for name in columns:
            numbers = ("Params", "FLOPs")
            table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        console = rich.console.Console()
        if not console.is_terminal:
            console.width = 200  # a file has no width: nothing is cut off
        console.print(table)
        trained = f"{total_parameters:,} parameters, {trainable_parameters:,} of them trained"
        console.print(f"{trained}; {model_size:.3g} MB", highlight=False)
