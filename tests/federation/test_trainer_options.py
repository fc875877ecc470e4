"""Each option of the Trainer works, or is refused as the generated page says."""

import inspect

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_fl.federation.checks import REQUIRED
from lightning_fl.types import FederationError

#: A value of each option that could matter to rounds, which is not the default.
VALUES = {
    "precision": "64-true",
    "fast_dev_run": True,
    "min_epochs": 1,
    "max_steps": 3,
    "min_steps": 1,
    "max_time": "00:01:00:00",
    "limit_train_batches": 0.5,
    "limit_val_batches": 1,
    "overfit_batches": 1,
    "val_check_interval": 0.5,
    "check_val_every_n_epoch": 2,
    "num_sanity_val_steps": 1,
    "log_every_n_steps": 1,
    "enable_checkpointing": True,
    "gradient_clip_val": 1.0,
    "gradient_clip_algorithm": "value",
    "deterministic": True,
    "inference_mode": False,
    "use_distributed_sampler": False,
    "detect_anomaly": True,
    "barebones": True,
    "sync_batchnorm": True,
    "reload_dataloaders_every_n_epochs": 2,
}


@pytest.fixture(autouse=True)
def _settings_of_torch():
    """Take back what ``deterministic``, ``benchmark`` and ``detect_anomaly`` have set."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]
    torch.autograd.set_detect_anomaly(False)


def test_each_option_that_must_have_a_value_is_tried():
    assert {*REQUIRED, *VALUES} <= inspect.signature(Trainer.__init__).parameters.keys()
    assert REQUIRED.keys() <= VALUES.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALUES)
def test_an_option_works_or_is_refused_by_name(trainer, foreign, data, name):
    options = {name: VALUES[name]}
    if name == "gradient_clip_algorithm":
        options["gradient_clip_val"] = 0.5
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
