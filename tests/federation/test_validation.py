from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torchmetrics import MeanMetric

from lightning_fl import ClientParallelStrategy
from lightning_fl.federation.processes import Processes
from lightning_fl.federation.validation import Validation
from lightning_fl.policies import DiscreteGaussianReinforce, Schedule


@pytest.mark.parametrize(
    ("world_size", "callbacks", "policy", "is_repeated"),
    [
        (2, [EarlyStopping("val_loss")], Schedule(), True),
        (2, [], DiscreteGaussianReinforce({"lr": [0.1, 0.2]}), True),
        (2, [], Schedule(), False),
        (1, [EarlyStopping("val_loss")], Schedule(), False),
    ],
)
def test_each_process_validates_on_all_samples_where_its_result_acts_on_the_run(
    world_size, callbacks, policy, is_repeated
):
    trainer = SimpleNamespace(
        world_size=world_size,
        global_rank=0,
        strategy=ClientParallelStrategy(),
        callbacks=callbacks,
        lr_scheduler_configs=[],
    )
    data = SimpleNamespace(shares_validation=True)
    options = SimpleNamespace(policy=policy)
    validation = Validation(trainer, data, options, Processes(trainer))
    assert (data.shares_validation, trainer.strategy.repeats_validation) == (
        not is_repeated,
        is_repeated,
    )
    metric = MeanMetric()
    waits = metric.distributed_available_fn
    validation.begin(nn.ModuleList([metric]))
    assert (metric.distributed_available_fn is waits) == (not is_repeated)
    validation.end()
    assert metric.distributed_available_fn is waits
    validation.close()
    assert data.shares_validation
