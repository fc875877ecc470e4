"""The private names of Lightning and PyTorch that the package uses.

Hence the upper bounds in pyproject.toml: before a bound is raised, this test has to pass with the
new release. A new use of a private name belongs in one of the lists.
"""

import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_fl import ClientModule

ROOT = Path(__file__).parent.parent
#: Modules or classes, and the names that are imported from them or looked up on them.
IMPORTED = {
    "lightning.pytorch.overrides.distributed": ["_sync_module_states"],
    "lightning.pytorch.strategies.launchers": ["_SubprocessScriptLauncher"],
    "lightning.pytorch.trainer.connectors.logger_connector.result": [
        "_Metadata",
        "_ResultMetric",
        "_Sync",
    ],
    "torch._C._functorch": ["is_functorch_wrapped_tensor"],
    "torch.nn.modules.batchnorm": ["_BatchNorm", "_NormBase"],
    "torch.nn.modules.dropout": ["_DropoutNd"],
    "torch.nn.utils.parametrizations": ["_SpectralNorm"],
    "torch.utils._python_dispatch": ["TorchDispatchMode"],
    "torch.utils._pytree": ["tree_flatten", "tree_leaves", "tree_map"],
}
#: Attributes of a Trainer whose fit has not begun.
OF_A_TRAINER = [
    "_logger_connector.log_metrics",
    "_logger_connector.on_batch_end",
    "_logger_connector.on_batch_start",
    "_logger_connector.update_train_step_metrics",
    "fit_loop._combined_loader",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._broadcast_sigterm_tensor",
    "fit_loop.epoch_loop._num_ready_batches_reached",
    "fit_loop.epoch_loop._results.batch",
    "fit_loop.epoch_loop._results.batch_size",
    "fit_loop.epoch_loop._results.reset",
    "fit_loop.epoch_loop.advance",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad",
    "fit_loop.epoch_loop.automatic_optimization.run",
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "fit_loop.epoch_loop.on_advance_end",
    "fit_loop.epoch_loop.update_lr_schedulers",
    "fit_loop.epoch_loop.val_loop._on_evaluation_model_train",
    "fit_loop.epoch_loop.val_loop._results.reset",
    "fit_loop.setup_data",
    "precision_plugin._clip_gradients",
    "received_sigterm",
]
#: Attributes of a LightningModule.
OF_A_MODULE = ["_current_fx_name", "_trainer"]
#: Attributes of a tensor's storage.
OF_A_STORAGE = ["_cdata"]


@pytest.mark.parametrize(("home", "names"), IMPORTED.items())
def test_private_names_can_be_imported(home, names):
    module = import_module(home)
    assert [name for name in names if not hasattr(module, name)] == []


def test_private_attributes_exist():
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    for path in OF_A_TRAINER:
        attrgetter(path)(trainer)
    module = ClientModule(net=None)
    for path in OF_A_MODULE:
        attrgetter(path)(module)
    for path in OF_A_STORAGE:
        attrgetter(path)(torch.ones(1).untyped_storage())


def test_private_imports_of_the_package_are_listed():
    """Every import of a private name or module of Lightning or PyTorch is in the list."""
    pattern = re.compile(r"^\s*from ((?:lightning|torch)\.[\w.]+) import (.+)$", re.MULTILINE)
    found = set()
    for folder in ("lightning_fl", "callbacks", "datamodules"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\(\s*([^()]*?),?\s*\)", r"\1", path.read_text())
            for home, names in pattern.findall(text):
                for name in re.findall(r"\w+", names.partition(" as ")[0].partition("#")[0]):
                    if name.startswith("_") or "._" in home:
                        found.add((home, name))
    assert found
    assert found <= {(home, name) for home, names in IMPORTED.items() for name in names}
