import copy
import logging
import math
import re
import warnings
from contextlib import nullcontext
from itertools import count

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from by_hand import Batches, simulate
from keeping import keep, resume
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAdam, FedAvg
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.objectives import Proximal, RepresentationMatching
from lightning_fl.partition import IID, QuantitySkew
from lightning_fl.policies import DiscreteGaussianReinforce, HyperparameterPolicy, Schedule
from lightning_fl.types import FederationError
from linear import regression
from only import Only


class PerClient(HyperparameterPolicy):
    """Another amount of work and another learning rate for each client."""

    def sample(self, round, clients):
        return {"num_steps": 1 + clients % 3 + round % 2, "lr": 0.01 * (1 + clients.double())}


def full_batches(num_clients=2, n=60, batch_size=None, **options):
    """A federation of least squares."""
    validation = regression(9, options.pop("features", 3))
    train = regression(n, validation.tensors[0].shape[1])
    options = {"num_clients": num_clients, "batch_size": batch_size} | options
    return FederatedDataModule(train, validation, **options)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- FedAvg by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("partition", [IID(), QuantitySkew(alpha=1.0)])
def test_local_sgd_with_momentum_over_several_steps_is_fedavg_by_hand(
    fit, linear, fraction, partition
):
    module, data, seen = linear(), full_batches(6, batch_size=4, partition=partition), Batches()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    start = copy.deepcopy(module.net)
    loop = FederatedLoop(client_fraction=fraction, policy=PerClient(), seed=3)
    fit(module, loop, data, rounds=4, callbacks=[seen])
    for t, cohort in enumerate(seen.rounds):
        order = torch.randperm(6, generator=generator(3, RandomStream.COHORT, t)).tolist()
        assert sorted(cohort) == sorted(order[: round(fraction * 6)])
        assert all(len(cohort[client]) == 1 + client % 3 + t % 2 for client in cohort)

    def train(client, params, buffers, batches):
        weight, velocity = params["weight"], 0.0
        for x, y in batches:
            velocity = 0.9 * velocity + 2 * (x @ weight[0] - y) @ x / len(y)
            weight = weight - 0.01 * (1 + client) * velocity
        return {"weight": weight}, buffers

    expected, _ = simulate(start, seen.rounds, data.num_samples, train)
    torch.testing.assert_close(module.net.weight, expected["weight"], atol=1e-12, rtol=0)


# --- randomness -----------------------------------------------------------------------------------


def test_a_run_is_a_function_of_its_seed(fit, foreign):
    modules = [foreign(seed=0) for _ in range(3)]
    for module, seed in zip(modules, (1, 1, 2), strict=True):
        torch.manual_seed(seed + 10)
        fit(module, FederatedLoop(seed=seed, buffers="average", client_fraction=0.5))
    assert same(modules[0].state_dict(), modules[1].state_dict())
    assert not same(modules[0].state_dict(), modules[2].state_dict())


def test_the_global_generators_are_left_as_they_were(fit, foreign):
    import random

    import numpy as np

    module = foreign()
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    fit(module)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


