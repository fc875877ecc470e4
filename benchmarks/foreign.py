"""LightningModules and optimizers of other packages, tried in a federation.

Each case is a small model with random weights, built as the package's users do. Four things are
checked:

- ``one client``: a federation of one client gives the parameters of plain Lightning training on
  the same batches. The server computes ``w + (w_k - w)`` in place of ``w_k``, which is rounded. So
  plain training is tried again with its weights put through this sum after each round;
- ``vectorized``: several clients at once give the parameters of sequential training, in float64;
- ``resume``: a run that is saved and resumed gives the parameters of an undisturbed one;
- ``two processes``: two processes give the parameters of one.

A cell says ``equal`` for the same bits, or the largest difference of a parameter. ``last bit`` is
the scale for such a difference: that of two sequential runs whose initial parameters differ in the
last bit. Dropout and random augmentations are off: plain training draws other numbers.

    pip install -e .[foreign]
    python benchmarks/foreign.py --markdown out.md
    python benchmarks/foreign.py --optimizers --markdown out.md
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fl import VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule

SAMPLES, BATCH, CLIENTS, ROUNDS = 24, 4, 3, 2


class Case:
    """A module and its samples; by default a network that classifies, and its optimizer."""

    packages: Sequence[str] = ()

    def module(self) -> L.LightningModule:
        """Return a new module with random weights, in float64."""
        raise NotImplementedError

    def samples(self) -> Dataset[Any]:
        """Return the training samples."""
        return TensorDataset(images(), torch.arange(SAMPLES) % 3)

    collate: Callable[..., Any] | None = None


def images(size: int = 32) -> Tensor:
    """Return random images."""
    random = torch.Generator().manual_seed(0)
    return torch.rand(SAMPLES, 3, size, size, generator=random, dtype=torch.float64)


class Classifier(L.LightningModule):
    """A network, and an optimizer that is given."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return self.optimizer(self.parameters())


# --- transformers and peft ------------------------------------------------------------------------


class Warming(Classifier):
    """BERT with its own loss and a linear warm-up over the whole run."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return BERT's own loss."""
        return self.net(input_ids=batch[0], labels=batch[1]).loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a warm-up of two steps and a decay to zero."""
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Bert(Case):
    """BERT with a linear warm-up by ``trainer.estimated_stepping_batches``."""

    packages = ("transformers",)

    def net(self) -> nn.Module:
        """Return a tiny BERT."""
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"vocab_size": 50, "intermediate_size": 32, "max_position_embeddings": 16}
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**sizes, **rates, num_labels=3, attn_implementation="eager")
        return BertForSequenceClassification(config)

    def module(self) -> L.LightningModule:
        """Return it with its schedule."""
        return Warming(self.net(), torch.optim.AdamW).double()

    def samples(self) -> Dataset[Any]:
        """Return random sentences."""
        random = torch.Generator().manual_seed(0)
        words = torch.randint(1, 50, (SAMPLES, 8), generator=random)
        return TensorDataset(words, torch.arange(SAMPLES) % 3)


class LoRA(Bert):
    """LoRA adapters on the same BERT, whose own weights are frozen."""

    packages = ("peft", "transformers")

    def net(self) -> nn.Module:
        """Return BERT with adapters."""
        from peft import LoraConfig, get_peft_model

        places = ["query", "value"]
        config = LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.0, target_modules=places)
        return get_peft_model(super().net(), config)


# --- timm and segmentation_models_pytorch ---------------------------------------------------------


class TimmLamb(Case):
    """A ResNet of timm with its Lamb, which counts steps in parameter groups."""

    packages = ("timm",)

    def module(self) -> L.LightningModule:
        """Return timm's smallest ResNet."""
        import timm
        from timm.optim import Lamb

        net = timm.create_model("test_resnet", pretrained=False, num_classes=3)
        return Classifier(net, lambda params: Lamb(params, lr=1e-2)).double()


