"""Whether a change of the code changes results: six configurations, before and after, bit for bit.

    git worktree add ../before BEFORE
    python benchmarks/compare.py ../before . --rounds 3

Each checkout trains each configuration in a process of its own. Losses and accuracy of every
round are compared, and the parameters and buffers at the end. The configurations differ in what
outlives a round and in what the server asks of clients. Only options of the Trainer are given, so
checkouts may differ in every other name. All but two configurations need MNIST or Fashion-MNIST in
the folder that LIGHTNING_FL_DATA names.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

#: Files that make a configuration, by what is special about it.
CONFIGURATIONS = {
    "plain": ("digits",),
    "network is replaced": ("pfnm_digits",),
    "vectorized": ("fedavg_mnist_noniid",),
    "matching, REINFORCE": tuple(f"mostafa2019/{n}" for n in ("mnist", "noniid", "fa_rm_ah")),
    "losses of clients": ("fedcontrol_fashion",),
    "policy for each client": ("personalized_policy_mnist",),
}
CURVES = ("train_loss", "val_loss", "val_acc")


def train(checkout: Path, files: Sequence[str], folder: Path, rounds: int) -> dict[str, str]:
    """Train a configuration with the code of a checkout.

    Returns:
        The curves as they are written, and the hash of the final parameters and buffers.

    Raises:
        SystemExit: If the run fails, with its last words.
    """
    line = [sys.executable, "-m", "lightning_fl", "fit"]
    for name in files:
        line += ["--config", str(checkout / "configs" / f"{name}.yaml")]
    line += [f"--trainer.max_epochs={rounds}", f"--trainer.default_root_dir={folder}"]
    line += ["--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_epoch=1"]
    # In the checkout: `-m` looks for modules in the working directory before anywhere else.
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        line, capture_output=True, text=True, env=environment, cwd=checkout, check=False
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(files)} failed:\n{done.stderr[-2000:]}")
    (run,) = folder.glob("version_*")
    rows = list(csv.DictReader((run / "rounds.csv").read_text().splitlines()))
    curves = {name: " ".join(row.get(name) or "-" for row in rows) for name in CURVES}
    state = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    digest = hashlib.sha256()
    for tensor in state.values():  # in their order: a checkout may have renamed them
        digest.update(tensor.contiguous().numpy().tobytes())
    return {**curves, "parameters": digest.hexdigest()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two checkouts; return how many configurations differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs=2, type=Path, help="folders with the code")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each run")
    options = parser.parse_args(arguments)
    different = 0
    for name, files in CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as home:
            before, after = (
                train(checkout.resolve(), files, Path(home, str(i)), options.rounds)
                for i, checkout in enumerate(options.checkouts)
            )
        others = [what for what in before if before[what] != after[what]]
        different += bool(others)
        print(f"{name}: {'differs in ' + ', '.join(others) if others else 'the same'}")
        for what in others:
            print(f"    {what}\n        {before[what]}\n        {after[what]}")
    return different


if __name__ == "__main__":
    sys.exit(main())
