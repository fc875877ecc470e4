"""Other kinds of data from the command line."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quick_cli
from lightning_fl.report.run import read_run

N = 40


def numbers(seed=0):
    x = np.random.default_rng(seed).normal(size=(N, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


class Mine(LightningDataModule):
    """A user's data module with an option."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        samples = TensorDataset(*map(torch.from_numpy, numbers()))
        return DataLoader(samples, batch_size=self.size, shuffle=True, drop_last=True)


class Hospital(Dataset):
    """A user's data set with an option."""

    def __init__(self, seed: int):
        self.x, self.y = numbers(seed)
        self.targets = self.y

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def saved(folder):
    import hf_rows  # needs an extra

    hf_rows.numbers([f"s{i % 5}" for i in range(N)]).save_to_disk(folder / "saved")
    return {"dataset": str(folder / "saved"), "input": "x", "partition_by": "site"}


def owned(name, **init_args):
    return {"class_path": f"{__name__}.{name}", "init_args": init_args}


ADAPTERS = {
    "FromDataModule": lambda folder: {"datamodule": owned("Mine", size=3), "num_clients": 5},
    "FromClients": lambda folder: {
        "clients": {f"site {i}": owned("Hospital", seed=i) for i in range(5)},
        "batch_size": 4,
    },
    "FromHuggingFace": saved,
    "FederatedDataModule": lambda folder: {"train": owned("Hospital", seed=1), "num_clients": 5},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_kind_of_data_works_from_yaml(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    config = {
        "model": {"class_path": "tutorial.Net"},
        "data": {"class_path": name, "init_args": ADAPTERS[name](tmp_path)},
        "trainer": {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    quick_cli.call("fit", "--config", "run.yaml")
    rows = Path("runs/version_0/participation.csv").read_text().splitlines()
    assert len(rows) == 6
    run = read_run(Path("runs/version_0"))
    if name not in ("FromDataModule", "FederatedDataModule"):
        names = [row.split(",")[1] for row in rows]
        sites = [f"s{i}" if name == "FromHuggingFace" else f"site {i}" for i in range(5)]
        assert names == ["name", *sites]
        assert run.names == dict(enumerate(sites))