class TimmAdan(TimmLamb):
    """The same with its Adan in a Lookahead, which has an optimizer inside."""

    def module(self) -> L.LightningModule:
        """Return the same network."""
        from timm.optim import Adan, Lookahead

        module = super().module()
        module.optimizer = lambda params: Lookahead(Adan(params, lr=1e-3), k=3)
        return module


class Unet(Case):
    """A U-Net of segmentation_models_pytorch."""

    packages = ("segmentation-models-pytorch",)

    def module(self) -> L.LightningModule:
        """Return it with the smallest encoder at hand."""
        import segmentation_models_pytorch as smp

        net = smp.Unet(
            "tu-test_resnet",
            encoder_weights=None,
            classes=3,
            encoder_depth=4,
            decoder_channels=(32, 16, 8, 8),
        )
        return Classifier(net, lambda params: torch.optim.SGD(params, lr=1e-2)).double()

    def samples(self) -> Dataset[Any]:
        """Return images with a class for each pixel."""
        x = images()
        return TensorDataset(x, (3 * x[:, 0]).long())


# --- torchgeo and lightly -------------------------------------------------------------------------


class Images(Dataset[Any]):
    """Images as torchgeo has them: in a dictionary."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": images()[index]}


class BYOL(Case):
    """torchgeo's BYOL, whose target network is an average that is written in the step."""

    packages = ("torchgeo",)

    def module(self) -> L.LightningModule:
        """Return a small one without random augmentations."""
        import timm
        from torchgeo.trainers import BYOLTask, byol

        class Task(BYOLTask):
            def configure_models(self) -> None:
                net = timm.create_model("test_resnet", pretrained=False)
                sizes = {"in_channels": 3, "image_size": (32, 32), "projection_size": 16}
                self.model = byol.BYOL(net, **sizes, hidden_size=32, augment_fn=nn.Identity())

        return Task(in_channels=3, lr=1e-3, patience=0).double()

    def samples(self) -> Dataset[Any]:
        """Return images in dictionaries."""
        return Images()


class MoCo(BYOL):
    """torchgeo's MoCo, with a memory bank in non-persistent buffers."""

    def module(self) -> L.LightningModule:
        """Return a small one without random augmentations."""
        from torchgeo.trainers import MoCoTask

        same = {"augmentation1": nn.Identity(), "augmentation2": nn.Identity()}
        sizes = {"hidden_dim": 32, "output_dim": 16, "memory_bank_size": 16}
        rates = {"lr": 1e-2, "schedule": [1]}
        net = MoCoTask("test_resnet", in_channels=3, version=2, **rates, **sizes, **same)
        return net.double()


