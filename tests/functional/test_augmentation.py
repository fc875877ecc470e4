"""Augmentation, against loops over pixels and samples."""

import numpy as np
import pytest
import torch

from lightning_fl.functional.augmentation import choices, crop_and_flip, mask_span, shift


def cropped(image, top, left, is_flipped, padding):
    """Crop one image, ``[channels, h, w]``, pixel by pixel."""
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                row = top + i - padding
                column = left + (width - 1 - j if is_flipped else j) - padding
                if 0 <= row < height and 0 <= column < width:
                    result[c, i, j] = image[c, row, column]
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_crops_equal_those_of_a_loop_over_pixels(dtype):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (30, 2, 5, 7), generator=random).to(dtype)
    top, left = torch.randint(0, 7, (2, 30), generator=random)
    is_flipped = torch.arange(30) % 2 == 0
    found = crop_and_flip(images, top, left, is_flipped, padding=3)
    assert found.dtype == dtype
    for i, image in enumerate(images.numpy()):
        expected = cropped(image, int(top[i]), int(left[i]), bool(is_flipped[i]), 3)
        np.testing.assert_array_equal(found[i].numpy(), expected)


def test_the_middle_crop_is_the_image():
    images, middle = torch.rand(4, 3, 6, 6), torch.full((4,), 2)
    none, every = torch.zeros(4).bool(), torch.ones(4).bool()
    assert torch.equal(crop_and_flip(images, middle, middle, none, 2), images)
    assert torch.equal(crop_and_flip(images, middle, middle, every, 2), images.flip(3))


def test_choices_are_uniform():
    counts = choices(torch.linspace(0, 1, 9001)[:-1], 9).bincount()
    assert len(counts) == 9
    assert counts.sub(1000).abs().max() <= 1
    assert choices(torch.tensor([1 - 2**-24]), 10**7).item() == 10**7 - 1


def test_shifts_and_spans_equal_those_of_a_loop():
    waves = torch.randn(20, 11, dtype=torch.float64)
    by = torch.arange(20) - 10
    found = shift(waves, by)
    for i, wave in enumerate(waves.tolist()):
        s = int(by[i])
        assert found[i].tolist() == [wave[t - s] if 0 <= t - s < 11 else 0 for t in range(11)]
    x = torch.randn(3, 2, 4, 5)
    start, width = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    expected = x.clone()
    for i in range(3):
        expected[i, :, start[i] : start[i] + width[i]] = 0
    assert torch.equal(mask_span(x, start, width, 2), expected)
