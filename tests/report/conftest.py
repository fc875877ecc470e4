"""Folders as runs leave them, written by hand."""

import json
from dataclasses import asdict

import pytest
import torch
import yaml

from histories import by_round
from lightning_fl.partition.manifest import FORMAT, Manifest, checksum

CONFIG = {
    "seed_everything": 1,
    "trainer": {"max_epochs": 4, "default_root_dir": "runs", "callbacks": None},
    "model": {"class_path": "lightning_fl.ClientModule", "init_args": {"terms": []}},
    "data": {"class_path": "lightning_fl.datamodules.Digits", "init_args": {"batch_size": 32}},
    "federation": {"client_fraction": 1.0, "aggregator": None},
}


ENVIRONMENT = {
    "state": "finished",
    "rounds": 4,
    "seed": 1,
    "batch_size": 32,
    "network": "MLPClassifier",
    "parameters": 7510,
    "aggregator": "FedAvg(weighting='samples')",
    "policy": "Schedule(lr=0.1)",
    "versions": {"torch": "2.14.1"},
}

BY_ROUND = by_round("1,11", "2,11", "3,15", "4,11", legend="1=arrived 5=non_finite")


def partition_json(sizes, counts, rule="ByLabel", **parameters):
    """A manifest of clients with these sizes and numbers of samples by class."""
    parts = torch.arange(sum(sizes)).split(sizes)
    clients = [part.tolist() for part in parts]
    manifest = Manifest(rule, parameters, 1, sum(sizes), clients, counts, checksum(parts))
    return json.dumps(asdict(manifest) | {"format": FORMAT})


@pytest.fixture
def manifest():
    return partition_json


@pytest.fixture
def folder(tmp_path):
    """Write a run's folder; returns it."""

    def make(
        name="digits/version_0", accuracies=(0.25, 0.5, 0.75, 0.5), environment=ENVIRONMENT, **files
    ):
        path = tmp_path / name
        path.mkdir(parents=True)
        lines = [
            "round,clients,dropped,dropped_clients,non_finite,num_steps,lr,bytes_up,bytes_down,val_acc"
        ]
        lines += [
            f"{i},2,{int(i == 3)},{'1' if i == 3 else ''},{int(i == 3)},20,0.1,"
            f"{1000000 if i == 3 else 2000000},2000000,{accuracy}"
            for i, accuracy in enumerate(accuracies, 1)
        ]
        contents = {
            "rounds.csv": "\n".join(lines) + "\n",
            "config.yaml": yaml.safe_dump(CONFIG),
            "environment.json": json.dumps(environment),
            "partition.json": partition_json([3, 2], [{0: 3}, {1: 2}], classes_per_client=1),
            "participation.csv": "client,train_samples,rounds,dropped,train_acc\n"
            "0,3,4,0,1.0\n1,2,4,1,0.5\n",
            "client_losses.csv.gz": BY_ROUND,
        } | {key.replace("__", "."): value for key, value in files.items()}
        for file, content in contents.items():
            if isinstance(content, bytes):
                (path / file).write_bytes(content)
            elif content is not None:
                (path / file).write_text(content)
        return path

    return make


@pytest.fixture
def seeds(folder):
    """Write runs of the seeds 0, 1, ... with their final accuracies; returns their folders."""

    def make(name, *finals, **files):
        files = {"client_losses__csv__gz": by_round("1,11", "2,11")} | files
        return [
            folder(f"{name}/version_{i}", (0.0, last), {"seed": i, "state": "finished"}, **files)
            for i, last in enumerate(finals)
        ]

    return make


@pytest.fixture
def config():
    """A config's text, with some keys (``a.b.c``) set to other values."""

    def make(**changes):
        found = json.loads(json.dumps(CONFIG))
        for name, value in changes.items():
            *path, last = name.split("__")
            at = found
            for part in path:
                at = at[part]
            at[last] = value
        return yaml.safe_dump(found)

    return make
