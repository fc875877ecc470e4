"""What a federation refuses at the start of a fit."""

import re
from pathlib import Path

import lightning.pytorch.callbacks as theirs
import pytest
import pytorch_lightning as old
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.federation.checks import REFUSED
from lightning_fl.types import FederationError

DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "steps.md"
#: How to make those that are refused.
OPTIONS = {
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
}


def table():
    """The docs' table: what becomes of each callback of Lightning."""
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", DOCS.read_text(), re.MULTILINE)
    return dict(rows)


def test_the_docs_say_of_each_callback_of_lightning_whether_it_is_supported():
    assert set(table()) == set(theirs.__all__)
    refused = {name for name, fate in table().items() if fate == "refused"}
    kinds = {name: getattr(theirs, name) for name in theirs.__all__}
    assert refused == {n for n, kind in kinds.items() if issubclass(kind, tuple(REFUSED))}
    finetuning = {n for n, kind in kinds.items() if issubclass(kind, theirs.BaseFinetuning)}
    assert finetuning == {n for n, fate in table().items() if fate == "sequential training"}


@pytest.mark.parametrize("kind", [*REFUSED, theirs.EMAWeightAveraging], ids=lambda k: k.__name__)
def test_a_callback_that_breaks_rounds_is_refused_by_name(kind, fit, foreign):
    name = kind.__name__
    callback = kind(**OPTIONS.get(name, {}))
    with pytest.raises(FederationError, match=f"{name} .* from the Trainer's callbacks"):
        fit(foreign(), callbacks=[callback])


SUPPORTED = {
    "EarlyStopping": {"monitor": "val_loss", "patience": 9},
    "LambdaCallback": {"on_train_start": lambda *_: None},
    "LearningRateMonitor": {},
    "ModelSummary": {},
    "RichModelSummary": {},
    "Timer": {"duration": "00:01:00:00"},
}


def test_callbacks_that_only_look_change_nothing(fit, foreign, flat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for names in ((), SUPPORTED):
        module = foreign()
        callbacks = [getattr(theirs, name)(**SUPPORTED[name]) for name in names]
        logger = CSVLogger(tmp_path)
        fit(module, callbacks=callbacks, logger=logger)
        found.append(flat(module))
    assert torch.equal(*found)


# --- fine-tuning ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.parametrize("train_bn", [True, False])
def test_a_backbone_that_was_unfrozen_trains_on_after_a_resume(
    linear, trainer, data, flat, tmp_path, train_bn
):
    """A head is trained, and from round 3 on its backbone, too."""

    class Two(type(linear())):
        def __init__(self):
            super().__init__(features=4)
            self.backbone = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

        def training_step(self, batch, batch_idx):
            return (self.net(self.backbone(batch[0]))[:, 0] - batch[1]).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self):
            trained = [p for p in self.parameters() if p.requires_grad]
            return torch.optim.Adam(trained, lr=0.01)

    def run(rounds, save=None, resume=None):
        torch.manual_seed(0)
        module = Two().double()
        callback = BackboneFinetuning(2, backbone_initial_ratio_lr=0.1, train_bn=train_bn)
        made = trainer(FederatedLoop(buffers="average", seed=0), rounds, [callback])
        made.fit(module, datamodule=data(), ckpt_path=resume)
        if save is not None:
            made.save_checkpoint(save)
        return flat(module)

    undisturbed = run(5)
    for cut in (2, 4):
        path = tmp_path / f"{cut}.ckpt"
        run(cut, save=path)
        assert torch.equal(run(5, resume=str(path)), undisturbed), f"resumed after {cut} rounds"


def test_finetuning_is_refused_in_vectorized_training(foreign, fit):
    class Finetuning(theirs.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            """Freeze nothing."""

        def finetune_function(self, pl_module, epoch, optimizer):
            """Unfreeze nothing."""

    words = r"Finetuning .* instead of VectorizedClients\(module\)"
    with pytest.raises(FederationError, match=words):
        fit(VectorizedClients(foreign()), callbacks=[Finetuning()])


# --- the package pytorch_lightning ----------------------------------------------------------------


class Old(old.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_of_pytorch_lightning_is_refused_by_name(data):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = old.Trainer(max_epochs=1, accelerator="cpu", callbacks=[FederatedLoop()], **quiet)
    with pytest.raises(FederationError, match=r"pytorch_lightning.*`import lightning as L`"):
        trainer.fit(Old(), datamodule=data())


def test_a_module_or_a_callback_of_pytorch_lightning_is_refused_by_name(fit, foreign):
    words = r"{} comes from .* pytorch_lightning.*`import lightning as L`"
    with pytest.raises(FederationError, match=words.format("Old")):
        VectorizedClients(Old())
    with pytest.raises(FederationError, match=words.format("Timer")):
        fit(foreign(), callbacks=[old.callbacks.Timer()])
