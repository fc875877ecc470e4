"""Image models of timm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from lightning_fl.errors import FederationError
from lightning_fl.extras import imported
from lightning_fl.models.weights import load_weights
from lightning_fl.options import check_integer


class TimmModel(nn.Module):
    """Any image model of timm, by its name. Nothing is downloaded.

    Attention is not fused, so that it can be vectorized over clients.

    Requires the package timm: ``pip install "lightning_fl[peft]"``.

    Args:
        name: Name of the model, such as ``vit_tiny_patch16_224`` (``timm.list_models()``).
        num_classes: Number of classes.
        options: Further options of the model, such as ``{img_size: 32, patch_size: 4}``.
        weights: File with a ``state_dict`` of the model to start from (``.pt`` or
            ``.safetensors``); None is a random start. A head for other classes is not loaded.

    Raises:
        FederationError: If timm is missing, does not know the model or its options, or the file
            does not fit.
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        options: Mapping[str, Any] | None = None,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        check_integer("num_classes", num_classes, min=1)
        timm = imported("timm", "TimmModel", "peft")
        try:
            net: Any = timm.create_model(
                name, pretrained=False, num_classes=num_classes, **options or {}
            )
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise FederationError(f"timm cannot make {name} with {options}: {error}") from error
        self.net: nn.Module = net
        for part in self.net.modules():
            if "fused_attn" in vars(part):  # torch.vmap runs it one client after another
                vars(part)["fused_attn"] = False
        if weights is not None:
            load_weights(self.net, weights, head=str(net.pretrained_cfg["classifier"]))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[batch, classes]``, for images ``[batch, channels, height, width]``."""
        return cast("Tensor", self.net(x))