# --- learning rates -------------------------------------------------------------------------------


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_the_policys_lr_is_a_ratio_inside_the_step_only(fit, foreign, data):
    module, inside, outside = foreign(), [], []

    def configure():
        groups = [{"params": [module.net[0].weight]}, {"params": [module.net[0].bias], "lr": 0.4}]
        optimizer = torch.optim.SGD(groups, lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    module.configure_optimizers = configure
    look = LambdaCallback(
        on_before_optimizer_step=lambda trainer, module, optimizer: inside.append(rates(optimizer)),
        on_train_batch_start=lambda trainer, *_: outside.append(rates(trainer.optimizers[0])),
    )
    policy = Schedule(lr=0.1, num_steps=1, decay=0.1)
    loop = FederatedLoop(policy=policy, buffers="average")
    fit(module, loop, data(num_clients=1), rounds=2, callbacks=[look])
    # Outside the scheduler's values, never the policy's; inside both.
    assert outside == [[0.2, 0.4], [0.1, 0.2]]
    expected = torch.tensor([[0.1, 0.2], [0.1 * 0.1 * 0.5, 0.2 * 0.1 * 0.5]])
    torch.testing.assert_close(torch.tensor(inside), expected)


def test_without_an_lr_the_decay_works_on_the_modules_own(fit, linear):
    data = full_batches()
    a, b = linear(lr=0.2), linear(lr=0.7)
    fit(a, FederatedLoop(policy=Schedule(decay=0.5)), data)
    fit(b, FederatedLoop(policy=Schedule(lr=0.2, decay=0.5)), data)
    torch.testing.assert_close(a.net.weight, b.net.weight, atol=1e-12, rtol=0)


# --- the plan -------------------------------------------------------------------------------------


def test_local_epochs_give_each_client_the_steps_of_its_data(fit, foreign, data):
    federated = data(partition=QuantitySkew(alpha=1.0), batch_size=8)
    loop = FederatedLoop(policy=Schedule(local_epochs=2), buffers="average")
    fit(foreign(batchnorm=False), loop, federated, rounds=1)
    assert loop.rows[0]["num_steps"] == sum(2 * math.ceil(n / 8) for n in federated.num_samples)


@pytest.mark.parametrize(
    ("options", "clients"),
    [
        ({}, 4),
        ({"clients_per_round": 1}, 1),
        ({"clients_per_round": 3}, 3),
        ({"client_fraction": 1.0}, 4),
        ({"client_fraction": 0.5}, 2),
        ({"client_fraction": 0.01}, 1),
    ],
)
def test_clients_of_a_round_are_a_number_or_a_fraction(fit, foreign, options, clients):
    one_step = Schedule(num_steps=1)
    loop = FederatedLoop(policy=one_step, buffers="average", **options)
    fit(foreign(), loop, rounds=2)
    assert [row["clients"] for row in loop.rows] == [clients, clients]


def test_fast_dev_run_is_one_tiny_round(fit, foreign, trainer, data):
    for batches, clients, steps in ((True, 1, 1), (3, 3, 3), (6, 4, 6)):
        loop = FederatedLoop(buffers="average", min_clients=4)
        fit(foreign(), loop, fast_dev_run=batches)
        assert (loop.rows[0]["clients"], loop.rows[0]["num_steps"]) == (clients, steps)


# --- clients that fail ----------------------------------------------------------------------------


def poisoned(clients, num_clients=4, n=40):
    """Samples by client, with a NaN in those of the given clients."""
    data = regression(n)
    rule = IID()(torch.zeros(n), num_clients, generator(0, RandomStream.PARTITION))
    for client in clients:
        data.tensors[0][rule[client][0]] = float("nan")
    return FederatedDataModule(data, regression(9), num_clients=num_clients, batch_size=None)


def test_a_client_that_is_not_finite_is_dropped_counted_and_named(fit, linear):
    module, clean = linear(), linear()
    loop = FederatedLoop(policy=Schedule(num_steps=1))
    with pytest.warns(
        UserWarning, match=r"round 1: dropped 1 of 4 client updates: client 2 \(non-fin"
    ):
        fit(module, loop, poisoned([2]), rounds=1)
    assert module.net.weight.isfinite().all()
    row = loop.rows[0]
    assert (row["dropped"], row["dropped_clients"], row["num_samples"]) == (1, "2", 30)
    # As if the others had been the whole cohort.
    fit(
        clean,
        FederatedLoop(policy=Schedule(num_steps=1), sampler=Only([0, 1, 3]), clients_per_round=3),
        poisoned([]),
        rounds=1,
    )
    torch.testing.assert_close(module.net.weight, clean.net.weight, atol=1e-14, rtol=0)


@pytest.mark.filterwarnings("ignore:(dropped|round|the global model)")
def test_the_tensor_that_is_not_finite_is_named(fit, foreign):
    class Best(type(foreign())):
        """Keeps the lowest loss, which begins with infinity, so that no difference is finite."""

        def __init__(self):
            super().__init__()
            self.register_buffer("best", torch.tensor(torch.inf))

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.best = torch.minimum(self.best, loss.detach())
            return loss

    with pytest.warns(UserWarning, match=r"Non-finite values are in best\. The loss of .* was \d"):
        fit(Best().double(), FederatedLoop(buffers="average"))


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_below_min_clients_the_server_keeps_its_model(fit, linear):
    module = linear()
    before = module.net.weight.detach().clone()
    loop = FederatedLoop(min_clients=3)
    words = "2 of 4 clients returned, too few for min_clients=3 and FedAvg"
    with pytest.warns(UserWarning, match=words):
        fit(module, loop, poisoned([0, 3]), rounds=2)
    assert torch.equal(module.net.weight, before)
    assert [row["dropped"] for row in loop.rows] == [2, 2]
    assert [row["kept"] for row in loop.rows] == [1, 1]


class Loud(Proximal):
    """Is much larger than the loss of the task from the second local step on."""

    def forward(self, own, anchor, batch):
        return 1e99 * super().forward(own, anchor, batch)


@pytest.mark.parametrize("group_size", [None, 2])
def test_warning_names_the_first_loss_that_is_not_finite(fit, data, blobs, group_size):
    def warning(module, federated):
        loop = FederatedLoop(policy=Schedule(lr=0.1, num_steps=5))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, loop, federated, group_size=group_size)
        return next(str(w.message) for w in caught if "round 1: dropped" in str(w.message))

    def sgd(params):
        return torch.optim.SGD(params, lr=0.1)

    loud = ClientModule(nn.Linear(6, 3), [Proximal(0.1), Loud(1.0)], sgd).double()
    told = warning(loud, data())
    if group_size:  # the losses of later steps are those of all clients
        words = (
            r"The loss of client \d was \d\.\d+ in local step 1\. Its training samples are finite"
        )
    else:
        words = (
            r"The loss of client 0 is not finite from local step 4 on \(.*e\+\d+ in local step 3,"
        )
        words += r" most of it Loud\)\. Its training samples are finite\. Later"
    assert re.search(words, told), told
    federated = data()
    federated.train.tensors[0].fill_(torch.nan)
    told = warning(ClientModule(nn.Linear(6, 3), (), sgd).double(), federated)
    words = (
        r"is not finite from local step 1 on \(nan in local step 1\)\. Its training samples are not"
    )
    assert re.search(words, told)


