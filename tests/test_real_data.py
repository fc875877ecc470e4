"""The main job on real data, made short; the configs' own results stand in their second line."""

from functools import partial

import lightning as L
import pytest

from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import CIFAR10, MNIST, FashionMNIST
from lightning_fl.models import CifarCNN, FashionCNN, MLPClassifier
from lightning_fl.partition import IID, ByLabel
from lightning_fl.policies import Schedule
from tutorial import trainer

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("data", "net", "partition", "steps", "rounds", "accuracy"),
    [
        (MNIST, lambda: MLPClassifier([784, 100, 100, 10]), IID(), 10, 6, 0.82),
        slow(MNIST, lambda: MLPClassifier([784, 100, 100, 10]), ByLabel(), 2, 20, 0.72),
        slow(FashionMNIST, lambda: FashionCNN(width=4), IID(), 10, 5, 0.5),
        slow(CIFAR10, lambda: CifarCNN(width=8, hidden=64), IID(), 10, 4, 0.17),
    ],
    ids=["mnist-iid", "mnist-noniid", "fashion-iid", "cifar10-iid"],
)
def test_a_federation_learns_real_data(
    data_root, tmp_path, data, net, partition, steps, rounds, accuracy
):
    L.seed_everything(1, verbose=False)
    loop = FederatedLoop(policy=Schedule(lr=0.1, num_steps=steps))
    made = trainer(tmp_path, loop, rounds=rounds, check_val_every_n_epoch=rounds)
    split = data(data_root, partition=partition, num_clients=10, batch_size=64, val_size=2000)
    module = ClientModule(net())
    made.fit(module, datamodule=split)
    assert loop.rows[-1]["val_acc"] > accuracy
    assert made.test(module, datamodule=split, verbose=False)[0]["test_acc"] > accuracy
