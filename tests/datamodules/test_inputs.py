"""From texts and images to tensors."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fl.datamodules import Characters, Relabel, Resized, Words
from lightning_fl.datamodules.inputs import LEAF_CHARACTERS
from lightning_fl.types import FederationError


def test_leafs_alphabet_has_80_characters():
    assert len(set(LEAF_CHARACTERS)) == len(LEAF_CHARACTERS) == 80


def test_characters_are_padded_in_front_and_the_last_ones_are_used():
    known = Characters(length=3, alphabet="abc")
    assert known("b").tolist() == [0, 0, 2]
    assert known("abca").tolist() == [2, 3, 1]
    assert known("a?c").tolist() == [1, 0, 3]
    label = Characters(length=None, alphabet="abc")
    assert (label("c").item(), label("?").item()) == (3, 0)
    for text in ("", "ab"):
        with pytest.raises(FederationError, match="a label must be one character"):
            label(text)


def test_words_have_the_same_index_in_every_process():
    words = Words(length=5, vocabulary=50)
    found = words("The cat, the CAT")
    assert found[:2].tolist() == found[2:4].tolist()
    assert found[4] == 0
    assert (found[:4] > 0).all()
    assert (Words(length=400, vocabulary=50)(" ".join(map(str, range(400)))) < 50).all()
    # zlib's crc32 of b"cat", modulo 49.
    assert int(Words(1, 50)("cat")) == 1 + 0x9E5E43A8 % 49
    assert words("").count_nonzero() == 1  # a mean over words needs one
    assert len(words("one two three four five six")) == 5


def test_labels_become_classes():
    assert [Relabel(["no", "yes"])(each) for each in ("yes", "no")] == [1, 0]
    assert Relabel([0, 4])(torch.tensor(4)) == 1
    with pytest.raises(FederationError, match=r"the label 2 is not one of \[0, 4\]"):
        Relabel([0, 4])(2)
    with pytest.raises(FederationError, match="labels must be distinct"):
        Relabel([1, 1])


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_of_any_kind_become_three_channels(mode):
    image = Image.fromarray(np.full((6, 10, 4), 51, dtype=np.uint8), "RGBA").convert(mode)
    found = Resized(4)(image)
    assert found.shape == (3, 4, 4)
    torch.testing.assert_close(found, torch.full((3, 4, 4), 0.2))


def test_wrong_options_are_refused():
    with pytest.raises(FederationError, match="alphabet must be a text of distinct characters"):
        Characters(alphabet="aa")
