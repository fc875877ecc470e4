"""Manifests from strangers: data, never code; refused in clear words.

Checkpoints are tested in ``tests/federation/test_checkpoints.py``.
"""

import pytest
import torch

from lightning_fl import files
from lightning_fl.partition import IID
from lightning_fl.partition.manifest import Manifest
from lightning_fl.types import FederationError


@pytest.fixture
def written(tmp_path):
    path, labels = tmp_path / "split.json", torch.arange(6) % 2
    Manifest.of(IID(), [torch.arange(3), torch.arange(3, 6)], labels, seed=0).write(path)
    return path


def test_large_files_are_not_read(written, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", written.stat().st_size)
    Manifest.read(written)
    written.write_text(written.read_text() + " ")
    for path in (written, "/dev/zero"):
        with pytest.raises(FederationError, match=r"more than the \d+ bytes that .*MOST_BYTES"):
            Manifest.read(path)
