"""LightningModules and optimizers of other packages, each checked in a federation.

Each case is a small model with random weights, built as the package's users do, and passed to
``lightning_fl.testing.check_federation``; see docs/check.md for its columns. A cell says ``equal``,
with the largest difference if there is one within rounding; ``different``; or why the library
refuses such a run. Dropout and random augmentations are off.

    pip install -e .[foreign]
    python benchmarks/foreign.py --markdown out.md
    python benchmarks/foreign.py --optimizers --markdown out.md
"""

from __future__ import annotations

import argparse
import os
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
from torch.utils.data import Dataset, TensorDataset

from checks import cells, write_table
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.check import COLUMNS
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.testing import Run, check_federation

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

# --- optimizers -----------------------------------------------------------------------------------

#: Optimizers of other packages: how they are made from parameter groups.
OPTIMIZERS = {
    "timm.optim": ("Lamb", "Adan", "Lars", "Lion", "AdaBelief", "Adafactor", "MADGRAD", "Muon"),
    "pytorch_optimizer": ("Ranger", "AdaBelief", "Adan", "Lamb", "DAdaptAdam", "ScheduleFreeAdamW"),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree"),
    "prodigyopt": ("Prodigy",),
}


#: Names of packages whose modules have another name.
DISTRIBUTIONS = {"timm.optim": "timm", "pytorch_optimizer": "pytorch-optimizer"}


class Optimized(Case):
    """A small network with a scalar, vectors, a matrix and filters, and a given optimizer."""

    def __init__(self, package: str, name: str) -> None:
        self.kind: Any = getattr(import_module(package), name)
        self.packages = [DISTRIBUTIONS.get(package, package)]

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


# --- the check ------------------------------------------------------------------------------------


def checked(case: Case) -> list[str]:
    """Return what the check says of a case: a cell per column."""

    def make() -> Run:
        module, samples = case.module(), case.samples()
        data = FederatedDataModule(
            samples,
            num_clients=CLIENTS,
            batch_size=BATCH,
            val_size=0,
            collate_fn=case.collate,
            seed=0,
        )
        return Run(module, data, FederatedLoop(seed=0), trainer={"accelerator": "cpu"})

    return cells(lambda: check_federation(make, rounds=ROUNDS, clients=CLIENTS))


def rows(names: Sequence[str], optimizers: bool) -> Iterator[Sequence[str]]:
    """Yield the head of a table, and a row for each case."""
    yield "case", "package", *COLUMNS
    cases = {name: CASES[name] for name in names}
    if optimizers:
        cases = {
            f"{package}.{name}": partial(Optimized, package, name)
            for package, kinds in OPTIMIZERS.items()
            for name in kinds
        }
    for name, make in cases.items():
        case = make()
        packages = ", ".join(f"{package} {release(package)}" for package in case.packages)
        yield name, packages, *checked(case)


def release(package: str) -> str:
    """Return a package's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main(words: Sequence[str] | None = None) -> None:
    """Check the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case")
    parser.add_argument("--markdown", type=Path, help="file of the table")
    parser.add_argument("--optimizers", action="store_true", help="check optimizers instead")
    options = parser.parse_args(words)
    write_table(rows(options.case or list(CASES), options.optimizers), options.markdown)


if __name__ == "__main__":
    main()
