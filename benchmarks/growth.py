"""What a federation costs as it grows: clients, state of each client, and rounds.

``speed.py growth`` trains federations of 100 to 100,000 clients of 60 samples, 100 in each round,
each run in a process of its own. A sample has eight features, so that 100,000 clients fit into
memory. With ``state`` a client keeps the momentum of its optimizer between rounds.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from contestants import LR, SEED, Clock, Federation, Workload, fresh, peak, trainer
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.models import MLPClassifier
from lightning_fl.policies import Schedule

GROWN = Workload(100, 100, 5, 60, 60, (8,), lambda: MLPClassifier([8, 32, 10]), 0)
COLUMNS = {
    "clients": "clients",
    "state": "state of clients",
    "setup": "set-up, s",
    "seconds": "s per round",
    "MiB": "MiB without samples",
    "more": "MiB more in the last half",
    "saving": "checkpoint, s",
    "size": "checkpoint, MiB",
}


class Watch(Clock):
    """Notes the time and the memory at the end of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = list[float]()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the end of a round."""
        super().on_train_epoch_end(trainer, pl_module)
        self.memory.append(peak("VmRSS"))


def grown(clients: int, rounds: int, state: bool) -> dict[str, Any]:
    """Train rounds of at most 100 clients among so many, in this process.

    Returns:
        By name of a column, its value.
    """
    problem = Federation(GROWN._replace(clients=clients, cohort=min(clients, GROWN.cohort)))
    sgd = partial(torch.optim.SGD, lr=LR, momentum=0.9 if state else 0)
    module = VectorizedClients(ClientModule(problem.net, (), sgd), compile=False)
    watch = Watch()
    loop = FederatedLoop(
        clients_per_round=problem.clients,
        policy=Schedule(num_steps=GROWN.steps),
        optimizer_state="keep" if state else "reset",
        seed=SEED,
    )
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(rounds, folder, loop, watch)
        made.fit(module, datamodule=problem.federated())
        start = time.perf_counter()
        made.save_checkpoint(file := Path(folder, "end.ckpt"))
        saving, size = time.perf_counter() - start, file.stat().st_size / 2**20
    run = watch.run(problem.net)
    half = watch.memory[len(watch.memory) // 2 :]
    return {
        "clients": clients,
        "state": state,
        "setup": run.setup,
        "seconds": median(run.seconds[1:]),
        "MiB": peak() - sum(t.nbytes for t in problem.data.tensors) / 2**20,
        "more": half[-1] - half[0],
        "saving": saving,
        "size": size,
    }


def measure(
    numbers: list[int], states: list[bool], rounds: int, repeats: int
) -> list[dict[str, Any]]:
    """Measure federations in turns, each time in a process of its own; return medians."""
    script = str(Path(__file__).with_name("speed.py"))
    found: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for state in states:
            for n in numbers:
                one = fresh(script, "growth", "--grown", str(n), str(rounds), str(int(state)))
                found.setdefault((n, state), []).append(json.loads(one))
    return [
        {what: median(one[what] for one in each) for what in COLUMNS} for each in found.values()
    ]


def rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table of what :func:`measure` returns."""
    return [
        [
            f"{one['clients']:,}",
            "yes" if one["state"] else "no",
            f"{one['setup']:.2f}",
            f"{one['seconds']:.4f}",
            f"{one['MiB']:.0f}",
            f"{one['more']:.1f}",
            f"{one['saving']:.2f}",
            f"{one['size']:.2f}",
        ]
        for one in found
    ]
