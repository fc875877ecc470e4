"""The decision before the first round: whether clients are vectorized, and steps compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils._pytree import tree_map

from lightning_fl.contracts.data import FederatedData
from lightning_fl.federation.measures import on_device
from lightning_fl.federation.self_check import MAX_BYTES, VectorizedCheck
from lightning_fl.functional.randomness import seeded_rng
from lightning_fl.runners import VectorizedClients
from lightning_fl.runners.groups import client_bytes, has_convolutions
from lightning_fl.runners.samples import check_batch

#: Maximum number of samples in a batch with which vectorized steps are checked.
MOST_SAMPLES = 8
#: Number of steps of a run from which on compiling pays: of any network, and of one with
#: convolutions, whose steps take longer.
LONG_RUN, LONG_RUN_OF_CONVOLUTIONS = 10_000, 1_000


def largest_batches(
    trainer: Trainer, data: FederatedData, num_clients: int
) -> tuple[list[int], list[Any]]:
    """Return the clients with the two largest batches, and a few samples of these batches.

    Most clients have batches of this shape.

    Args:
        trainer: The Trainer.
        data: The data module.
        num_clients: Number of clients in the federation.
    """
    sizes = data.batch_sizes(torch.arange(num_clients), 0, 1)[0]
    clients = sizes.argsort(descending=True, stable=True)[:2].tolist()
    random, batches = torch.Generator().manual_seed(0), []
    for client in clients:
        try:
            with seeded_rng(0, trainer.lightning_module.device):
                batch = next(iter(data.steps_of(client, random)))
                check_batch(batch := on_device(trainer, batch, is_training=True))
        except Exception as error:
            error.add_note(f"It is a batch of client {client}")
            raise
        batches.append(batch)
    if data.has_samples_in_front and int(sizes.max()) > MOST_SAMPLES:
        batches = [tree_map(lambda t: t[:MOST_SAMPLES], batch) for batch in batches]
    return clients, batches


def decide(
    module: VectorizedClients, batches: Sequence[Any], is_checked: bool, steps: Callable[[], float]
) -> None:
    """Decide whether the clients of a module are vectorized, and their steps compiled.

    Args:
        module: The module. If its clients are not vectorized, it has a reason afterwards.
        batches: Batches of two clients.
        is_checked: Whether to compare vectorized steps with the module's own.
        steps: Function that returns the number of steps in the run.
    """
    user, runner = module.module, module.runner
    assert runner is not None
    convolves = has_convolutions(user)
    is_alone = module.group_size == "auto" and module.device.type == "cpu" and convolves
    compiles = bool(module.compiled)
    if module.compiled == "auto":
        is_fast = not is_alone or type(runner.optimizer) is torch.optim.SGD
        compiles = is_fast and steps() >= (LONG_RUN_OF_CONVOLUTIONS if convolves else LONG_RUN)
    if not runner.phases.is_aligned:
        out_of_step = "clients change from phase to phase in different local steps"
        module.train_one_by_one(out_of_step, is_choice=True)
        return
    if is_alone and not compiles:
        faster = "on a CPU, this is faster for networks with convolutions"
        module.train_one_by_one(faster, is_choice=True)
        return
    why = runner.why_hooked()
    if is_checked and client_bytes(user, module.constants) > MAX_BYTES:
        rank_zero_info(f"{type(user).__name__} is too large to check vectorized steps")
    elif is_checked and why is None:
        why = VectorizedCheck(runner.tensors, batches).why_not()
    if why is not None:
        module.train_one_by_one(why)
    elif compiles:
        runner.compile()
