"""The order of hooks in a round, and the steps that a client's module and its schedulers count."""

import copy
import math
import re
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lightning_fl import ClientModule
from lightning_fl.aggregators import PFNM, FedAvg
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import (
    DiscreteGaussianReinforce,
    HyperparameterPolicy,
    PersonalizedPolicyGradient,
    Schedule,
    StagedPolicy,
    Stragglers,
)
from lightning_fl.runners import Phase
from lightning_fl.samplers import PoissonSampler
from lightning_fl.transforms import Quantize, TopK
from lightning_fl.types import FederationError
from linear import Linear, regression
from recorded import CALLBACK_HOOKS, MODULE_HOOKS, recorded, steps_by_lightning

# --- the order of hooks ---------------------------------------------------------------------------


def shrink(module):
    for param in module.parameters():
        param.data.mul_(0.5)


def clip(module):
    for param in module.parameters():
        param.data.clamp_(-0.3, 0.3)


def by_hand(data, weights, rounds):
    """FedAvg with full batches; weights are halved before a round and clipped after it."""
    x, y = data.train.tensors
    for _ in range(rounds):
        start, local = weights * 0.5, []
        for part in data.parts:
            gradient = 2 * x[part].T @ (x[part] @ start - y[part]) / len(part)
            local.append((start - 0.1 * gradient).clamp(-0.3, 0.3))
        n = data.num_samples.double()
        weights = (n[:, None] * torch.stack(local)).sum(0) / n.sum()
    return weights


@pytest.mark.parametrize("who", ["module", "callback"])
def test_what_hooks_write_before_a_round_and_after_a_step_counts(fit, linear, who):
    module, callbacks, seen = linear(), [], []
    data = FederatedDataModule(regression(), regression(9), num_clients=3, batch_size=None)
    if who == "module":
        module.on_train_epoch_start = lambda: shrink(module)
        module.on_train_batch_end = lambda *args: clip(module)
    else:
        callbacks = [
            LambdaCallback(
                on_train_epoch_start=lambda trainer, module: shrink(module),
                on_train_batch_end=lambda trainer, module, *_: clip(module),
            )
        ]
    look = LambdaCallback(
        on_validation_start=lambda *_: seen.append(module.net.weight.detach().clone()[0])
    )
    start = module.net.weight.detach().clone()[0]
    fit(module, FederatedLoop(seed=3), data, callbacks=[*callbacks, look])
    for rounds, validated in enumerate(seen, 1):  # the aggregate is validated
        torch.testing.assert_close(validated, by_hand(data, start, rounds), atol=1e-12, rtol=0)


def test_a_client_starts_after_all_hooks_with_its_own_random_numbers(fit, linear, data):
    """What hooks of the round's start draw does not reach the first client."""

    def drawn(count):
        module, found = linear(), []
        step = module.training_step
        module.on_train_epoch_start = lambda: torch.rand(count)
        module.training_step = lambda *batch: found.append(torch.rand(3).tolist()) or step(*batch)
        fit(module, FederatedLoop(seed=3), data(regression(), val=regression(9)), rounds=2)
        return found

    assert drawn(0) == drawn(5)


# --- a client's own steps -------------------------------------------------------------------------


def linear_decay(optimizer, total):
    return {"scheduler": LambdaLR(optimizer, lambda step: 1 - step / total)}


def one_cycle(optimizer, total):
    return {"scheduler": OneCycleLR(optimizer, 0.05, total_steps=total)}


def every_round(optimizer, total):
    return {"scheduler": LambdaLR(optimizer, lambda round: 0.5**round), "interval": "epoch"}


@pytest.fixture
def scheduled(foreign):
    """A foreign module with a schedule, which may be one over the run."""

    def make(scheduler, lr=0.05, momentum=0.5):
        module = foreign(batchnorm=False, dropout=0.0)

        def configure():
            optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
            total = module.trainer.estimated_stepping_batches
            config = {"interval": "step", "monitor": "val_loss"} | scheduler(optimizer, total)
            return {"optimizer": optimizer, "lr_scheduler": config}

        module.configure_optimizers = configure
        return module

    return make


