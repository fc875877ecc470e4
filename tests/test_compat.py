"""A package that imports pytorch_lightning gets lightning."""

import inspect
import sys
from importlib import import_module
from types import ModuleType

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

import tutorial
from lightning_fl import FederatedDataModule, FederatedLoop
from lightning_fl.types import FederationError

#: A package as the tutorials of its time wrote it.
PACKAGE = """
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.rank_zero import rank_zero_info
""" + inspect.getsource(tutorial).replace("lightning.pytorch", "pytorch_lightning")


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
    samples = TensorDataset(torch.rand(20, 4), torch.arange(20) % 2)
    data = FederatedDataModule(samples, num_clients=2, val_size=10)
    trainer(loop := FederatedLoop(), 1).fit(theirs.Net(), datamodule=data)
    assert len(loop.rows) == 1


def test_the_alias_comes_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.raises(FederationError, match="has been imported before"):
        import_module("lightning_fl.compat")
