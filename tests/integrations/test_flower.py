"""Flower trains as the loop does: with its simulation engine, and as separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fl.callbacks import FederatedLoop
from tutorial import trainer
from two_classes import samples

pytest.importorskip("flwr", reason='needs pip install ".[flower]"')

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent

import flower_apps  # noqa: E402  # imports flwr


def by_the_loop(name, folder, rounds=5):
    module = flower_apps.module(name)
    loop = FederatedLoop(
        flower_apps.RULES[name](), flower_apps.policy(), clients_per_round=3, seed=3
    )
    trainer(folder, loop, rounds=rounds).fit(module, datamodule=samples())
    return module.state_dict()


def largest_difference(first, second):
    assert first.keys() == second.keys()
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def environment(**more):
    """Return the environment of a process that imports the tests' helpers and reports nothing."""
    paths = [str(HERE), str(HERE.parent), *sys.path]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)} | more


@pytest.mark.parametrize("name", flower_apps.RULES)
def test_the_simulation_engine_gives_the_weights_of_the_loop(tmp_path, name):
    pytest.importorskip("ray", reason='needs pip install "flwr[simulation]"')
    command = [sys.executable, str(HERE / "flower_apps.py"), name, str(tmp_path / "model.pt")]
    subprocess.run(command, env=environment(), cwd=tmp_path, check=True, timeout=300)
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert largest_difference(found, by_the_loop(name, tmp_path)) == 0
