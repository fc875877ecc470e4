"""``lightning-fl init``."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from lightning_fl.cli import fail

MODULE = '''\
"""An ordinary LightningModule: it contains no federated code."""

import lightning as L
import torch
from torch.nn.functional import cross_entropy


class DigitClassifier(L.LightningModule):
    def __init__(self, hidden: int = 100):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x).argmax(1)

    def evaluate(self, batch, stage):
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        loss = cross_entropy(logits, y)
        self.log_dict({f"{stage}_loss": loss, f"{stage}_acc": accuracy}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
'''

CONFIG = """\
# lightning-fl fit --config config.yaml
seed_everything: 1
threads: 1
trainer:
  accelerator: cpu
  max_epochs: 30  # rounds
  default_root_dir: runs
model:
  class_path: module.DigitClassifier
data:
  class_path: Digits  # 1,797 images of scikit-learn; nothing is downloaded
  init_args:
    num_clients: 20
    batch_size: 16
    partition:
      class_path: Dirichlet  # clients differ in their classes; IID is the alternative
      init_args:
        alpha: 0.5
federation:
  clients_per_round: 10
  aggregator: FedAvg  # lightning-fl methods lists the others
  policy:
    class_path: Schedule
    init_args:
      local_epochs: 2
"""

README = """\
# {name}

A federation of 20 clients, ten of which train in each of 30 rounds. `module.py` has the module,
`config.yaml` everything else.

    lightning-fl fit --config config.yaml
    lightning-fl test --config config.yaml
    lightning-fl report runs/version_0

The test accuracy is about 0.96, after less than a minute. Each fit has a folder of its own,
`runs/version_N`. Options change the configuration:

    lightning-fl fit --config config.yaml --federation.aggregator=FedAdam
    lightning-fl fit --help

Next: `lightning-fl partition config.yaml` shows which classes the clients have, `lightning-fl
methods` and `lightning-fl configs` list what else there is.
"""


def init(words: Sequence[str]) -> None:
    """Write a minimal project: a module, a configuration and a README.

    Args:
        words: Arguments after ``lightning-fl init``.
    """
    parser = ArgumentParser(
        "lightning-fl init",
        description="Write a minimal project: a module, a configuration and a README.",
    )
    parser.add_argument(
        "name",
        nargs="?",
        default="federation",
        help="New folder of the project, default %(default)s.",
    )
    folder = Path(parser.parse_args(words).name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} exists and is not empty: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "module.py": MODULE,
        "config.yaml": CONFIG,
        "README.md": README.format(name=folder.resolve().name),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"Written to {folder / name}")
    print(f"Next: cd {shlex.quote(str(folder))} && lightning-fl fit --config config.yaml")