@pytest.mark.parametrize("rounds", [4, 7])
def test_rounds_without_a_usable_update_keep_the_model_and_five_in_a_row_warn(fit, linear, rounds):
    module = linear()
    before = module.net.weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = fit(module, FederatedLoop(), poisoned(range(4)), rounds=rounds)
    assert torch.equal(module.net.weight, before)
    assert len(loop.rows) == rounds
    told = [w for w in caught if "no update was usable in 5 rounds in a row" in str(w.message)]
    assert len(told) == (rounds > 4)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_policy_that_learns_from_losses_needs_one(fit, linear):
    module, policy = linear(), DiscreteGaussianReinforce({"lr": [0.1, 0.2]}, loss="clients")
    module.training_step = lambda batch, batch_idx: None
    with pytest.warns(UserWarning, match="learns from the losses of clients, and there is none"):
        fit(module, FederatedLoop(policy=policy), full_batches(), rounds=1)


def test_a_fit_in_one_process_says_how_to_use_the_cores(fit, linear, caplog, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(linear(), FederatedLoop(), full_batches())
    assert "To use more cores, set devices and strategy='client_parallel'" in caplog.text


# --- buffers and optimizer state ------------------------------------------------------------------


class Counting(L.LightningModule):
    """Its floating buffer adds up the samples seen, its integer buffer counts the steps.

    It keeps an infinite mask, and a value that is missing.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("missing", torch.full((2,), torch.nan))

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        self.steps += 1
        return (self.weight - 1).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SetsAnew(Counting):
    """Counts by new tensors."""

    def training_step(self, batch, batch_idx):
        self.seen = self.seen + len(batch[0])
        self.steps = self.steps + 1
        return (self.weight - 1).square().sum()


class Skewed(IID):
    """Clients of 4, 8 and 12 samples."""

    splits_by = "samples"

    def split(self, labels, num_clients, generator):
        return list(torch.arange(24).split([4, 8, 12]))


@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
@pytest.mark.parametrize("kind", [Counting, SetsAnew])
@pytest.mark.parametrize(
    ("buffers", "seen", "steps"),
    [
        # One pass over 4, 8, 12 samples in batches of 4; weights 4, 8, 12 of 24.
        ("average", [28 / 3, 2 * 28 / 3], [3, 6]),
        ("server", [0.0, 0.0], [0, 0]),
        ("local", [28 / 3, 2 * 28 / 3], [3, 6]),
    ],
)
def test_buffers_are_averaged_kept_or_the_servers(fit, buffers, seen, steps, kind):
    for rounds in (1, 2):
        module = kind()
        data = FederatedDataModule(
            regression(24), partition=Skewed(), num_clients=3, batch_size=4, val_size=0
        )
        loop = fit(module, FederatedLoop(buffers=buffers), data, rounds=rounds)
        assert module.seen.item() == pytest.approx(seen[rounds - 1])
        assert module.steps.item() == steps[rounds - 1]
        assert module.weight.item() > 0
        assert module.mask[0, 1] == float("-inf")
        assert module.missing.isnan().all()
    if buffers == "local":
        assert [loop.store.get(k)["buffer.seen"].item() for k in range(3)] == [8, 16, 24]
    else:
        assert loop.store.rows == {}


@pytest.mark.parametrize("buffers", [None, "average"])
def test_other_buffers_that_clients_change_ask_for_a_choice(fit, linear, buffers):
    module = linear()
    step = module.training_step
    module.register_buffer("fixed", torch.ones(2, dtype=torch.float64))
    module.register_buffer("queue", torch.zeros(2, 3, dtype=torch.float64))

    def training_step(batch, batch_idx):
        module.queue.copy_(F.normalize(batch[0][:2], dim=1))
        return step(batch, batch_idx)

    module.training_step = training_step
    match = "clients change the buffers queue, which FederatedLoop averages"
    with pytest.warns(UserWarning, match=match) if buffers is None else nullcontext():
        fit(module, FederatedLoop(buffers=buffers), full_batches(), rounds=2)


@pytest.mark.parametrize("wrap", [lambda module: module, VectorizedClients])
def test_parameters_and_buffers_of_any_type_and_layout_survive(fit, linear, wrap):
    module = linear()
    module.small = nn.Parameter(torch.tensor([0.1, 0.2], dtype=torch.bfloat16))
    module.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
    module.number = nn.Parameter(torch.tensor(3.0))
    module.empty = nn.Parameter(torch.zeros(0))
    module.register_buffer("flag", torch.tensor([True, False]))
    module.register_buffer("count", torch.tensor(2**60))
    module.register_buffer("absent", None)
    before = copy.deepcopy(module.state_dict())
    fit(wrap(module), FederatedLoop(), full_batches())
    del before["net.weight"]  # which is trained
    for name, value in before.items():
        assert torch.equal(module.state_dict()[name], value), name


# --- a round that is cut short --------------------------------------------------------------------


class StopAt(Callback):
    def __init__(self, step, error=None):
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            if self.error:
                raise self.error
            trainer.should_stop = True


def test_a_stop_in_mid_round_leaves_the_server_model(fit, foreign, caplog):
    whole, stopped = foreign(), foreign()
    fit(whole, rounds=1)  # 4 clients x 4 steps
    with caplog.at_level("INFO", "lightning.pytorch"):
        loop = fit(stopped, rounds=3, callbacks=[StopAt(22)])
    assert same(whole.state_dict(), stopped.state_dict())
    assert len(loop.rows) == 1
    assert "Round 2 was stopped after 1 of 4 clients, and does not count" in caplog.text


@pytest.mark.parametrize(("group_size", "step"), [(None, 22), (2, 11)])
def test_an_exception_in_mid_round_leaves_the_server_model(fit, foreign, group_size, step):
    whole, broken = foreign(), foreign()
    fit(whole, rounds=1, group_size=group_size)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        fit(broken, group_size=group_size, callbacks=[StopAt(step, ZeroDivisionError())])
    assert same(whole.state_dict(), broken.state_dict())
    assert torch.equal(before, torch.get_rng_state())


class FailInValidation(Callback):
    """Raise once, in the validation of a round."""

    def __init__(self, round):
        self.round = round

    def on_validation_batch_end(self, trainer, *args):
        if trainer.current_epoch == self.round:
            self.round = None
            raise ZeroDivisionError


def test_a_module_left_in_validation_resumes_bit_equal(fit, foreign, tmp_path):
    """Its mode of evaluation and its metric would change the rounds that follow."""
    module, whole = foreign(), foreign()
    rows = fit(whole, rounds=3).rows
    callbacks = [RoundCheckpoint(str(tmp_path)), FailInValidation(1)]
    with pytest.raises(ZeroDivisionError):
        fit(module, callbacks=callbacks, enable_checkpointing=True)
    loop = fit(module, rounds=3, **resume(tmp_path))
    assert loop.rows == rows
    assert same(module.state_dict(), whole.state_dict())


def test_a_loop_and_a_rule_whose_first_round_was_aggregated_are_refused(trainer, foreign, data):
    rule = FedAdam()
    made = trainer(FederatedLoop(rule, buffers="average"), callbacks=[FailInValidation(0)])
    with pytest.raises(ZeroDivisionError):
        made.fit(foreign(), datamodule=data())
    for _ in range(2):
        with pytest.raises(FederationError, match="FederatedLoop has the state of an earlier run"):
            made.fit(foreign(), datamodule=data())
    with pytest.raises(FederationError, match="the aggregator has the state of an earlier run"):
        trainer(FederatedLoop(rule, buffers="average")).fit(foreign(), datamodule=data())


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_leaves_no_option_and_no_hook_of_its_own(trainer, foreign, data, tmp_path, fails):
    module, federated, keep = foreign(), data(), ModelCheckpoint(tmp_path)
    own = module.on_train_batch_end = lambda *args: None
    before = set(vars(module))
    callbacks = [keep, StopAt(5, ZeroDivisionError())] if fails else [keep]
    made = trainer(rounds=1, callbacks=callbacks, enable_checkpointing=True)
    kind, run = type(made), made.fit_loop.epoch_loop.automatic_optimization.run
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        made.fit(module, datamodule=federated)
    assert vars(module)["on_train_batch_end"] is own
    assert set(vars(module)) - before <= {"_hparams"}  # Lightning's own
    assert federated.plan is None
    assert type(made) is kind
    assert made.fit_loop.epoch_loop.automatic_optimization.run == run
    assert made.reload_dataloaders_every_n_epochs == 0
    assert "on_train_epoch_end" not in vars(keep)
    assert "on_epoch_end" not in vars(made._logger_connector)


def test_skipping_the_rest_of_an_epoch_is_an_error(fit, foreign):
    module, batches = foreign(), count()
    module.on_train_batch_start = lambda *_: -1 if next(batches) == 5 else None
    with pytest.raises(FederationError, match="ended after 1 of 4 clients"):
        fit(module)


# --- resume ---------------------------------------------------------------------------------------


def test_a_checkpoint_does_not_grow_with_clients(fit, linear, tmp_path):
    sizes = []
    for num_clients in (2, 50):
        fit(linear(), FederatedLoop(), full_batches(num_clients, 100), rounds=1, **keep(tmp_path))
        sizes.append((tmp_path / "last.ckpt").stat().st_size)
    assert sizes[1] - sizes[0] < 500


def test_resuming_with_other_options_says_which(fit, foreign, data, tmp_path):
    fit(foreign(), rounds=1, **keep(tmp_path))
    other = FederatedLoop(
        FedAvg("uniform"), Schedule(local_epochs=2), buffers="average", client_fraction=0.5
    )
    with pytest.warns(UserWarning, match="with other options") as warned:
        fit(foreign(), other, data(batch_size=4), rounds=2, **resume(tmp_path))
    (text,) = (str(w.message) for w in warned if "other options" in str(w.message))
    for part in (
        "clients in a round is 2, was 4",
        "aggregator is FedAvg(weighting='uniform', normalization='round'), was FedAvg(weighting="
        "'samples', normalization='round')",
        "local_epochs=2, decay=1.0, steps_decay=1.0, values=None, phases=[]), was Schedule(",
        "batches in a local epoch is 32, was 16",
    ):
        assert part in text
    assert len(other.rows) == 2


def test_a_child_class_resumes_its_parents_checkpoint(fit, foreign, tmp_path):
    class Child(FederatedLoop):
        pass

    fit(foreign(), rounds=1, **keep(tmp_path))
    child = Child(buffers="average")
    assert len(fit(foreign(), child, **resume(tmp_path)).rows) == 3


def test_what_the_module_draws_between_clients_depends_on_the_round_alone(fit, foreign, tmp_path):
    drawn = {}

    def watched(run):
        module, seen = foreign(), drawn.setdefault(run, [])
        for hook in ("on_train_epoch_start", "on_train_epoch_end"):
            setattr(module, hook, lambda: seen.append(torch.rand(()).item()))
        return module

    fit(watched("whole"), rounds=4)
    fit(watched("first"), rounds=2, **keep(tmp_path))
    torch.rand(7)
    fit(watched("rest"), rounds=4, **resume(tmp_path))
    assert drawn["first"] + drawn["rest"] == drawn["whole"]
    assert len(set(drawn["whole"])) == 8


def test_without_a_seed_of_its_own_a_run_takes_over_the_checkpoints(fit, foreign, tmp_path):
    whole, again = foreign(), foreign(seed=9)
    fit(whole, FederatedLoop(seed=7, buffers="average"), rounds=3)
    fit(foreign(), FederatedLoop(seed=7, buffers="average"), rounds=1, **keep(tmp_path))
    loop = fit(again, rounds=3, **resume(tmp_path))
    assert loop.seed == 7
    assert same(whole.state_dict(), again.state_dict())


# --- the table and what policies learn ------------------------------------------------------------


def test_the_table_has_what_the_module_logs_at_the_end_of_its_epoch(fit, foreign, tmp_path):
    module = foreign()
    module.on_train_epoch_end = lambda: module.log("belated", float(module.current_epoch))
    loop = fit(module, rounds=3, check_val_every_n_epoch=2)
    assert [row["belated"] for row in loop.rows] == [0.0, 1.0, 2.0]
    # Without figures of earlier rounds, nor its own ones twice.
    assert [row.get("val_loss") is None for row in loop.rows] == [True, False, True]
    assert not any("federation" in name for row in loop.rows for name in row)
    assert {type(row["loss_epoch"]) for row in loop.rows} == {float}
    text = (tmp_path / "rounds.csv").read_text().splitlines()
    assert text[0].startswith("round,clients,dropped,dropped_clients,dropped_out,crashed,late,")
    assert len(text) == 4


class Listening(HyperparameterPolicy):
    """Keeps all that it is told."""

    def __init__(self, learns_from="val_loss", monitor="val_loss"):
        super().__init__(monitor)
        self.learns_from, self.heard = frozenset({learns_from}), []

    def sample(self, round, clients):
        return {"num_steps": 2}

    def update(self, feedback):
        self.heard.append(feedback)


@pytest.mark.parametrize("every", [1, 2])
def test_a_policy_hears_the_loss_before_a_round_and_after_if_it_is_validated(fit, foreign, every):
    """A stale loss is no reward."""
    policy = Listening()
    loop = FederatedLoop(policy=policy, buffers="average")
    fit(foreign(), loop, rounds=4, check_val_every_n_epoch=every)
    losses = [row.get("val_loss") for row in loop.rows]
    assert [loss is None for loss in losses] == [every == 2, False] * 2
    assert [feedback.val_loss for feedback in policy.heard] == losses
    before = [feedback.val_loss_before for feedback in policy.heard]
    assert every == 2 or before[1:] == losses[:-1]
    assert before[0] is not None


def test_a_policy_without_its_loss_says_so_at_the_start(fit, foreign):
    loop = FederatedLoop(policy=Listening(monitor="val_los"), buffers="average")
    with pytest.raises(FederationError, match="'val_los', which validation does not log"):
        fit(foreign(), loop)
    assert loop.rows == []


def test_validation_draws_from_its_own_stream(fit, foreign):
    drawn = []
    for sampled in (1, 4):
        watch = LambdaCallback(on_validation_start=lambda *_: drawn.append(torch.rand(1).item()))
        loop = FederatedLoop(clients_per_round=sampled, buffers="average", seed=0)
        fit(foreign(), loop, callbacks=[watch], rounds=2)
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_early_stopping_ends_and_the_best_checkpoint_is_what_was_validated(fit, foreign, tmp_path):
    stop = EarlyStopping("val_loss", patience=0, mode="max")  # a falling loss is no improvement
    best = ModelCheckpoint(
        str(tmp_path / "c"), "best", monitor="val_loss", save_on_train_epoch_end=False
    )
    validated = {}
    look = LambdaCallback(
        on_validation_end=lambda trainer, module: validated.update(
            {trainer.current_epoch: copy.deepcopy(module.state_dict())}
        )
    )
    loop = fit(foreign(), rounds=9, callbacks=[look, stop, best], enable_checkpointing=True)
    assert len(loop.rows) < 9
    losses = [row["val_loss"] for row in loop.rows]
    assert best.best_model_score == pytest.approx(min(losses))
    saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    assert same(saved, validated[losses.index(min(losses))])


# --- what is refused at the start -----------------------------------------------------------------


def test_number_and_fraction_of_clients_exclude_each_other():
    with pytest.raises(FederationError, match="excludes client_fraction"):
        FederatedLoop(client_fraction=0.5, clients_per_round=2)


SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugins": SCALED}, "16-mixed.* is not supported.*bf16-mixed"),
        ({"val_check_interval": "00:00:01:00"}, "val_check_interval=a time"),
        ({"check_val_every_n_epoch": None}, "check_val_every_n_epoch must be a number"),
    ],
)
def test_trainer_options_that_break_rounds_are_refused(fit, foreign, options, message):
    with pytest.raises(FederationError, match=message):
        fit(foreign(), **options)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "training_step", lambda self, dataloader_iter: 0), "dataloader_iter"),
        (lambda m: setattr(m, "lazy", nn.LazyLinear(3)), r"\.lazy.weight is lazy"),
        (lambda m: m.register_buffer("graph", torch.eye(3).to_sparse()), r"\.graph is lazy, spar"),
        (lambda m: m.register_buffer("wave", torch.ones(2) * 1j), r"\.wave is .* or complex"),
    ],
    ids=["dataloader_iter", "lazy", "sparse", "complex"],
)
def test_module_that_does_not_fit_is_refused(fit, foreign, change, message):
    module = foreign()
    change(module)
    with pytest.raises(FederationError, match=message):
        fit(module)


@pytest.mark.parametrize("wrap", [lambda module: module, VectorizedClients])
def test_a_module_without_an_optimizer_is_refused(fit, foreign, wrap):
    module = foreign()
    module.configure_optimizers = lambda: None
    with pytest.raises(FederationError, match=r"Foreign\.configure_optimizers must return"):
        fit(wrap(module))


@pytest.mark.parametrize("wrap", [lambda module: module, VectorizedClients])
def test_lazy_layers_that_setup_makes_are_trained(fit, foreign, wrap):
    class Lazy(type(foreign())):
        def setup(self, stage):
            self.net(torch.zeros(2, 6, dtype=torch.float64))

    module = foreign()
    module.__class__, module.net[0] = Lazy, nn.LazyLinear(8, dtype=torch.float64)
    fit(wrap(module))
    assert module.net[0].weight.shape == (8, 6)


class Forgetful(FedAvg):
    def compute(self):
        super().compute()


def test_a_loader_instead_of_a_federation_is_refused(foreign, trainer, blobs):
    with pytest.raises(FederationError, match=r"got NoneType: call .* FederatedDataModule\(train"):
        trainer().fit(foreign(), DataLoader(blobs()), DataLoader(blobs()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients_per_round": 9}, r"clients_per_round must be .*\[1, 4\], got 9: there are 4 cl"),
        (
            {"min_clients": 3, "client_fraction": 0.5},
            r"min_clients must be .*\[1, 2\], got 3: increase",
        ),
        ({"sampler": Only([0, 0]), "clients_per_round": 2}, "distinct clients from 0 to 3"),
        ({"sampler": Only([1, 4]), "clients_per_round": 2}, "distinct clients from 0 to 3"),
        ({"policy": Schedule}, "policy must be an instance of HyperparameterPolicy, got <class"),
        ({"update_transforms": ["TopK"]}, "each of update_transforms must be an instance of Upd"),
        ({"local_parameters": "net.*"}, "local_parameters must be a list of patterns, got 'net"),
        ({"aggregator": Forgetful()}, r"Forgetful\.compute\(\) must be a tensor, got None"),
    ],
)
def test_options_that_do_not_fit_are_refused(fit, foreign, options, message):
    with pytest.raises(FederationError, match=message):
        fit(foreign(), FederatedLoop(**options))


def test_a_rule_without_state_serves_many_runs(fit, foreign):
    rule, policy = FedAvg(), Schedule(num_steps=2)
    modules = [foreign(), foreign()]
    for module in modules:
        fit(module, FederatedLoop(rule, policy, buffers="average"), rounds=2)
    assert same(modules[0].state_dict(), modules[1].state_dict())


def test_a_new_policy_may_continue_with_what_another_has_learned(fit, foreign):
    def policy():
        return DiscreteGaussianReinforce({"num_steps": [1, 2, 3, 4]}, policy_lr=0.5)

    first, second = policy(), policy()
    fit(foreign(), FederatedLoop(policy=first, buffers="average", seed=0), rounds=4)
    with pytest.raises(FederationError, match="the policy has the state of an earlier run"):
        fit(foreign(), FederatedLoop(policy=first, buffers="average", seed=0), rounds=1)
    second.load_state_dict(first.state_dict())
    assert same(second.state_dict(), first.state_dict())
    loop = fit(foreign(), FederatedLoop(policy=second, buffers="average", seed=0), rounds=1)
    assert len(loop.rows) == 1


def test_a_second_fit_is_refused_without_a_checkpoint(foreign, data, trainer, tmp_path):
    """It would continue with the state of the rule and of the clients, on whatever it is given."""
    module, loop = foreign(optimizer="sgd"), FederatedLoop(buffers="average")
    first = trainer(loop, rounds=2, enable_checkpointing=True, callbacks=[RoundCheckpoint()])
    first.fit(module, datamodule=data())
    first.save_checkpoint(path := tmp_path / "early.ckpt")
    first.fit_loop.max_epochs = 4
    with pytest.raises(FederationError, match="an earlier run: to continue, set ckpt_path"):
        first.fit(module, datamodule=data())
    first.fit(module, datamodule=data(), ckpt_path=path)
    whole = foreign(optimizer="sgd")
    trainer(FederatedLoop(buffers="average"), rounds=4).fit(whole, datamodule=data())
    assert same(whole.state_dict(), module.state_dict())
    first.validate(module, datamodule=data(), ckpt_path=path, verbose=False)
    assert len(loop.rows) == 4


def test_a_loader_of_another_length_is_refused(fit, foreign, data):
    federated = data()
    federated.train_dataloader = lambda: DataLoader(federated.train.tensors[0], batch_size=8)
    with pytest.raises(FederationError, match="the training loader has"):
        fit(foreign(), None, federated)


# --- what modules and runs do now and then --------------------------------------------------------


def test_a_resumed_run_takes_the_policys_rate_whatever_the_optimizers(fit, linear, tmp_path):
    data, policy = full_batches(), {"policy": Schedule(lr=0.1)}
    whole, again = linear(lr=0.01), linear(lr=0.5)
    fit(whole, FederatedLoop(**policy), data, rounds=2)
    fit(linear(lr=0.01), FederatedLoop(**policy), data, rounds=1, **keep(tmp_path))
    fit(again, FederatedLoop(**policy), data, rounds=2, **resume(tmp_path))
    torch.testing.assert_close(whole.net.weight, again.net.weight, atol=1e-14, rtol=0)


# --- a policy that learns -------------------------------------------------------------------------


def test_figures_of_a_policy_that_learns_are_in_the_table(fit, linear):
    grid = {"lr": [0.001, 0.01, 0.05], "num_steps": [1, 2, 3]}
    policy = DiscreteGaussianReinforce(grid, policy_lr=0.5, seed=4)
    loop = fit(linear(), FederatedLoop(policy=policy, seed=3), full_batches(3, 60, 8), rounds=4)
    losses = [row["val_loss"] for row in loop.rows]
    for row, before, after in zip(loop.rows[1:], losses[:-1], losses[1:], strict=True):
        assert row["reward"] == pytest.approx((before - after) / before)
        assert min(abs(row["lr"] - lr) for lr in (0.001, 0.01, 0.05)) < 1e-9
        assert {"mean_lr", "mean_num_steps", "precision_lr_num_steps"} <= row.keys()
    assert policy.mean.any()


def test_the_runs_seed_is_the_policys(fit, foreign):
    def rates(seed, own=None):
        policy = DiscreteGaussianReinforce({"lr": [0.01 * i for i in range(1, 9)]}, seed=own)
        loop = FederatedLoop(policy=policy, buffers="average", seed=seed)
        fit(foreign(), loop, rounds=2)
        return [row["lr"] for row in loop.rows]

    seven = rates(7)
    assert seven == rates(7) != rates(8)
    assert rates(7, own=3)[0] == rates(8, own=3)[0]


def test_a_term_that_is_gone_is_refused_on_resuming(fit, tmp_path):
    def module(*terms):
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        return ClientModule(net, terms).double()

    fit(module(RepresentationMatching(0.1)), rounds=1, **keep(tmp_path))
    with pytest.raises(FederationError, match="number of parameter tensors is 8, here it is 4"):
        fit(module(), **resume(tmp_path))


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize(
    "task_loss", [lambda loss: 5.0, lambda loss: loss.detach() * 0 + 5, lambda loss: None]
)
def test_a_step_may_return_what_its_clients_report(fit, linear, group_size, task_loss):
    module, policy = linear(), Listening("client_losses")
    step = type(module).training_step

    class Reporting(type(module)):
        def training_step(self, batch, batch_idx):
            loss = step(self, batch, batch_idx)
            return {"loss": loss, "task_loss": task_loss(loss), "each": batch[1]}

    module.__class__ = Reporting
    loop = FederatedLoop(policy=policy, seed=0)
    fit(module, loop, full_batches(4, 40, 8), rounds=1, group_size=group_size)
    heard = policy.heard[0].losses.tolist()
    assert len(heard) == 4
    assert (heard == [5.0] * 4) == (task_loss(torch.ones(())) is not None)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::DeprecationWarning")
def test_a_module_with_a_scripted_network_trains(fit, linear):
    plain, scripted = linear(features=6), linear(features=6)
    scripted.net = torch.jit.script(scripted.net)
    for module in (plain, scripted):
        fit(module)
    assert torch.equal(plain.net.weight, scripted.net.weight)


def test_an_exception_beside_a_buffer_of_another_shape_leaves_the_server_model(fit, foreign):
    module = foreign()
    before = copy.deepcopy(module.state_dict())

    def fails(*_):
        module.net[1].running_mean = torch.zeros(3)
        raise ZeroDivisionError

    module.on_train_batch_end = fails
    with pytest.raises(ZeroDivisionError) as caught:
        fit(module)
    assert same(module.state_dict(), before)
    assert "Clean-up" not in "".join(caught.value.__notes__)