class Some(PoissonSampler):
    """Sample two clients in some rounds, and nobody in the others."""

    def __init__(self, *rounds):
        self.rounds = rounds

    def sample(self, round, count, num_samples, generator):
        return torch.arange(2 if round in self.rounds else 0)


@pytest.mark.filterwarnings("ignore:round 1. 0 of 0 clients", "ignore:the global model was kept")
def test_a_round_that_samples_nobody_makes_no_scheduler_step(scheduled, fit, data, blobs):
    """The step of its placeholder client is discarded."""
    loop = FederatedLoop(sampler=Some(2), clients_per_round=2, policy=Schedule(num_steps=2), seed=0)
    fit(scheduled(linear_decay), loop, data(blobs(20)), rounds=4)
    assert loop.rows[2]["lr"] == pytest.approx(0.05 * (1 + 7 / 8) / 2)  # of 8 steps


@pytest.mark.filterwarnings("ignore:round 2. 0 of 0 clients", "ignore:the global model was kept")
@pytest.mark.parametrize("group_size", [None, 2])
def test_a_round_that_samples_nobody_has_no_training_metrics(fit, data, group_size):
    """Those of its placeholder client are of nobody, and the policy does not learn from it."""
    learned = []

    class Learning(Schedule):
        def update(self, feedback):
            learned.append(feedback.plan.round)

    class Logging(ClientModule):
        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            self.log("started", 1.0)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss, on_step=True, on_epoch=True)
            self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
            return loss

    module = Logging(nn.Linear(6, 3)).double()
    loop = FederatedLoop(sampler=Some(0, 2), policy=Learning(), clients_per_round=2, seed=0)
    fit(module, loop, data(), rounds=3, group_size=group_size)
    assert learned == [0, 2]
    names = {"train_loss", "mean", "mean_step", "mean_epoch", "largest", "started"}
    assert [names & row.keys() for row in loop.rows] == [names, {"started"}, names]


