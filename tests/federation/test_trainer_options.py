"""Each option of the Trainer works, or is refused as the generated page says."""

import inspect

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_fl.federation.checks import REQUIRED
from lightning_fl.types import FederationError

#: A value of each option that is not the default.
VALUES = {
    "accelerator": "cpu",
    "strategy": "single_device",
    "devices": 1,
    "num_nodes": 1,
    "precision": "64-true",
    "logger": True,
    "callbacks": [],
    "fast_dev_run": True,
    "max_epochs": 2,
    "min_epochs": 1,
    "max_steps": 3,
    "min_steps": 1,
    "max_time": "00:01:00:00",
    "limit_train_batches": 0.5,
    "limit_val_batches": 1,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
    "overfit_batches": 1,
    "val_check_interval": 0.5,
    "check_val_every_n_epoch": 2,
    "num_sanity_val_steps": 1,
    "log_every_n_steps": 1,
    "enable_checkpointing": True,
    "enable_progress_bar": True,
    "enable_model_summary": True,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 1.0,
    "gradient_clip_algorithm": "value",
    "deterministic": True,
    "benchmark": False,
    "inference_mode": False,
    "use_distributed_sampler": False,
    "profiler": "simple",
    "detect_anomaly": True,
    "barebones": True,
    "plugins": [],
    "sync_batchnorm": True,
    "reload_dataloaders_every_n_epochs": 2,
    "default_root_dir": None,
    "enable_autolog_hparams": False,
    "model_registry": None,
}


@pytest.fixture(autouse=True)
def _settings_of_torch():
    """Take back what ``deterministic``, ``benchmark`` and ``detect_anomaly`` have set."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]
    torch.autograd.set_detect_anomaly(False)


def test_each_option_is_tried():
    assert list(inspect.signature(Trainer.__init__).parameters)[1:] == list(VALUES)
    assert REQUIRED.keys() <= VALUES.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for name in VALUES if name not in ("callbacks", "max_epochs")]
)
def test_an_option_works_or_is_refused_by_name(trainer, foreign, data, tmp_path, name):
    options = {name: VALUES[name]}
    if name == "default_root_dir":
        options[name] = str(tmp_path / "elsewhere")
    if name == "gradient_clip_algorithm":
        options["gradient_clip_val"] = 0.5
    if name == "logger":
        options[name] = CSVLogger(tmp_path)
    module = foreign()
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    made = trainer(rounds=2, **options)
    if name in REQUIRED:
        with pytest.raises(FederationError, match=rf"Trainer\({name}=.*\) is not supported"):
            made.fit(module, datamodule=data())
        return
    made.fit(module, datamodule=data())
    after = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    assert (after - before).abs().max() > 1e-4
    assert after.isfinite().all()
