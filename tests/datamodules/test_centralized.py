"""Training without a loop: the centralized baseline."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fl.callbacks import FederatedLoop
from numbered import Watch, federated, held, joined, numbered


def test_without_a_loop_it_is_centralised_training_shuffled_anew_each_epoch(trainer):
    module, again = Watch(), Watch()
    for each in (module, again):
        data = federated(batch_size=16, val_size=6, eval_batch_size=4)
        trainer(False, 3, log_every_n_steps=1).fit(each, datamodule=data)
    assert module.train_batches == again.train_batches
    epochs = module.epochs()
    assert [[len(b) for b in epoch] for epoch in epochs] == [[16, 16, 16, 6]] * 3
    everyone = sorted(torch.cat(data.parts).tolist())
    assert all(sorted(joined(epoch)) == everyone for epoch in epochs)
    assert len({tuple(joined(epoch)) for epoch in epochs}) == 3
    assert [len(b) for b in module.val_batches[:2]] == [4, 2]
    assert sorted(joined(module.val_batches[:2])) == held(data)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 16, "drop_last": True}, [16, 16, 16]),
        ({"batch_size": 16, "replacement": True}, [16, 16, 16, 16]),
        ({"batch_size": None}, [60]),
        ({"batch_size": 99, "drop_last": True}, [60]),
    ],
)
def test_options_of_batches_hold_for_centralised_training(trainer, options, sizes):
    module = Watch()
    data = federated(val=numbered(3), **options)
    trainer(False, 2, log_every_n_steps=1).fit(module, datamodule=data)
    for epoch in module.epochs():
        assert [len(b) for b in epoch] == sizes
        assert options.get("replacement") or len(set(joined(epoch))) == sum(sizes)


def test_after_a_federation_it_is_centralised_again(trainer):
    data = federated(val=numbered(3), batch_size=16)
    trainer(FederatedLoop(), 1).fit(Watch(), datamodule=data)
    assert data.plan is None
    module = Watch()
    trainer(False, 1, log_every_n_steps=1).fit(module, datamodule=data)
    assert [len(b) for b in module.epochs()[0]] == [16, 16, 16, 12]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(trainer, tmp_path, num_workers):
    def batches(epochs, callbacks=(), ckpt_path=None):
        module = Watch()
        data = federated(val=numbered(3), batch_size=20, num_workers=num_workers)
        options = {"enable_checkpointing": bool(callbacks), "log_every_n_steps": 1}
        made = trainer(False, epochs, callbacks, **options)
        made.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module.train_batches

    saves = {
        "epoch": ({"save_on_train_epoch_end": True}, [3, 6]),
        "validation": ({"save_on_train_epoch_end": False}, [3, 6]),
        "batch": ({"every_n_train_steps": 1}, [1, 2, 3, 4, 5, 6]),
    }
    if num_workers:  # the same path, with processes to start
        saves = {"epoch": saves["epoch"]}
    whole = batches(3)
    for name, (options, steps) in saves.items():
        keep = ModelCheckpoint(tmp_path / name, "{step}", save_top_k=-1, **options)
        assert batches(2, [keep]) == whole[:6]
        paths = {step: tmp_path / name / f"step={step}.ckpt" for step in steps}
        assert set((tmp_path / name).glob("*.ckpt")) == set(paths.values())
        for step, path in paths.items():
            assert batches(3, ckpt_path=path) == whole[step:], path