@pytest.mark.parametrize("scheduler", [linear_decay, one_cycle, every_round])
def test_one_client_equals_plain_lightning_hook_for_hook(
    scheduled, trainer, data, blobs, flat, scheduler
):
    runs = []
    for loop in (False, FederatedLoop(seed=0, optimizer_state="keep")):
        calls = []
        module = recorded(scheduled(scheduler), MODULE_HOOKS, calls, "module", 0)
        watch = recorded(L.Callback(), CALLBACK_HOOKS, calls, "callback", 2)
        runner = trainer(loop, callbacks=[watch], gradient_clip_val=1.0, num_sanity_val_steps=2)
        runner.fit(module, datamodule=data(blobs(20), num_clients=1, seed=0))
        runs.append((calls, flat(module), runner.global_step))
    plain, federated = runs
    assert len(plain[0]) > 200
    assert {name for _, name, *_ in plain[0]} >= {"training_step", "optimizer_step"}
    for expected, call in zip(plain[0], federated[0], strict=True):
        assert call == expected
    assert federated[2] == plain[2]
    # The aggregate is what the client started from plus how far it has moved, which rounds.
    torch.testing.assert_close(federated[1], plain[1], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("takes_index", [True, False])
def test_a_training_step_that_validation_calls_too(fit, linear, data, takes_index):
    """It may leave ``batch_idx`` out; what validation passes on is left as it is."""
    module, seen = linear(), []

    class Shared(type(module)):
        def training_step(self, batch, index=None):
            seen.append(index)
            return super().training_step(batch, 0)

        def validation_step(self, batch, batch_idx):
            Shared.training_step(self, batch, 7) if batch_idx else self.training_step(batch)

    class Without(Shared):
        def training_step(self, batch):
            return super().training_step(batch)

    module.__class__ = Shared if takes_index else Without
    federated = data(regression(), val=regression(9), eval_batch_size=5)
    loop = FederatedLoop(policy=Schedule(num_steps=2), check=False)
    fit(module, loop, federated, rounds=1)
    assert seen == ([0, 1] * 4 if takes_index else [None] * 8) + [None, 7]


# --- schedules over the run -----------------------------------------------------------------------


def uneven(data, **options):
    """Four clients with different numbers of batches."""
    options = {"partition": Dirichlet(0.5, min_size=3), "batch_size": 4, "seed": 1} | options
    return data(num_clients=4, **options)


class Growing(HyperparameterPolicy):
    def sample(self, round, clients):
        return {"num_steps": 1 + round + clients % 2}


class Learning(Growing):
    def update(self, feedback):
        pass


class Bounded(Learning):
    def max_local_steps(self, round, batches_per_epoch):
        return 9


GRID = {"lr": [0.1, 0.2], "num_steps": [2, 5, 3]}
#: Policy, and the local steps that one client can make in three rounds at most; n is an epoch's.
RUNS = {
    "epoch": (Schedule(), lambda n: 3 * n),
    "epochs": (Schedule(local_epochs=2.5), lambda n: 3 * round(2.5 * n)),
    "steps": (Schedule(num_steps=3), lambda n: 9),
    "decay": (Schedule(num_steps=8, steps_decay=0.5), lambda n: 8 + 4 + 2),
    "growing": (Growing(), lambda n: 2 + 3 + 4),
    "stragglers": (Stragglers(0.5, Schedule(num_steps=4)), lambda n: 12),
    "stages": (StagedPolicy([1], [Schedule(num_steps=7), Schedule(num_steps=2)]), lambda n: 11),
    "learned": (DiscreteGaussianReinforce(GRID), lambda n: 15),
    "candidates": (
        PersonalizedPolicyGradient([{"num_steps": 2}, {"num_steps": 6}], method="reward"),
        lambda n: 18,
    ),
    "bounded": (Bounded(), lambda n: 27),
}


def noted(module, found):
    """A module that notes the stepping batches when its optimizer is configured."""
    configure = module.configure_optimizers
    module.configure_optimizers = lambda: (
        found.append(module.trainer.estimated_stepping_batches) or configure()
    )
    return module


@pytest.mark.parametrize("name", RUNS)
def test_the_stepping_batches_are_those_of_the_longest_client(fit, foreign, data, blobs, name):
    found = []
    policy, expected = copy.deepcopy(RUNS[name])
    federated = uneven(data, train=blobs(60))
    loop = FederatedLoop(policy=policy, seed=2)
    policy.monitor = "accuracy"
    look = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: found.append(trainer.estimated_stepping_batches)
    )
    fit(noted(foreign(batchnorm=False, dropout=0.0), found), loop, federated, callbacks=[look])
    longest = int(federated.batches_per_epoch.max())
    assert longest > int(federated.batches_per_epoch.min())
    assert set(found) == {expected(longest)}
    assert len(found) > 3


@pytest.mark.filterwarnings("ignore:.* clients returned")
def test_the_stepping_batches_of_a_stream_and_of_a_trial_run(fit, foreign, data, blobs):
    found = []

    def run(rounds=5, **options):
        federated = uneven(
            data, train=blobs(100), stream_steps=2, partition=Dirichlet(1, min_size=9)
        )
        loop = FederatedLoop(sampler=PoissonSampler(), seed=2, client_fraction=0.5)
        fit(noted(foreign(batchnorm=False), found), loop, federated, rounds=rounds, **options)
        most = []
        for step in range(2):
            federated.advance(step)
            most.append(int(federated.batches_per_epoch.max()))
        return most

    first, second = run()
    assert found == [3 * first + 2 * second]
    found.clear()
    run(fast_dev_run=3)
    assert found[0] <= 3
    found.clear()
    run(rounds=-1, max_time={"seconds": 0})
    assert found == [math.inf]


