"""A package that imports pytorch_lightning, in processes of their own: the alias stays."""

import subprocess
import sys

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

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
PROGRAM = """
import lightning_fl.compat
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import TensorDataset

import theirs
from lightning_fl import FederatedDataModule, FederatedLoop

assert theirs.Callback is Callback and theirs.seed_everything is L.seed_everything
assert L.pytorch.__spec__.name == "lightning.pytorch"
data = FederatedDataModule(TensorDataset(torch.rand(20, 4)), num_clients=2, val_size=0)
loop = FederatedLoop()
trainer = theirs.pl.Trainer(
    max_epochs=1, accelerator="cpu", callbacks=[loop], logger=False, enable_checkpointing=False
)
trainer.fit(theirs.Theirs(), datamodule=data)
print(len(loop.rows))
"""
TOO_LATE = """
import sys, types
sys.modules["pytorch_lightning"] = types.ModuleType("pytorch_lightning")
import lightning_fl.compat
"""


def run(code, folder):
    (folder / "theirs.py").write_text(PACKAGE)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_module_of_pytorch_lightning_is_one_of_lightning(tmp_path):
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"


def test_the_alias_comes_first(tmp_path):
    done = run(TOO_LATE, tmp_path)
    assert done.returncode == 1
    assert "pytorch_lightning has been imported before lightning_fl.compat" in done.stderr
