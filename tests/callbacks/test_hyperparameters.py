"""What loggers get from Python: hyperparameters once, and one row per round."""

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from keeping import keep, resume
from lightning_fl import ClientModule, FederatedLoop
from lightning_fl.aggregators import TrimmedMean
from lightning_fl.policies import Schedule


class Note(DummyLogger):
    """A logger that remembers what it got; like MLflow, it refuses to change a value."""

    def __init__(self, values=None):
        super().__init__()
        self.rows, self.values = [], dict(values or {})

    def log_metrics(self, metrics, step=None):
        self.rows.append({**metrics, "step": step})

    def log_hyperparams(self, params):
        if changed := [
            name for name in params if self.values.get(name, params[name]) != params[name]
        ]:
            raise ValueError(f"{changed} cannot be changed")
        self.values |= params


class Talkative(ClientModule):
    def training_step(self, batch, batch_idx):
        self.log("in_step", 1.0, on_step=True, on_epoch=False)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def run(fit, data):
    def train(logger, rounds=3, kind=ClientModule, **options):
        policy = Schedule(lr=0.25, num_steps=2)
        loop = FederatedLoop(TrimmedMean(), policy, seed=5, clients_per_round=3)
        options = {"callbacks": [], "val_check_interval": None, **options}
        module = kind(nn.Linear(6, 3)).double()
        fit(module, loop, data(), rounds=rounds, logger=logger, **options)
        return loop

    return train


@pytest.mark.parametrize("group_size", [None, 2])
def test_a_round_is_one_row_with_its_number_and_metrics(run, group_size):
    logger = Note()
    loop = run(logger, group_size=group_size)
    assert [row["round"] for row in logger.rows] == [1, 2, 3]
    for row, of_table in zip(logger.rows, loop.rows, strict=True):
        assert row["federation/num_steps"] == of_table["num_steps"]
        for name in ("val_loss", "val_acc", "train_loss"):
            assert row[name] == pytest.approx(of_table[name])
    assert len({row["step"] for row in logger.rows}) == 3


def test_metrics_of_steps_are_logged_as_ever(run):
    logger = Note()
    run(logger, kind=Talkative, log_every_n_steps=2)
    assert [row["round"] for row in logger.rows if "round" in row] == [1, 2, 3]
    steps = [row["step"] for row in logger.rows if "in_step" in row]
    assert steps == sorted(steps)
    assert len(steps) == 9  # of 18


def test_hyperparameters_are_flat_and_readable(run):
    loggers = [Note(), Note()]
    run(loggers, rounds=1)
    for logger in loggers:
        expected = {
            "seed": 5,
            "rounds": 1,
            "num_clients": 4,
            "clients_per_round": 3,
            "lr": 0.25,
            "partition": "IID",
            "aggregator": "TrimmedMean",
            "aggregator/fraction": 0.2,
            "policy": "Schedule",
            "policy/num_steps": 2,
            "sampler": "UniformSampler",
            "network": "Linear",
        }
        assert {name: logger.values[name] for name in expected} == expected
        assert all(isinstance(v, int | float | str | None) for v in logger.values.values())


def test_a_logger_that_goes_on_keeps_its_values_and_the_run_resumes(run, tmp_path):
    first = Note()
    run(first, rounds=1, **keep(tmp_path))
    second, other = Note(first.values), CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="Note keeps its previous hyperparameters: .*'rounds'"):
        run([second, other], rounds=2, **resume(tmp_path))
    assert second.values == first.values
    assert [row["round"] for row in second.rows] == [2]
    assert other.experiment.hparams["rounds"] == 2


class Saved(ClientModule):
    def __init__(self, net, lr=0.5):
        super().__init__(net)
        self.save_hyperparameters(ignore="net")


def test_hyperparameters_of_the_module_keep_their_names_and_values(run):
    logger = Note()
    run(logger, kind=Saved)
    assert logger.values["lr"] == 0.5
    assert logger.values["federation/lr"] == 0.25