def test_a_learned_amount_of_work_without_a_bound_is_refused(fit, scheduled):
    with pytest.raises(FederationError, match="Override Learning"):
        fit(scheduled(linear_decay), FederatedLoop(policy=Learning()))


REMEDY = "set frequency=1, do not combine"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda o: [{"scheduler": StepLR(o, 2), "frequency": 2}], REMEDY),
        (lambda o: [{"scheduler": StepLR(o, 2)}, StepLR(o, 1)], REMEDY),
        (lambda o: [{"scheduler": ReduceLROnPlateau(o)}], 'set interval="epoch"'),
    ],
    ids=["frequency", "epochs", "plateau"],
)
def test_schedulers_of_steps_that_would_depend_on_the_order_are_refused(
    fit, linear, schedule, message
):
    module = linear(features=6)

    def configure():
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        first, *rest = schedule(optimizer)
        return [optimizer], [{"interval": "step", "monitor": "val_loss"} | first, *rest]

    module.configure_optimizers = configure
    with pytest.raises(FederationError, match=message):
        fit(module)


# --- the rate that the table shows ----------------------------------------------------------------


@pytest.mark.parametrize("group_size", [None, 2])
def test_the_table_shows_the_mean_rate_of_the_clients_steps(fit, scheduled, data, group_size):
    module = scheduled(lambda o, total: {"scheduler": LambdaLR(o, lambda s: 0.5**s)}, 0.2, 0.0)

    class Work(HyperparameterPolicy):
        def sample(self, round, clients):
            return {"num_steps": 2 - clients % 2, "lr": 0.2 - 0.1 * (clients == 3).double()}

    logged, loop = [], FederatedLoop(policy=Work())
    look = LambdaCallback(
        on_train_epoch_end=lambda trainer, *_: logged.append(
            float(trainer.callback_metrics["federation/lr"])
        )
    )
    fit(module, loop, data(), rounds=2, group_size=group_size, callbacks=[look])
    rate = [0.2, 0.1, 0.05, 0.025]
    for t, row in enumerate(loop.rows):
        one, two = rate[2 * t], (rate[2 * t] + rate[2 * t + 1]) / 2
        assert row["lr"] == pytest.approx((two + one + two + one / 2) / 4, rel=1e-12)
        assert logged[t] == pytest.approx(row["lr"], rel=1e-6)


@pytest.mark.parametrize("lr", [None, 1 / 3])
def test_a_constant_rate_is_exactly_that_number(fit, foreign, lr):
    loop = FederatedLoop(policy=Schedule(lr=lr), buffers="average")
    fit(foreign(optimizer="sgd"), loop, rounds=1)
    assert loop.rows[0]["lr"] == (lr or 0.1)


# --- exceptions -----------------------------------------------------------------------------------


def notes(caught):
    return " | ".join(getattr(caught.value, "__notes__", ()))


class Failing(PFNM):
    """Fails while the network is being replaced, in the second round."""

    at = "compute"

    def _fails(self, at):
        if self.at == at and self.round == 1:
            raise KeyError(f"the rule failed in {at}")

    def compute(self):
        found = super().compute()
        self._fails("compute")
        return found

    def _next(self, ids, nets, merged):
        self.module_chain.write(merged.layers)  # as a search does
        super()._next(ids, nets, merged)
        self._fails("load_global_network")

    def load_client_network(self):
        super().load_client_network()
        if self.server.numel():
            self._fails("load_client_network")