class LightlyMoCo(Case):
    """MoCo from lightly's parts."""

    packages = ("lightly",)

    def module(self) -> L.LightningModule:
        """Return it as in lightly's examples."""
        import copy

        from lightly.loss import NTXentLoss
        from lightly.models.modules import MoCoProjectionHead
        from lightly.models.utils import deactivate_requires_grad, update_momentum

        class Task(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
                self.backbone = nn.Sequential(
                    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *flat
                )
                self.head = MoCoProjectionHead(8, 8, 4)
                self.slow_backbone, self.slow_head = map(copy.deepcopy, (self.backbone, self.head))
                deactivate_requires_grad(self.slow_backbone)
                deactivate_requires_grad(self.slow_head)
                self.criterion = NTXentLoss(memory_bank_size=(16, 4))

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                update_momentum(self.backbone, self.slow_backbone, m=0.99)
                update_momentum(self.head, self.slow_head, m=0.99)
                key = self.slow_head(self.slow_backbone(batch[0].flip(-1))).detach()
                return self.criterion(self.head(self.backbone(batch[0])), key)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        return Task().double()


# --- pytorch-forecasting and torch-geometric ------------------------------------------------------


class NBeats(Case):
    """N-BEATS of pytorch-forecasting, whose batches are nested."""

    packages = ("pytorch-forecasting",)

    def samples(self) -> Any:
        """Return series with their own collate function."""
        import numpy as np
        import pandas as pd
        from pytorch_forecasting import TimeSeriesDataSet

        series, length = 4, SAMPLES // 4 + 11
        values = np.random.default_rng(0).normal(size=series * length).cumsum()
        frame = pd.DataFrame(
            {
                "series": np.repeat(np.arange(series), length).astype(str),
                "time": np.tile(np.arange(length), series),
                "value": values,
            }
        )
        known = {"time_idx": "time", "target": "value", "group_ids": ["series"]}
        lengths = {"max_encoder_length": 8, "max_prediction_length": 4}
        only = {"time_varying_unknown_reals": ["value"], "target_normalizer": None}
        data = TimeSeriesDataSet(frame, **known, **lengths, **only)
        self.collate = data._collate_fn
        return data

    def module(self) -> L.LightningModule:
        """Return it for these series."""
        from pytorch_forecasting import NBeats as Network

        sizes = {"num_blocks": [1, 1], "num_block_layers": [2, 2], "widths": [8, 8]}
        fixed = {"expansion_coefficient_lengths": [2, 3], "sharing": [True, True]}
        options = {"learning_rate": 1e-2, "log_interval": -1, "optimizer": "adam", "dropout": 0.0}
        return Network.from_dataset(self.samples(), **sizes, **fixed, **options)


class GCN(Case):
    """A graph network of torch-geometric, whose batches are graphs of different size."""

    packages = ("torch-geometric",)

    def samples(self) -> Any:
        """Return random graphs."""
        from torch_geometric.data import Batch, Data

        random, graphs = torch.Generator().manual_seed(0), []
        for i in range(SAMPLES):
            nodes = 4 + i % 3
            edges = torch.randint(0, nodes, (2, 2 * nodes), generator=random)
            x = torch.rand(nodes, 5, generator=random, dtype=torch.float64)
            graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([i % 3])))
        self.collate = Batch.from_data_list

        class Graphs(Dataset[Any]):
            def __len__(self) -> int:
                return len(graphs)

            def __getitem__(self, index: int) -> Any:
                return graphs[index]

        return Graphs()

    def module(self) -> L.LightningModule:
        """Return two convolutions of graphs."""
        from torch_geometric.nn import GCNConv, global_mean_pool

        class Net(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = GCNConv(5, 8), GCNConv(8, 3)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                x = self.last(self.first(batch.x, batch.edge_index).relu(), batch.edge_index)
                return F.cross_entropy(global_mean_pool(x, batch.batch), batch.y)

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=1e-2)

        return Net().double()


