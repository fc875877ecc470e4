"""A package that imports pytorch_lightning gets lightning."""

import sys
from importlib import import_module
from types import ModuleType

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fl import FederatedDataModule, FederatedLoop
from lightning_fl.types import FederationError

PACKAGE = """
import torch
import pytorch_lightning as pl
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_info

class Theirs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.fixture(autouse=True)
def no_alias(monkeypatch):
    """Nothing has imported the alias, and nothing has it after the test."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    names = ("pytorch_lightning", "lightning_fabric", "theirs")
    alias = [name for name in sys.modules if name.partition(".")[0] in names]
    for name in ("lightning_fl.compat", *alias):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name == "lightning_fl.compat" or name.partition(".")[0] in names:
            del sys.modules[name]


def test_a_module_of_pytorch_lightning_is_one_of_lightning(tmp_path, monkeypatch, trainer):
    (tmp_path / "theirs.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("lightning_fl.compat")
    theirs = import_module("theirs")
    assert theirs.Callback is L.pytorch.callbacks.Callback
    assert theirs.seed_everything is L.seed_everything
    assert L.pytorch.__spec__.name == "lightning.pytorch"
    data = FederatedDataModule(TensorDataset(torch.rand(20, 4)), num_clients=2, val_size=0)
    trainer(loop := FederatedLoop(), 1).fit(theirs.Theirs(), datamodule=data)
    assert len(loop.rows) == 1


def test_the_alias_comes_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.raises(FederationError, match="has been imported before"):
        import_module("lightning_fl.compat")