@pytest.mark.parametrize("at", ["compute", "load_global_network", "load_client_network"])
def test_the_exception_of_a_rule_is_the_one_that_is_seen(fit, data, at):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    module = ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()
    rule, before = Failing(gamma=50.0, client_variance=0.1, prior_variance=1.0, seed=5), {}
    rule.at = at
    keep = LambdaCallback(
        on_validation_end=lambda trainer, module: before.update(
            {name: t.clone() for name, t in module.state_dict().items()}
        )
    )
    with pytest.raises(KeyError, match=f"the rule failed in {at}") as caught:
        fit(module, FederatedLoop(aggregator=rule, seed=2), data(), callbacks=[keep])
    if at == "load_client_network":  # between rounds: nothing is to be put back
        return
    assert "In round 2, during aggregation" in notes(caught)
    assert "Clean-up" not in notes(caught)
    for name, tensor in module.net.state_dict().items():
        assert torch.equal(tensor, before[f"net.{name}"])


class Stubborn(FedAvg):
    """A rule that cannot be undone either."""

    has_failed = False

    def compute(self):
        self.has_failed = True
        raise KeyError("the rule failed")

    def load_global_network(self, score=None):
        if self.has_failed:
            raise ValueError("cannot put back")


def test_what_fails_in_the_clean_up_is_a_note(fit, linear, data, trainer):
    module = linear()
    with pytest.raises(KeyError, match="the rule failed") as caught:
        fit(module, FederatedLoop(aggregator=Stubborn()), data(regression(), val=regression(9)))
    assert "Clean-up step abandon failed" in notes(caught)
    assert "ValueError: cannot put back" in notes(caught)
    assert "on_train_batch_end" not in vars(module)  # what comes after is cleaned up all the same


@pytest.mark.parametrize("place", ["step", "hook", "transfer"])
def test_an_exception_in_a_local_step_names_round_and_client(fit, linear, data, place):
    module, federated = linear(), data(regression(), val=regression(9), num_clients=3)

    def fail(*args):
        # Outside of a module's step, the count is that of all three clients.
        if module.trainer.global_step == (7 if place == "transfer" else 3):
            raise ZeroDivisionError("no such batch")

    if place == "step":
        step = module.training_step
        module.training_step = lambda batch, batch_idx: fail() or step(batch, batch_idx)
    elif place == "hook":
        module.on_train_batch_start = fail
    else:
        federated.on_before_batch_transfer = lambda batch, index: fail() or batch
    with pytest.raises(ZeroDivisionError, match="no such batch") as caught:
        fit(module, FederatedLoop(policy=Schedule(num_steps=2), seed=1), federated)
    assert notes(caught) == "In round 2, client 0, local step 2"


def test_an_exception_of_vectorized_clients_names_them(fit, foreign, data):
    module = foreign(batchnorm=False, dropout=0.0)
    step, calls = module.training_step, []

    def fail(batch, batch_idx):
        calls.append(1)
        if len(calls) > 30:
            raise ZeroDivisionError
        return step(batch, batch_idx)

    module.training_step = fail
    with pytest.raises(ZeroDivisionError) as caught:
        fit(module, FederatedLoop(seed=1), data(), rounds=50, group_size=2)
    where = r"--vectorize=null .* In round \d+, clients \d, \d, local steps \d to \d"
    assert re.search(f"{where}$", notes(caught))


def test_an_exception_between_rounds_names_no_client(fit, linear, data):
    module = linear()
    module.on_validation_start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        fit(module, FederatedLoop(), data(regression(), val=regression(9)))
    assert notes(caught) == ""


