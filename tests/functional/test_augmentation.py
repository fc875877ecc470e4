"""Augmentation; crops, shifts and masks are tested in ``tests/datamodules``."""

import torch

from lightning_fl.functional.augmentation import choices


def test_choices_are_uniform():
    counts = choices(torch.linspace(0, 1, 9001)[:-1], 9).bincount()
    assert len(counts) == 9
    assert counts.sub(1000).abs().max() <= 1
    assert choices(torch.tensor([1 - 2**-24]), 10**7).item() == 10**7 - 1
