"""Weights of networks from local files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.files import error_context


def load_weights(net: nn.Module, path: str, head: str) -> None:
    """Load a ``state_dict`` from a local file. A head of another shape is not loaded.

    Args:
        net: The network.
        path: File of ``torch.save(net.state_dict(), path)``, or of safetensors if it ends in
            ``.safetensors``. No code in it is executed.
        head: Name of the layer that computes the logits.

    Raises:
        FederationError: If the file cannot be read, or lacks a tensor of the network.
    """
    with error_context(f"weights={path!r} cannot be loaded", Exception):
        saved = _read(path)
        own = net.state_dict()
        for name in [n for n in saved if n == head or n.startswith(f"{head}.")]:
            if name in own and saved[name].shape != own[name].shape:
                saved[name] = own[name]  # of other classes
        net.load_state_dict(saved)


def _read(path: str) -> dict[str, Tensor]:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file  # comes with timm and peft

        return dict(load_file(path))
    saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(saved, dict) or not all(isinstance(t, Tensor) for t in saved.values()):
        raise FederationError("it holds no state_dict: save net.state_dict() with torch.save")
    return dict(saved)