class MPNN(Case):
    """A message passing network of chemprop, whose schedule counts the batches of an epoch."""

    packages = ("chemprop",)

    def samples(self) -> Any:
        """Return chains of carbon with a random target."""
        from chemprop.data import MoleculeDatapoint, MoleculeDataset

        chains = ("C" * (1 + i // 2) + "ON"[i % 2] for i in range(SAMPLES))
        points = [MoleculeDatapoint.from_smi(smi, [float(i % 5)]) for i, smi in enumerate(chains)]
        return MoleculeDataset(points)

    def collate(self, samples: Any) -> Any:
        """Return a batch in float64."""
        from chemprop.data import collate_batch

        graph, *others = collate_batch(samples)
        graph.V, graph.E = graph.V.double(), graph.E.double()
        return graph, *(None if other is None else other.double() for other in others)

    def module(self) -> L.LightningModule:
        """Return a network for one target."""
        from chemprop import models
        from chemprop import nn as parts

        passing = parts.BondMessagePassing(d_h=16, depth=2)
        head = parts.RegressionFFN(input_dim=16, hidden_dim=8)
        net: L.LightningModule = models.MPNN(
            passing, parts.MeanAggregation(), head, warmup_epochs=1
        )
        return net.double()


class Diffusion(Case):
    """A diffusion model of diffusers; noise and times are a part of the samples."""

    packages = ("diffusers",)

    def samples(self) -> Dataset[Any]:
        """Return images, noise and times."""
        random = torch.Generator().manual_seed(0)
        shape = (2, SAMPLES, 1, 8, 8)
        clean, noise = torch.randn(shape, generator=random, dtype=torch.float64)
        return TensorDataset(clean, noise, torch.randint(0, 50, (SAMPLES,), generator=random))

    def module(self) -> L.LightningModule:
        """Return a small U-Net with attention."""
        from diffusers import DDPMScheduler, UNet2DModel

        sizes = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1}
        sizes |= {"in_channels": 1, "out_channels": 1, "norm_num_groups": 4}
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }

        class Net(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = UNet2DModel(**sizes, **blocks, attention_head_dim=4)
                self.times = DDPMScheduler(50)

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                clean, noise, time = batch
                noisy = self.times.add_noise(clean, noise, time)
                return F.mse_loss(self.net(noisy, time).sample, noise)

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        return Net().double()


class Detector(Case):
    """A Faster R-CNN of torchvision, whose batches are lists of images and of boxes."""

    packages = ("torchvision",)

    def samples(self) -> Any:
        """Return images with a box each."""
        boxes = torch.tensor([2.0, 2.0, 14.0, 16.0], dtype=torch.float64).repeat(SAMPLES, 1, 1)
        boxes[:, 0, 2] += torch.arange(SAMPLES) % 8
        labels = 1 + torch.arange(SAMPLES).unsqueeze(1) % 2
        return [
            (image, {"boxes": box, "labels": label})
            for image, box, label in zip(images(), boxes, labels, strict=True)
        ]

    def collate(self, samples: Any) -> Any:
        """Return lists of images and targets."""
        return tuple(map(list, zip(*samples, strict=True)))

    def module(self) -> L.LightningModule:
        """Return a detector that draws the same boxes in each step."""
        from torchvision.models.detection import FasterRCNN
        from torchvision.models.detection.rpn import AnchorGenerator
        from torchvision.ops import MultiScaleRoIAlign

        class Net(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                layers = nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1)
                backbone = nn.Sequential(*layers)
                backbone.out_channels = 8
                self.net = FasterRCNN(
                    backbone,
                    num_classes=3,
                    min_size=32,
                    max_size=32,
                    rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
                    box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
                )

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                torch.manual_seed(0)
                return sum(self.net(*batch).values())

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1e-2)

        return Net().double()


CASES: dict[str, type[Case]] = {
    "transformers BERT, linear warm-up": Bert,
    "peft LoRA on BERT": LoRA,
    "timm ResNet, Lamb": TimmLamb,
    "timm ResNet, Lookahead(Adan)": TimmAdan,
    "torchgeo BYOL": BYOL,
    "torchgeo MoCo": MoCo,
    "lightly MoCo": LightlyMoCo,
    "pytorch-forecasting N-BEATS": NBeats,
    "torch-geometric GCN": GCN,
    "segmentation-models-pytorch U-Net": Unet,
    "chemprop MPNN, Noam schedule": MPNN,
    "diffusers U-Net": Diffusion,
    "torchvision Faster R-CNN": Detector,
}

# --- runs -----------------------------------------------------------------------------------------


