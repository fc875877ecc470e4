"""A small transformer for token sequences."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fl.models.weights import load_weights
from lightning_fl.options import check_number, check_sizes, check_that


class TextTransformer(nn.Module):
    """Transformer encoder that classifies token sequences, with pre-normalization and GELU.

    Tokens are integers from 0; token 0 is padding, which is neither attended to nor averaged. The
    logits are a linear function of the mean over tokens (``head``). Attention consists of the
    linear layers ``query``, ``key``, ``value`` and ``out``, to which adapters can be added.

    Args:
        vocabulary: Number of tokens, including padding.
        num_classes: Number of classes.
        width: Size of the representation of a token.
        depth: Number of layers.
        heads: Number of attention heads, which divides ``width``.
        length: Maximum length of a sequence.
        dropout: Dropout probability after attention and the feed-forward network.
        weights: File with a ``state_dict`` to start from (``.pt`` or ``.safetensors``); None is a
            random start. A head for other classes is not loaded.

    Raises:
        FederationError: If an option is out of range, or the file does not fit.

    Example:
        >>> net = TextTransformer(vocabulary=50, num_classes=3, width=16, depth=1, length=8)
        >>> net(torch.tensor([[4, 7, 0, 0], [9, 2, 3, 1]])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        vocabulary: int,
        num_classes: int,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        length: int = 64,
        dropout: float = 0.0,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        check_sizes(vocabulary=vocabulary, num_classes=num_classes, width=width)
        check_sizes(depth=depth, heads=heads, length=length)
        check_number("dropout", dropout, min=0, below=1)
        check_that("heads", heads, width % heads == 0, f"a divisor of width={width}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(_Layer(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)
        if weights is not None:
            load_weights(self, weights, head="head")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``[batch, classes]``, for tokens ``[batch, length]``."""
        is_token = (x != 0).unsqueeze(-1)
        h = self.tokens(x) + self.positions[: x.shape[1]]
        for layer in self.layers:
            h = layer(h, is_token)
        h = self.norm(h) * is_token
        return cast("Tensor", self.head(h.sum(1) / is_token.sum(1).clamp(min=1)))


class _Layer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, is_token: Tensor) -> Tensor:
        h = h + self.dropout(self._attention(self.norm1(h), is_token))
        return cast("Tensor", h + self.dropout(self.narrow(F.gelu(self.wide(self.norm2(h))))))

    def _attention(self, x: Tensor, is_token: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # [batch, heads, length, size]
            for part in (self.query(x), self.key(x), self.value(x))
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = ~is_token.transpose(-2, -1).unsqueeze(-3)  # [batch, 1, 1, length]
        # The lowest finite number: a row of infinities would be NaN for a text without tokens.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ v
        return cast("Tensor", self.out(mixed.transpose(-3, -2).flatten(-2)))