@pytest.mark.parametrize("group_size", [None, 2], ids=["plain", "vectorized"])
def test_an_exception_before_the_first_batch_is_the_one_that_is_seen(fit, linear, data, group_size):
    module, loop, before = linear(), FederatedLoop(seed=1), []

    class Fails(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                before.extend(p.detach().clone() for p in module.parameters())
                raise ZeroDivisionError("no such round")

    options = {"group_size": group_size, "callbacks": [Fails()]}
    with pytest.raises(ZeroDivisionError, match="no such round") as caught:
        fit(module, loop, data(regression(), val=regression(9)), **options)
    assert notes(caught) == "In round 2"
    for param, kept in zip(module.parameters(), before, strict=True):
        assert torch.equal(param, kept)


# --- what is exchanged ----------------------------------------------------------------------------


class Tuned(Linear):
    """A small head on a frozen backbone of 6 x 50 numbers, which may be no parameters at all."""

    def __init__(self, hidden=False, thaw=False, drifts=False):
        super().__init__(nn.Identity())
        self.backbone = nn.Linear(6, 50, bias=False).double()
        self.head = nn.Linear(50, 3).double()
        self.thaw, self.drifts = thaw, drifts
        self.weight = [self.backbone.weight.detach().clone()] if hidden else None
        if hidden:
            del self.backbone
        else:
            self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(x @ self.weight[0].T if self.weight else self.backbone(x))

    def on_train_epoch_start(self):
        if self.thaw and self.current_epoch == 1:
            self.backbone.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        if self.drifts:
            self.backbone.weight.data.mul_(0.99)
        return super().training_step(batch, batch_idx)


HEAD, BACKBONE = 8 * 153, 8 * 300


@pytest.fixture
def tuned(fit, data):
    def run(update_transforms=(), group_size=None, **options):
        torch.manual_seed(0)
        module = Tuned(**options)
        loop = FederatedLoop(update_transforms=update_transforms, seed=1, client_fraction=0.5)
        fit(module, loop, data(val_size=0), group_size=group_size)
        return module, [(row["bytes_up"], row["bytes_down"]) for row in loop.rows]

    return run


@pytest.mark.parametrize("group_size", [None, 2])
def test_only_what_is_trained_is_counted(tuned, group_size):
    assert tuned(group_size=group_size)[1] == [(2 * HEAD, 2 * HEAD)] * 3
    both = 2 * (HEAD + BACKBONE)
    thawed = tuned(group_size=group_size, thaw=True)[1]
    assert thawed == [(2 * HEAD, 2 * HEAD), (both, both), (both, both)]


def test_a_frozen_tensor_that_changes_is_counted(tuned):
    both = 2 * (HEAD + BACKBONE)
    assert tuned(drifts=True)[1] == [(both, both)] * 3


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("transform", [TopK(0.1), Quantize(1)], ids=["k", "1"])
def test_transforms_see_what_is_trained(tuned, transform, group_size):
    frozen, sent = tuned([transform], group_size)
    hidden, expected = tuned([transform], group_size, hidden=True)
    assert torch.equal(frozen.head.weight, hidden.head.weight)
    assert [up for up, _ in sent] == [up for up, _ in expected]
    torch.manual_seed(0)
    assert torch.equal(frozen.backbone.weight, Tuned().backbone.weight)


def test_layers_that_are_thawed_join_what_a_client_has_kept(tuned):
    sent = tuned([TopK(0.1)], thaw=True)[1]
    assert sent[0][0] == 2 * 16 * (8 + 4)
    assert sent[1][0] == 2 * 46 * (8 + 4)


def test_a_fit_without_a_loop_says_that_it_is_no_federation(linear, data, trainer):
    runner = trainer(False, 2, reload_dataloaders_every_n_epochs=1, log_every_n_steps=1)
    with pytest.warns(UserWarning, match=r"no FederatedLoop.*callbacks=\[FederatedLoop"):
        runner.fit(linear(), datamodule=data(regression(), val=regression(9)))


class Asks(Linear):
    """Asks for the number of batches, as variational methods do."""

    def __init__(self):
        super().__init__(nn.Linear(6, 3).double())
        self.asked = []

    def ask(self, hook, batch_idx):
        trainer = self.trainer
        counts = trainer.num_training_batches, len(trainer.train_dataloader), trainer.is_last_batch
        self.asked.append((hook, batch_idx, *counts))

    def training_step(self, batch, batch_idx):
        self.ask("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ask("end", batch_idx)


class AsksMore(Asks):
    """Asks in each hook that counts local steps."""

    def on_train_batch_start(self, batch, batch_idx):
        self.ask("start", batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.ask("optimizer_step", batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class AsksBeside(L.Callback):
    """Asks in the hooks of a callback, which count the batches of the round."""

    def __init__(self):
        self.found, self.last, self.batches = set(), [], []

    def ask(self, trainer, *args):
        self.found |= {trainer.num_training_batches, len(trainer.train_dataloader)}

    on_train_batch_start = on_before_backward = ask

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ask(trainer)
        self.last.append(trainer.is_last_batch)
        self.batches.append(batch_idx)


class StepsOfClients(HyperparameterPolicy):
    """Client k makes k + 1 local steps."""

    def sample(self, round, clients):
        return {"num_steps": clients + 1}


@pytest.fixture
def of_uneven_clients(fit, data, blobs):
    """Fit a module to four clients, which make 1, 2, 3 and 4 local steps."""

    def run(module, is_lean=True, **options):
        loop = FederatedLoop(policy=StepsOfClients(), seed=1)
        with nullcontext() if is_lean else steps_by_lightning():
            fit(module, loop, data(blobs(24), batch_size=3), rounds=2, **options)
        return module

    return run


@pytest.mark.parametrize(
    ("kind", "is_lean", "hooks"),
    [
        (Asks, True, ["training_step", "end"]),
        (Asks, False, ["training_step", "end"]),
        (AsksMore, True, ["start", "optimizer_step", "training_step", "end"]),
    ],
    ids=["lean", "by Lightning", "hooks"],
)
def test_training_batches_are_those_of_the_client(of_uneven_clients, kind, is_lean, hooks):
    beside = AsksBeside()
    asked = of_uneven_clients(kind(), is_lean, callbacks=[beside]).asked
    of_clients = [(step, n, n, step == n - 1) for n in (1, 2, 3, 4) for step in range(n)]
    assert asked == [(hook, *counts) for counts in of_clients for hook in hooks] * 2
    assert beside.found == {10}
    assert beside.last == ([False] * 9 + [True]) * 2
    assert beside.batches == [*range(10)] * 2


class Plans(Linear):
    """Looks for the length of its schedule before the first round."""

    def __init__(self, hook, look):
        super().__init__(nn.Linear(6, 3).double())
        self.found, called = [], getattr(self, hook)

        def ask(*args, **options):
            self.found += look(self.trainer)
            return called(*args, **options)

        setattr(self, hook, ask)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        config = {"interval": "step", "scheduler": LambdaLR(optimizer, lambda step: 1.0)}
        return {"optimizer": optimizer, "lr_scheduler": config}


def batches(trainer):
    return [trainer.num_training_batches]


def batches_of_setup(trainer):
    """As modules do that want the loader early."""
    trainer.fit_loop.setup_data()
    assert isinstance(trainer.train_dataloader, DataLoader)
    return [len(trainer.train_dataloader), trainer.num_training_batches]


HOOKS = ["setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start"]


@pytest.mark.parametrize("look", [batches, batches_of_setup])
@pytest.mark.parametrize("hook", HOOKS)
def test_before_a_step_the_training_batches_are_those_of_the_longest_client(
    of_uneven_clients, hook, look
):
    module = of_uneven_clients(Plans(hook, look))
    assert set(module.found) == {4}


@pytest.mark.parametrize("hook", HOOKS)
def test_before_a_step_the_training_batches_of_a_stream_are_those_of_the_round(
    fit, data, blobs, hook
):
    federated = data(blobs(48), num_clients=2, batch_size=4, stream_steps=3)
    module = Plans(hook, batches)
    fit(module, FederatedLoop(), federated, rounds=2)
    assert set(module.found) == {2}  # of 8 samples, not of all 24
    # An epoch of 2 steps leaves steps for the second phase.
    phases = [Phase(["net.weight"], local_epochs=1), Phase("all")]
    loop = FederatedLoop(policy=Schedule(num_steps=4, phases=phases))
    fit(Plans(hook, batches), loop, federated, rounds=1)