class Recorder(L.Callback):
    """Keeps the batches that a federation trains on, by round."""

    def __init__(self) -> None:
        self.rounds: list[list[Any]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a round."""
        self.rounds.append([])

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch."""
        self.rounds[-1].append(batch)


class Saver(L.Callback):
    """Saves after the first round."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save at the start of the second round."""
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class ServerSum(L.Callback):
    """Puts the weights through the sum of a server with one client, after each round."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.before: list[Tensor] = []

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return what a federation averages."""
        everything = [*module.parameters(), *module.buffers()]
        return [tensor.detach() for tensor in everything if tensor.is_floating_point()]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the first global model."""
        self.before = [tensor.clone() for tensor in self.tensors(pl_module)]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add the weighted mean of one update to the global model."""
        for tensor, before in zip(self.tensors(pl_module), self.before, strict=True):
            update = (tensor - before).double() * self.num_samples / self.num_samples
            tensor.copy_(torch.where(tensor == before, before, before + update))
            before.copy_(tensor)


class Replay(IterableDataset[Any]):
    """Yields the batches of one round after the other."""

    def __init__(self, rounds: Sequence[Sequence[Any]]) -> None:
        self.rounds = iter(rounds)
        self.length = len(rounds[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.rounds))

    def __len__(self) -> int:
        return self.length


def trainer(rounds: int, **options: Any) -> L.Trainer:
    """Return a quiet Trainer on the CPU."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    return L.Trainer(max_epochs=rounds, accelerator="cpu", **{"devices": 1, **quiet, **options})


def federate(
    case: Case,
    clients: int = CLIENTS,
    rounds: int = ROUNDS,
    wrap: Callable[[Any], Any] = lambda module: module,
    callbacks: Sequence[L.Callback] = (),
    resume: Path | None = None,
    keep: bool = False,
    nudge: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Train a federation; return the module's state."""
    torch.manual_seed(0)
    module = case.module()
    if nudge:
        with torch.no_grad():
            for param in module.parameters():
                away = torch.full_like(param, math.inf).copysign(torch.randn_like(param))
                param.copy_(torch.where(param == 0, 0, torch.nextafter(param, away)))
    samples = case.samples()
    data = FederatedDataModule(
        samples, num_clients=clients, batch_size=BATCH, val_size=0, collate_fn=case.collate, seed=0
    )
    state = "keep" if keep else "reset"
    loop = FederatedLoop(seed=0, buffers="average", optimizer_state=state, csv_name=None)
    made = trainer(rounds, callbacks=[loop, *callbacks], **options)
    made.fit(wrap(module), datamodule=data, ckpt_path=resume, weights_only=False)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def compared(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Return ``equal`` or the largest difference."""
    if all(torch.equal(one[name], other[name]) for name in one):
        return "equal"
    differences = (
        (one[name].double() - other[name].double()).abs().max() for name in one if one[name].numel()
    )
    return f"{max(map(float, differences)):.0e}"


def one_client(case: Case) -> str:
    """Compare a federation of one client with plain Lightning training."""
    recorder = Recorder()
    federated = federate(case, clients=1, callbacks=[recorder], keep=True)

    def plain(*callbacks: L.Callback) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = case.module()
        batches = DataLoader(Replay(recorder.rounds), batch_size=None)
        trainer(ROUNDS, callbacks=list(callbacks)).fit(module, batches)
        return module.state_dict()

    if (how := compared(federated, plain())) == "equal":
        return how
    rounded = compared(federated, plain(ServerSum(len(case.samples()))))
    return f"{how}; {rounded} with the server's sum"


def last_bit(case: Case) -> str:
    """Compare two sequential runs whose initial parameters differ in the last bit."""
    return compared(federate(case), federate(case, nudge=True))


def vectorized(case: Case) -> str:
    """Compare vectorized with sequential training."""
    expected = federate(case)

    wrap = partial(VectorizedClients, group_size=CLIENTS, compile=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        how = compared(expected, federate(case, wrap=wrap))
    messages = [str(w.message) for w in seen if "one client after another" in str(w.message)]
    if not messages:
        return how
    return f"{how}; trains sequentially: {messages[0].partition(': ')[2]}"


def resumed(case: Case) -> str:
    """Compare a run that goes on from its first round with the undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.ckpt"
        expected = federate(case, callbacks=[Saver(path)])
        return compared(expected, federate(case, resume=path))


def two_processes(case: Case, name: str) -> str:
    """Compare two processes with one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two.pt"
        line = [sys.executable, __file__, "--case", name, "--processes", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line, capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        if done.returncode or not path.exists():
            raise RuntimeError(done.stderr.strip().splitlines()[-1][:200])
        return compared(federate(case), torch.load(path, weights_only=True))


def in_processes(case: Case, path: Path) -> None:
    """Train in two processes; the first writes the result."""
    state = federate(case, devices=2, strategy="client_parallel")
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        torch.save(state, path)


def cell(check: Callable[..., str], *case: Any) -> str:
    """Return what a check says of a case, or what it is refused with."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            return check(*case)
    except Exception as error:  # of many kinds: each is a result
        words = " ".join(str(error).split()).replace("|", "/")
        kind = "refused" if type(error).__name__ == "FederationError" else type(error).__name__
        return f"{kind}: {words.split('. To continue, train the module')[0][:200]}"


#: Optimizers of other packages: how they are made from parameter groups.
OPTIMIZERS = {
    "timm.optim": ("Lamb", "Adan", "Lars", "Lion", "AdaBelief", "Adafactor", "MADGRAD", "Muon"),
    "pytorch_optimizer": ("Ranger", "AdaBelief", "Adan", "Lamb", "DAdaptAdam", "ScheduleFreeAdamW"),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree"),
    "prodigyopt": ("Prodigy",),
}


class Optimized(Case):
    """A small network with a scalar, vectors, a matrix and filters, and a given optimizer."""

    def __init__(self, package: str, name: str) -> None:
        self.kind: Any = getattr(import_module(package), name)

    def module(self) -> L.LightningModule:
        """Return it, with two parameter groups."""

        def made(params: Any) -> Any:
            params = list(params)
            groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}]
            optimizer = self.kind(groups, lr=1e-2)
            if callable(train := getattr(optimizer, "train", None)):  # of schedule-free ones
                train()
            return optimizer

        layers = nn.Conv2d(3, 4, 3), nn.PReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        return Classifier(nn.Sequential(*layers, nn.Linear(16, 3)), made).double()

    def samples(self) -> Dataset[Any]:
        """Return small images."""
        return TensorDataset(images(8), torch.arange(SAMPLES) % 3)


