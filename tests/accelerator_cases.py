"""The table of federations on an accelerator, compared with the CPU: a GPU, or a pretended one.

``test_accelerator.py`` runs them in a process of their own, as the pretended device stays in it. By
hand: ``pytest tests/accelerator_cases.py``.
"""

import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

import federations
import pretend
from federations import ROWS, SGD, frozen, module, normalized, row, samples
from frozen import frozen_once
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.objectives import EntropyRegularizer, FedEM, Proximal, RepresentationMatching
from lightning_fl.optimizers import PFedMe
from lightning_fl.policies import HyperparameterPolicy
from tutorial import trainer

ON_A_GPU = torch.cuda.is_available()
NAME = "cuda" if ON_A_GPU else pretend.NAME


@pytest.fixture(scope="session", autouse=True)
def device():
    return torch.device(NAME, 0) if ON_A_GPU else pretend.install()


# --- how federations are trained ------------------------------------------------------------------


def fit(
    place,
    folder,
    make,
    group_size=None,
    rounds=2,
    watchers=(),
    ckpt_path=None,
    wrap=None,
    has_dropout=not ON_A_GPU,
):
    """Train in float64 on the CPU or on the accelerator; return the Trainer, the module, the loop.

    Args:
        place: Name of the device.
        folder: Where runs leave files.
        make: Function that returns a federation.
        group_size: Options of VectorizedClients, if clients are vectorized.
        rounds: Number of rounds.
        watchers: Further callbacks.
        ckpt_path: Checkpoint to resume.
        wrap: Another way to vectorize the module.
        has_dropout: Whether dropout is left on. A GPU draws other random numbers.
    """
    torch.manual_seed(0)
    run = make()
    user = run.module
    if not has_dropout:
        for layer in user.modules():
            if isinstance(layer, _DropoutNd):
                layer.p = 0.0
    where = {"accelerator": "cpu"}
    if place == "cuda":
        where = {"accelerator": "gpu", "devices": 1}
    elif place == pretend.NAME:
        strategy = SingleDeviceStrategy(device=torch.device(place, 0))
        where = {"accelerator": pretend.PretendAccelerator(), "strategy": strategy}
    made = trainer(
        *(folder / place, *run.callbacks, *watchers, Places(), run.loop),
        rounds=rounds,
        **{"num_sanity_val_steps": 0, "precision": "64-true"} | {**run.trainer} | where,
    )
    if wrap is None and group_size is not None:
        wrap = partial(VectorizedClients, **{"compile": False} | group_size)
    watched = nullcontext() if ON_A_GPU or place == pretend.NAME else pretend.unwatched()
    # What a row warns of is tested elsewhere.
    with warnings.catch_warnings(), watched, frozen_once():
        warnings.simplefilter("ignore")
        # Batches of the pretended device may lie there before they are stacked.
        warnings.filterwarnings(
            "error", ".* after another, not at once: (?!.*its batches contain a PretendTensor)"
        )
        if ON_A_GPU:  # that warns of waits
            warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        wrapped = user if wrap is None else wrap(user)
        made.fit(wrapped, datamodule=run.data, ckpt_path=ckpt_path)
    return made, user, run.loop


def outcome(user, loop):
    """Return what a fit has left, on the CPU."""
    left = {
        "module": user.state_dict(),
        "rows": loop.rows,
        "rule": loop.aggregator.state_dict(),
        "policy": loop.policy.state_dict(),
        "clients": [loop.store.get(client) for client in range(federations.CLIENTS)],
    }
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), left)


def compare(left, right):
    """Compare numbers, and all else that fits have left."""
    leaves = [torch.utils._pytree.tree_flatten(each) for each in (left, right)]
    assert leaves[0][1] == leaves[1][1]
    for one, other in zip(leaves[0][0], leaves[1][0], strict=True):
        if isinstance(one, torch.Tensor | float):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert one == other


