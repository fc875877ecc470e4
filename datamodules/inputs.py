"""Functions from raw inputs, such as texts and images, to tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from lightning_fl.errors import FederationError
from lightning_fl.options import check_integer, check_that

#: The characters of LEAF's Shakespeare.
LEAF_CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)

#: Number of PIL's bilinear filter, which torchvision uses for images.
BILINEAR = 2


class Characters:
    """Map a text to the indices of its characters, ``[length]``.

    Characters have indices from 1 on. Index 0 stands for unknown characters, and for padding before
    the text. Of a longer text, the last characters are used.

    Args:
        length: Number of characters. None is for labels: the text is one character, and the result
            is its index.
        alphabet: The known characters.

    Raises:
        FederationError: If an option is out of range, or a label is not one character.

    Example:
        >>> Characters(length=4)("to?"), Characters(length=None, alphabet="ab")("b")
        (tensor([ 0, 73, 68, 25]), tensor(2))
    """

    def __init__(self, length: int | None = 80, alphabet: str = LEAF_CHARACTERS) -> None:
        self.length = check_integer("length", length, min=1, optional=True)
        is_right = len(set(alphabet)) == len(alphabet) > 0
        check_that("alphabet", alphabet, is_right, "a text of distinct characters")
        self.index = {character: i + 1 for i, character in enumerate(alphabet)}

    def __call__(self, text: str) -> Tensor:
        """Return the indices of a text."""
        if self.length is None:
            check_that("a label", text, len(text) == 1, "one character")
            return torch.tensor(self.index.get(text, 0))
        known = [self.index.get(character, 0) for character in text[-self.length :]]
        return torch.tensor([0] * (self.length - len(known)) + known)


class Words:
    """Map a text to the indices of its words, ``[length]``, padded with 0 behind the last word.

    The index of a word is a hash of its lower-case form, from 1 to ``vocabulary - 1``, so that
    there is no list of words to agree on. Two words share an index with probability
    ``1 / (vocabulary - 1)``.

    Args:
        length: Number of words; further words are cut off.
        vocabulary: Number of indices, including 0.

    Raises:
        FederationError: If an option is out of range.

    Example:
        >>> indices = Words(length=4, vocabulary=100)("Good, GOOD bye")
        >>> len(indices), bool(indices[0] == indices[1]), int(indices[3])
        (4, True, 0)
    """

    def __init__(self, length: int = 32, vocabulary: int = 10_000) -> None:
        self.length = check_integer("length", length, min=1)
        self.vocabulary = check_integer("vocabulary", vocabulary, min=2)

    def __call__(self, text: str) -> Tensor:
        """Return the indices of a text. A text without words is one word that stands for none."""
        words = re.findall(r"\w+", text.lower())[: self.length] or [""]
        known = [1 + crc32(word.encode()) % (self.vocabulary - 1) for word in words]
        return torch.tensor(known + [0] * (self.length - len(known)))


class Relabel:
    """Map labels to classes from 0 on.

    Args:
        labels: The labels in the order of their classes.

    Raises:
        FederationError: If a label occurs twice, or is not in the list.

    Example:
        >>> Relabel([0, 4])(4)
        1
    """

    def __init__(self, labels: Sequence[int | str]) -> None:
        self.classes = {label: i for i, label in enumerate(labels)}
        check_that("labels", labels, len(self.classes) == len(labels) > 0, "distinct")

    def __call__(self, label: Any) -> int:
        """Return the class of a label."""
        label = label.item() if isinstance(label, Tensor) else label
        if label not in self.classes:
            raise FederationError(f"the label {label!r} is not one of {list(self.classes)}")
        return self.classes[label]


class Resized:
    """Map an image to a square tensor, ``[3, size, size]``, with values from 0 to 1.

    Args:
        size: Height and width in pixels.

    Raises:
        FederationError: If the size is not positive.
    """

    def __init__(self, size: int = 32) -> None:
        self.size = check_integer("size", size, min=1)

    def __call__(self, image: Any) -> Tensor:
        """Return the tensor of a PIL image."""
        return pixels(image.convert("RGB").resize((self.size, self.size), BILINEAR))


def pixels(image: Any) -> Tensor:
    """Return the tensor of a PIL image, ``[channels, height, width]``, with values from 0 to 1.

    Args:
        image: An image in 8-bit gray or RGB.
    """
    values = torch.from_numpy(np.array(image))
    return values.view(*values.shape[:2], -1).permute(2, 0, 1) / 255