def fresh(case: Case) -> str:
    """Compare a round with the mean of models that are trained from the start, one by one."""
    recorder = Recorder()
    federated = federate(case, rounds=1, callbacks=[recorder])
    (batches,) = recorder.rounds
    steps = len(batches) // CLIENTS
    models = []
    for client in range(CLIENTS):
        torch.manual_seed(0)
        module = case.module()
        own = Replay([batches[client * steps : (client + 1) * steps]])
        trainer(1).fit(module, DataLoader(own, batch_size=None))
        models.append(module.state_dict())
    mean = {name: torch.stack([m[name] for m in models]).mean(0) for name in federated}
    return compared(federated, mean)


def try_optimizers() -> Iterator[Sequence[str]]:
    """Yield the head of a table, and a row for each optimizer."""
    yield "optimizer", "fresh", "one client", "vectorized", "resume", "last bit"
    for package, names in OPTIMIZERS.items():
        for name in names:
            case = Optimized(package, name)
            checks = (fresh, one_client, vectorized, resumed, last_bit)
            yield f"{package}.{name}", *(cell(check, case) for check in checks)


def try_cases(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the head of a table, and a row for each case."""
    yield "case", "package", "one client", "vectorized", "resume", "two processes", "last bit"
    for name in names:
        case = CASES[name]()
        packages = ", ".join(f"{package} {release(package)}" for package in case.packages)
        cells = [cell(check, case) for check in (one_client, vectorized, resumed)]
        yield name, packages, *cells, cell(two_processes, case, name), cell(last_bit, case)


def release(package: str) -> str:
    """Return a package's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main() -> None:
    """Run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case")
    parser.add_argument("--markdown", type=Path, help="file of the table")
    parser.add_argument("--optimizers", action="store_true", help="try optimizers instead")
    parser.add_argument("--processes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = options.case or list(CASES)
    if options.processes is not None:
        in_processes(CASES[names[0]](), options.processes)
        return
    lines: list[str] = []
    for cells in try_optimizers() if options.optimizers else try_cases(names):
        new = [f"| {' | '.join(cells)} |"]
        if not lines:
            new.append("|" + "---|" * len(cells))
        print(*new, sep="\n", flush=True)
        lines += new
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
