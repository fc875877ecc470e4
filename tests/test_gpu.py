"""What only a GPU can show: CUDA graphs, mixed precision, NCCL and its own random numbers.

The same federations on a GPU and on the CPU are in ``accelerator_cases.py``.
"""

import csv
from collections import Counter
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from accelerator_cases import compare, fit, outcome
from federations import CLASSES, FEATURES, SGD, Uneven, module, normalized, row, samples
from lightning_fl import ClientModule, objectives
from lightning_fl.callbacks import RoundCheckpoint
from lightning_fl.cli import main
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.datamodules.audio import LogMel
from lightning_fl.models import CifarCNN
from lightning_fl.policies import Schedule

GROUPS = {"group_size": 3}
GRAPHS = GROUPS | {"compile": True}


class Compiled(L.Callback):
    """Note after each round whether the step of vectorized clients is compiled."""

    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.found.append(pl_module.runner.graphs is not None)


@pytest.fixture
def replays(monkeypatch):
    """Count the launches of CUDA graphs."""
    found, replay = Counter(), torch.cuda.CUDAGraph.replay

    def counted(graph):
        found["replays"] += 1
        return replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


def dropping():
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    return ClientModule(net, (), SGD)


MOMENTUM = partial(SGD, momentum=0.9)
STEPS = {
    "SGD": row,
    "momentum": lambda **o: row(module(optimizer=MOMENTUM), **o),
    "Nesterov": lambda **o: row(
        module(optimizer=partial(MOMENTUM, nesterov=True, weight_decay=0.1)), **o
    ),
    "Adam": lambda **o: row(module(optimizer=partial(torch.optim.Adam, lr=0.01)), **o),
    "Proximal": lambda **o: row(module(objectives.Proximal(0.1)), **o),
    "matching": lambda **o: row(module(objectives.RepresentationMatching(0.1)), **o),
    "entropy": lambda **o: row(module(objectives.EntropyRegularizer(0.9, 0.1)), **o),
    "BatchNorm": lambda **o: row(normalized(), samples(drop_last=True), **o),
    "a rate that decays": lambda **o: row(
        **o | {"policy": Schedule(lr=0.1, num_steps=6, decay=0.5)}
    ),
    "uneven steps and rates": lambda **o: row(**o | {"policy": Uneven()}),
    "uneven batches": lambda **o: row(None, samples(batch_size=7), **o),
    "kept momentum": lambda **o: row(
        module(optimizer=MOMENTUM), optimizer_state="keep", clients_per_round=4, **o
    ),
}


@pytest.mark.parametrize("of", STEPS.values(), ids=STEPS)
def test_cuda_graphs_change_nothing(tmp_path, replays, of):
    """A graph is launched from its third step on. Groups have three and two clients."""
    counters.clear()

    def make():
        return of(policy=Schedule(num_steps=6))

    _, user, loop = fit("cuda", tmp_path, make, GROUPS, rounds=3)
    assert not replays
    watch = Compiled()
    _, other, found = fit("cuda", tmp_path, make, GRAPHS, rounds=3, watchers=[watch])
    compare(outcome(other, found), outcome(user, loop))
    assert all(watch.found)
    assert replays["replays"] > 3
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("group", [GROUPS, GRAPHS, {"group_size": "auto"}])
def test_dropout_is_a_function_of_the_seed(tmp_path, group):
    """Also where a run resumes, and after trials, of which there are more on a slow machine."""

    def make():
        checkpoints = {"enable_checkpointing": True}
        return row(dropping(), policy=Schedule(num_steps=4), trainer=checkpoints)

    def run(folder, rounds, **more):
        keep = [RoundCheckpoint(str(tmp_path / folder))]
        options = {"watchers": keep, "has_dropout": True}
        _, user, loop = fit("cuda", tmp_path, make, group, rounds, **options, **more)
        return outcome(user, loop)

    whole = run("whole", 3)
    compare(run("again", 3), whole)
    run("half", 1)
    compare(run("half", 3, ckpt_path=str(tmp_path / "half" / "last.ckpt")), whole)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_mixed_precision(tmp_path, precision):
    """Far closer to single precision than a run moves the parameters; plain, at once, compiled."""

    def of(precision):
        return lambda: row(policy=Schedule(num_steps=6), trainer={"precision": precision})

    _, exact, _ = fit("cuda", tmp_path, of("32-true"), rounds=3)
    torch.manual_seed(0)
    start = module()
    for group in (None, GROUPS, GRAPHS):
        _, user, loop = fit("cuda", tmp_path, of(precision), group, rounds=3)
        assert loop.rows[-1]["train_loss"] < loop.rows[0]["train_loss"]
        for name, param in user.named_parameters():
            goal = exact.get_parameter(name).cpu()
            moved = (goal - start.get_parameter(name)).norm()
            error = (param.float().cpu() - goal).norm()
            assert error < 0.15 * moved, (precision, group, name, float(error / moved))


def test_convolutions_at_once_are_those_one_by_one(tmp_path):
    def data():
        x = torch.rand(80, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
        train = TensorDataset(x, torch.arange(80) % 10)
        return FederatedDataModule(train, num_clients=4, batch_size=8, val_size=0, seed=1)

    def make():
        return row(CifarCNN(width=4, hidden=8), data(), policy=Schedule(num_steps=3))

    _, user, _ = fit("cuda", tmp_path, make)
    for group in (GROUPS, GRAPHS):
        _, other, _ = fit("cuda", tmp_path, make, group)
        compare(other.state_dict(), user.state_dict())


def test_a_process_with_nccl_gets_what_a_process_alone_gets(tmp_path, monkeypatch):
    def losses(name, *options):
        place = [f"--trainer.default_root_dir={tmp_path / name}", "--trainer.max_epochs=2"]
        line = ["lightning-fl", "fit", "--config", "digits.yaml", "--trainer.accelerator=gpu"]
        quiet = ["--trainer.devices=1", "--trainer.enable_progress_bar=false", "--vectorize=5"]
        monkeypatch.setattr("sys.argv", [*line, *place, *quiet, *options])
        main()
        (table,) = (tmp_path / name).rglob("rounds.csv")
        rows = list(csv.DictReader(table.read_text().splitlines()))
        return [(row["train_loss"], row["val_loss"], row["val_acc"]) for row in rows]

    alone = losses("alone")
    assert losses("nccl", "--trainer.strategy=client_parallel") == alone
    assert torch.distributed.is_nccl_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spectrograms_are_those_of_the_cpu(dtype):
    clips = torch.randn(4, 16000, generator=torch.Generator().manual_seed(0)) * 0.1
    mel = LogMel(16000, 16000).to(dtype)
    expected = mel(clips)
    found = mel.to("cuda")(clips.to("cuda"))
    assert found.device.type == "cuda"
    close = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(found.cpu(), expected, rtol=close, atol=close)
