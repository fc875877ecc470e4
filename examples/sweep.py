"""A sweep: Optuna searches the learning rate, the local steps and the server's momentum.

Each trial is a federation of ten clients with two digits each. It reports its validation accuracy
after every round, and is pruned when it falls behind the trials before it. The test samples are
used once, for the best trial.

    python examples/sweep.py

Prints (seed 1, 50 s on one core; needs `pip install optuna`):

    val_acc 0.924 in the best of 12 trials, then test_acc 0.930
"""

import lightning as L
import optuna

from lightning_fl import ClientModule, FederatedLoop
from lightning_fl.aggregators import FedAvgM
from lightning_fl.datamodules import Digits
from lightning_fl.models import MLPClassifier
from lightning_fl.partition import ByLabel
from lightning_fl.policies import Schedule


class Prune(L.Callback):
    def __init__(self, trial):
        self.trial = trial

    def on_train_epoch_end(self, trainer, pl_module):
        self.trial.report(float(trainer.callback_metrics["val_acc"]), trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def federate(lr, num_steps, momentum, *callbacks, seed=1):
    L.seed_everything(seed)
    data = Digits(partition=ByLabel(classes_per_client=2), num_clients=10)
    loop = FederatedLoop(FedAvgM(momentum=momentum), Schedule(lr=lr, num_steps=num_steps))
    trainer = L.Trainer(max_epochs=10, accelerator="cpu", callbacks=[loop, *callbacks])
    trainer.fit(ClientModule(MLPClassifier([64, 50, 10])), datamodule=data)
    return trainer


def objective(trial):
    lr = trial.suggest_float("lr", 0.01, 1.0, log=True)
    num_steps = trial.suggest_int("num_steps", 1, 20)
    momentum = trial.suggest_float("momentum", 0.0, 0.9)
    trainer = federate(lr, num_steps, momentum, Prune(trial))
    return trainer.callback_metrics["val_acc"].item()


if __name__ == "__main__":
    sampler, pruner = optuna.samplers.TPESampler(seed=1), optuna.pruners.MedianPruner(4, 2)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=12)
    trainer = federate(**study.best_params, seed=2)
    test = trainer.test(trainer.lightning_module, datamodule=trainer.datamodule)[0]["test_acc"]
    print(f"val_acc {study.best_value:.3f} in the best of 12 trials, then test_acc {test:.3f}")