class Places(L.Callback):
    """Every tensor of the module and of the rule is on the module's device, after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        loop = next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))
        check_places(trainer.strategy.root_device, pl_module, loop)


def check_places(device, user, loop):
    for name, tensor in [*user.named_parameters(), *user.named_buffers()]:
        assert tensor.device == device, name
    for rule in loop.aggregator.modules():
        tensors = {**rule._buffers, **getattr(rule, "_defaults", {})}
        tensors |= {name: getattr(rule, name) for name in getattr(rule, "_defaults", {})}
        for name, value in tensors.items():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    assert tensor.device == device, f"{type(rule).__name__}.{name}"


VECTORIZED = {"group_size": 3}


def check(folder, make, group_size=None, rounds=2, **options):
    """Train on both devices, and compare all that is left."""
    fits = [fit(place, folder, make, group_size, rounds, **options) for place in ("cpu", NAME)]
    left, right = (outcome(user, loop) for _, user, loop in fits)
    compare(right, left)


# --- the table ------------------------------------------------------------------------------------

#: Rows whose code for a device differs; what the others do there, one of these does.
QUICK = (
    "FedAvg, Proximal, uneven steps", "Scaffold I, Quantize", "PFNM", "BatchNorm, kept",
    "FedControl, PersonalizedPolicyGradient", "ClusteredFL, RunReport", "CIFAR10, augmented",
    "DPFedAvg, PoissonSampler", "FedBuff, AsynchronousSampler",
)  # fmt: skip
#: Of these, the row that trains plain, too.
ONE_BY_ONE = ("FedAvg, Proximal, uneven steps",)
#: torch asks a device for an LSTM kernel of its own, which the pretended one lacks.
NO_KERNEL = () if ON_A_GPU else ("CharLSTM",)


def rows():
    for name in set(ROWS) - set(NO_KERNEL):
        vectorized = None if name in federations.NOT_VECTORIZED else VECTORIZED
        slow = [pytest.mark.slow] * (name not in QUICK)
        yield pytest.param(name, vectorized, id=name, marks=slow)
        if vectorized is not None:
            slow = [pytest.mark.slow] * (name not in ONE_BY_ONE)
            yield pytest.param(name, None, id=f"{name}, one by one", marks=slow)


@pytest.mark.parametrize(("name", "group_size"), list(rows()))
def test_federation_gives_the_results_of_the_cpu(tmp_path, root, name, group_size):
    rounds = 3 if name in federations.LONG else 2
    check(tmp_path, partial(ROWS[name], root), group_size, rounds)


@pytest.mark.parametrize(
    "name",
    [
        "Scaffold I, Quantize",
        pytest.param("FedAdam, MOON, DiscreteGaussianReinforce", marks=pytest.mark.slow),
        pytest.param("BatchNorm, kept", marks=pytest.mark.slow),
    ],
)
def test_run_resumes(device, tmp_path, root, name):
    def run(folder, rounds, **options):
        def make():
            made = ROWS[name](root)
            made.trainer = {**made.trainer, "enable_checkpointing": True}
            return made

        keep = [RoundCheckpoint(str(tmp_path / folder))]
        made = fit(device.type, tmp_path, make, VECTORIZED, rounds, keep, **options)
        return outcome(*made[1:])

    whole = run("whole", 2)
    run("half", 1)
    compare(run("half", 2, ckpt_path=str(tmp_path / "half" / "last.ckpt")), whole)


# --- waits for the device -------------------------------------------------------------------------

FEW, MANY = 2, 4


def waits():
    """Count the waits for the device by cause and place, in the ``with`` block."""
    return waits_for_a_gpu() if ON_A_GPU else pretend.waits()


@contextmanager
def waits_for_a_gpu():
    """Count the waits of which torch warns: it does not see those of its own kernels."""
    found, show = Counter(), warnings.showwarning

    def note(message, category, filename, lineno, *args):
        if "synchronizing CUDA" in str(message):
            found["wait", f"{'/'.join(Path(filename).parts[-2:])}:{lineno}"] += 1
        show(message, category, filename, lineno, *args)

    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    warnings.showwarning = note
    try:
        yield found
    finally:
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode(mode)


class Watched(VectorizedClients):
    """VectorizedClients that note the waits within local steps, batch by batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.within = []

    def optimizer_step(self, *args, **kwargs):
        with waits() as found:
            super().optimizer_step(*args, **kwargs)
        self.within.append(found)


class Rounds(L.Callback):
    """Note the waits of each round, from its first client to its aggregate."""

    def __init__(self):
        self.found = []

    def on_train_epoch_start(self, trainer, pl_module):
        self._now = waits()
        self.found.append(self._now.__enter__())

    def on_validation_start(self, trainer, pl_module):
        self._now.__exit__(None, None, None)


class Chatty(ClientModule):
    """Log tensors and numbers, means and others."""

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        loss = (out["loss"] if isinstance(out, dict) else out).detach()
        self.log("mean", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", 3.0, on_step=False, on_epoch=True)
        return out


class Growing(HyperparameterPolicy):
    """Few steps in two rounds, the first of which prepares much, and many in the third."""

    def most(self, round):
        return (FEW, FEW, MANY)[round]

    def sample(self, round, clients):
        return {"num_steps": torch.full_like(clients, self.most(round))}


def growing(*args, **options):
    """Return a federation whose rounds have few or many steps."""
    return row(*args, policy=Growing(), **options)


STEPS = {
    "frozen layers": lambda: growing(frozen(Proximal(0.1))),
    "alike": growing,
    "in groups": lambda: growing(module(EntropyRegularizer(0.9, 0.1)), samples(batch_size=7)),
    "kept": lambda: growing(module(optimizer=partial(SGD, momentum=0.9)), optimizer_state="keep"),
    "logging": lambda: growing(
        Chatty(nn.Linear(federations.FEATURES, federations.CLASSES), [Proximal(0.1)], SGD)
    ),
    "PFedMe": lambda: growing(module(optimizer=partial(PFedMe, inner_steps=2))),
    "RepresentationMatching": lambda: growing(module(RepresentationMatching(0.1))),
    "FedEM": lambda: growing(FedEM(nn.Linear(federations.FEATURES, federations.CLASSES), 2, SGD)),
    "BatchNorm": lambda: growing(normalized(), samples(drop_last=True)),
}
FAST = ("alike", "logging")


def count(tmp_path, wrap, make):
    """Return the waits of a round with few steps and of one with many, and those within steps."""
    rounds = Rounds()
    made, *_ = fit(NAME, tmp_path, make, rounds=3, watchers=[rounds], wrap=wrap)
    within = getattr(made.lightning_module, "within", [])
    return *rounds.found[1:], sum(within[len(within) // 3 :], start=Counter())


def watched(user):
    return Watched(user, federations.CLIENTS, compile=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in STEPS]
)
def test_vectorized_local_step_never_waits(tmp_path, name):
    few, many, within = count(tmp_path, watched, STEPS[name])
    assert not within
    assert many == few
    assert few.total() <= 12


def test_local_steps_one_by_one_add_no_wait(tmp_path):
    few, many, _ = count(tmp_path, lambda user: user, growing)
    assert few == many
