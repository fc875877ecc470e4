"""A recurrent network that predicts the next character."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from lightning_fl.options import check_sizes


class CharLSTM(nn.Module):
    """Predict the character that follows a text (McMahan et al., 2017; LEAF).

    An embedding of 8 numbers, two LSTM layers of 256 units, and a linear layer on the last state.
    Clients with recurrent layers train one after another, since ``vmap`` does not support them.

    Args:
        vocabulary: Number of characters, including 0 for unknown ones.
        embedding: Size of the representation of a character.
        hidden: Units of each LSTM layer.
        layers: Number of LSTM layers.

    Raises:
        FederationError: If a size is not positive.

    Example:
        >>> import torch
        >>> CharLSTM(vocabulary=81, hidden=16)(torch.zeros(2, 80, dtype=torch.int64)).shape
        torch.Size([2, 81])
    """

    def __init__(
        self, vocabulary: int = 81, embedding: int = 8, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        check_sizes(vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers)
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next character, ``[batch, vocabulary]``, for ``[batch, length]``."""
        states, _ = self.lstm(self.embedding(tokens))
        return cast("Tensor", self.head(states[:, -1]))
