"""Evaluation on clients' own test samples: by hand, what is left alone, what is refused."""

import copy
import csv
import functools

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from by_hand import descended
from keeping import keep, resume
from lightning_fl import ClientModule
from lightning_fl.aggregators import Gossip
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.callbacks.client_table import summary
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.objectives import Ditto, FedEM, PerFedAvg, Proximal
from lightning_fl.optimizers import PFedMe
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from linear import Linear


@pytest.fixture
def data(blobs):
    def make(**options):
        options = {"partition": Dirichlet(0.5, min_size=10), "local_test_size": 0.3} | options
        return FederatedDataModule(blobs(160), num_clients=4, batch_size=None, seed=1, **options)

    return make


def accuracy(layer, data, client):
    x, y = data.train.fetch(data.local_tests[client])
    found = (x @ layer["weight"].T + layer["bias"]).argmax(1)
    return (found == y).double().mean().item()


def samples(data, client):
    return data.train.fetch(data.parts[client])


def negative_loss(module, batch):
    return -module.federated_losses(batch)


@pytest.mark.parametrize("group_size", [None, 3])
def test_hooks_of_the_transfer_are_those_of_an_evaluation(train, blobs, group_size):
    """Without the first hook, the module gets other inputs; with the second, augmented ones."""

    class Transfers(FederatedDataModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [-3 * batch[0], batch[1]]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            is_augmented = self.trainer is not None and self.trainer.training
            return [batch[0].roll(1, 1) if is_augmented else batch[0], batch[1]]

    data = Transfers(blobs(160), num_clients=4, batch_size=8, local_test_size=0.3, seed=1)
    callback = PersonalizedEvaluation(steps=0)
    module, _, data = train(callback, datamodule=data, group_size=group_size)
    layer = {"weight": -3 * module.net.weight, "bias": module.net.bias}
    for client, row in enumerate(callback.rows):
        assert row["server"] == pytest.approx(accuracy(layer, data, client))


@pytest.mark.parametrize("group_size", [None, 3])
def test_scores_by_hand(train, group_size):
    """Gradient descent on all of a client's samples, from the server's model and from the first."""
    callback = PersonalizedEvaluation(steps=3, local_steps=5)
    torch.manual_seed(0)
    first = nn.Linear(6, 3).double().state_dict()
    module, loop, data = train(callback, group_size=group_size)
    server = module.net.state_dict()
    assert [row["client"] for row in callback.rows] == [0, 1, 2, 3]
    for client, row in enumerate(callback.rows):
        personal = descended(server, samples(data, client), 3, 0.5)
        local = descended(first, samples(data, client), 5, 0.5)
        assert row["server"] == accuracy(server, data, client)
        assert row["personal"] == accuracy(personal, data, client)
        assert row["local"] == accuracy(local, data, client)
        assert row["test_samples"] == len(data.local_tests[client])
    for kind in ("server", "personal", "local"):
        for name, value in summary(callback.rows, kind).items():
            assert loop.rows[-1][f"{kind}/{name}"] == pytest.approx(value, rel=1e-6)


class Asking(Linear):
    """Warms up; asks the Trainer; its step takes no index, and skips clients with few samples."""

    def training_step(self, batch):
        if len(batch[0]) < 25:
            return None
        return self.trainer.max_epochs * super().training_step(batch, 0)

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: t / steps)]


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("lr", [None, 0.25])
def test_local_steps_are_those_that_a_trainer_allows(train, lr):
    callback = PersonalizedEvaluation(steps=3)
    loop = FederatedLoop(policy=Schedule(lr=lr, num_steps=2), seed=0)
    module, _, data = train(callback, module=Asking().double(), loop=loop)
    skipping = [len(part) < 25 for part in data.parts]
    assert {*skipping} == {True, False}
    for client, row in enumerate(callback.rows):
        steps = 0 if skipping[client] else 3
        personal = descended(module.net.state_dict(), samples(data, client), steps, 0.25, factor=2)
        assert row["personal"] == accuracy(personal, data, client)
    assert any(row["personal"] != row["server"] for row in callback.rows)


class Bound(ClientModule):
    """Runs its network through a function that is set on the module, as Lightning's DDP does."""

    def __init__(self, how):
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        super().__init__(net)
        if how == "method":
            self.forward = self.forward
        elif how == "method of a part":
            self.forward = net.forward
        elif how == "partial":
            self.forward = functools.partial(ClientModule.forward, self)
        elif how == "closure":
            self.forward = lambda x: self.net(x)


def test_functions_on_a_module_run_its_copy(train, flat):
    found = []
    for how in ("none", "method", "method of a part", "partial", "closure"):
        callback = PersonalizedEvaluation(steps=2)
        loop = FederatedLoop(buffers="average", policy=Schedule(lr=0.5, num_steps=1), seed=0)
        torch.manual_seed(0)
        module, _, _ = train(callback, rounds=1, loop=loop, module=Bound(how).double())
        found.append((flat(module), callback.rows))
    for vector, rows in found[1:]:
        assert torch.equal(vector, found[0][0])
        assert rows == found[0][1]


def test_clients_start_from_their_own_models(train):
    callback = PersonalizedEvaluation(steps=0)
    rule = Gossip("ring")
    loop = FederatedLoop(aggregator=rule, policy=Schedule(lr=0.5, num_steps=2), seed=0)
    _, _, data = train(callback, loop=loop)
    for client, row in enumerate(callback.rows):
        vector = rule.models[client]
        layer = {"weight": vector[:18].view(3, 6), "bias": vector[18:]}
        assert row["server"] == accuracy(layer, data, client)
        assert "personal" not in row


def test_the_personal_models_of_pfedme_are_measured(train):
    callback = PersonalizedEvaluation(steps=0)
    make = functools.partial(PFedMe, lr=0.05, personal_lr=0.05, lam=1.0, inner_steps=20)
    torch.manual_seed(0)
    module = ClientModule(nn.Linear(6, 3), optimizer=make).double()
    loop = FederatedLoop(policy=Schedule(num_steps=2), optimizer_state="keep", seed=0)
    _, _, data = train(callback, loop=loop, module=module)
    for client, row in enumerate(callback.rows):
        kept = loop.store.get(client)
        layer = {"weight": kept["optimizer.0.theta"], "bias": kept["optimizer.1.theta"]}
        assert row["kept"] == accuracy(layer, data, client)
    assert loop.rows[-1]["kept/mean"] > loop.rows[-1]["server/mean"]


KINDS = [("personal", [], ()), ("server", [], ["net.bias"]), ("kept", [Ditto()], ())]
KINDS += [("personal", None, ())]  # FedEM


@pytest.mark.parametrize(("kind", "terms", "local"), KINDS)
def test_a_new_module_loads_the_model_of_a_client(train, tmp_path, kind, terms, local):
    callback = PersonalizedEvaluation(0 if local else 2, metric=negative_loss, save_models=True)
    loop = FederatedLoop(policy=Schedule(lr=0.5, num_steps=2), seed=0, local_parameters=local)
    make = FedEM if terms is None else ClientModule
    module = make(nn.Linear(6, 3), *filter(None, [terms])).double()
    _, _, data = train(callback, loop=loop, module=module, logger=CSVLogger(tmp_path, "", ""))
    for client, row in enumerate(callback.rows):
        new = make(nn.Linear(6, 3)).double()
        new.load_state_dict(torch.load(tmp_path / "client_models" / f"{client}.pt"))
        batch = data.train.fetch(data.local_tests[client])
        assert row[kind] == pytest.approx(negative_loss(new, batch).mean().item())


def test_a_resumed_run_has_the_same_baseline(train, tmp_path):
    def run(rounds, **options):
        callback = PersonalizedEvaluation(local_steps=3)
        train(callback, rounds=rounds, **options)
        return callback.rows

    whole = run(4)
    run(2, **keep(tmp_path))
    assert run(4, **resume(tmp_path)) == whole


def test_what_is_missing_is_named(train, fit, data, foreign):
    with pytest.raises(FederationError, match="set local_test_size"):
        train(PersonalizedEvaluation(), datamodule=data(local_test_size=0.0))
    words = r"local_test_size must be a number in \[0, 1\), got 1.0"
    with pytest.raises(FederationError, match=words):
        data(local_test_size=1.0)
    single = data(partition=None, local_test_size=0.5)
    single.num_clients = 144
    with pytest.raises(FederationError, match="at least 2 samples per client, but client 0 has 1"):
        single.setup("fit")


class WithoutForward(ClientModule):
    forward = LightningModule.forward


class OneScore(ClientModule):
    """As in least squares and binary cross-entropy: all samples would be of class 0."""

    def forward(self, x):
        return super().forward(x)[:, :1]


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        (lambda module, batch: module(batch["x"]), ClientModule),
        (lambda module, batch: torch.tensor(1.0), ClientModule),
        (lambda module, batch: 1.0, ClientModule),
        (None, WithoutForward),
        (None, OneScore),
    ],
)
def test_a_metric_that_fails_ends_the_fit_before_the_first_step(train, metric, kind):
    module = kind(nn.Linear(6, 3)).double()
    before = module.net.weight.detach().clone()
    words = f"one score per sample of {kind.__name__}: give a metric|has 1 outputs"
    with pytest.raises(FederationError, match=words):
        train(PersonalizedEvaluation(metric=metric), module=module)
    assert torch.equal(module.net.weight, before)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_the_trainers(train, algorithm):
    clipped, free = (PersonalizedEvaluation(20, 20, metric=negative_loss) for _ in range(2))
    train(clipped, gradient_clip_val=1e-9, gradient_clip_algorithm=algorithm, rounds=1)
    train(free, rounds=1)
    for row, other in zip(clipped.rows, free.rows, strict=True):
        assert row["personal"] == pytest.approx(row["server"], abs=1e-6)
        assert row["local"] == pytest.approx(row["server"], abs=1e-6)
        assert other["personal"] > other["server"] + 0.01


def test_numbers_of_terms_are_those_of_the_policy(train):
    rows = []
    for mu, values in ((5.0, None), (0.0, {"mu": 5.0})):
        callback = PersonalizedEvaluation(steps=5, metric=negative_loss)
        torch.manual_seed(0)
        module = ClientModule(nn.Linear(6, 3), [Proximal(mu)]).double()
        policy = Schedule(lr=0.1, num_steps=2, values=values)
        train(callback, loop=FederatedLoop(policy=policy, seed=0), module=module)
        rows.append(callback.rows)
    assert rows[0] == rows[1]


def test_a_local_baseline_is_a_federation_of_one(train, data):
    """An epoch a round: what begins anew in a round, as momentum does, begins anew there, too."""
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    torch.manual_seed(0)
    module = ClientModule(nn.Linear(6, 3), optimizer=make).double()
    first = copy.deepcopy(module.net.state_dict())
    callback = PersonalizedEvaluation(steps=0, local_steps=3, lr=0.1)
    _, _, data = train(callback, module=module)
    for client, row in enumerate(callback.rows):
        local = descended(first, samples(data, client), 3, 0.1)  # batches are all of its samples
        assert row["local"] == accuracy(local, data, client)


def test_a_callback_of_an_earlier_run_starts_anew(train):
    used, new = (PersonalizedEvaluation(0, local_steps=3, metric=negative_loss) for _ in range(2))
    torch.manual_seed(5)
    train(used, module=ClientModule(nn.Linear(6, 3)).double())
    for callback in (used, new):
        train(callback)
    assert used.rows == new.rows


def test_a_trial_run_has_at_most_two_clients(train, blobs):
    for count in (1, 3):
        callback = PersonalizedEvaluation(steps=1)
        data = FederatedDataModule(blobs(60), num_clients=count, local_test_size=0.3)
        train(callback, datamodule=data, fast_dev_run=True)
        assert len(callback.rows) == min(count, 2)


def test_a_run_that_ends_early_is_measured(train, tmp_path):
    """Whoever stops it is asked after this callback."""
    logger = CSVLogger(tmp_path, name="", version="")
    stop = EarlyStopping("train_loss", patience=0, mode="max", check_on_train_epoch_end=True)
    callback = PersonalizedEvaluation(steps=1)
    _, loop, _ = train(callback, rounds=9, callbacks=[stop], logger=logger)
    assert 0 < loop.round < 9
    assert len(callback.rows) == 4
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert rows[-1]["personal/mean"]
    assert {int(row["step"]) for row in rows} == {*range(1, loop.round + 1)}


def test_after_the_last_round_the_policy_is_that_of_the_last(train):
    class Listed(Schedule):
        def sample(self, round, clients):
            rate = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)[round]
            return {"lr": rate.expand(len(clients)), "num_steps": 2}

    def personal(policy, **options):
        callback = PersonalizedEvaluation(steps=3, metric=negative_loss, **options)
        train(callback, rounds=3, loop=FederatedLoop(policy=policy, seed=0))
        return callback.rows

    assert personal(Listed()) == personal(Listed(), lr=0.3)
    assert personal(Listed()) != personal(Listed(), lr=0.2)


def test_a_baseline_needs_the_first_model(train, tmp_path):
    train(PersonalizedEvaluation(), rounds=1, **keep(tmp_path))
    with pytest.raises(FederationError, match="initial global model"):
        train(PersonalizedEvaluation(local_steps=3), **resume(tmp_path))


class Shifted(ClientModule):
    """A local bias, and a personal model that prefers the client's most frequent class."""

    federated_local_parameters = ("net.bias",)

    def federated_personalize(self, batches):
        labels = torch.cat([y for _, y in batches])
        with torch.no_grad():
            self.net.weight.zero_()
            self.net.bias.copy_(torch.bincount(labels, minlength=3))
        return True


@pytest.mark.parametrize("group_size", [None, 3])
def test_global_and_personal_models_by_hand(train, group_size):
    """The client that never trained has no model besides the global one and the method's."""
    callback = PersonalizedEvaluation(steps=0)
    torch.manual_seed(0)
    module = Shifted(nn.Linear(6, 3)).double()
    bias = module.net.bias.detach().clone()
    loop = FederatedLoop(policy=Schedule(lr=0.5, num_steps=2), seed=0, clients_per_round=3)
    _, _, data = train(callback, rounds=1, loop=loop, module=module, group_size=group_size)
    (absent,) = (c for c in range(4) if not loop.store.get(c))
    layer = {"weight": module.net.weight, "bias": bias}
    for client, row in enumerate(callback.rows):
        assert ("global" in row) == (client != absent)
        own = bias if client == absent else loop.store.get(client)["parameter.net.bias"]
        assert row["server"] == accuracy({**layer, "bias": own}, data, client)
        assert row.get("global", row["server"]) == accuracy(layer, data, client)
        _, labels = data.train.fetch(data.parts[client])
        _, y = data.train.fetch(data.local_tests[client])
        assert row["kept"] == (y == labels.mode().values).double().mean()
    values = torch.tensor([row["kept"] for row in callback.rows], dtype=torch.float64)
    assert loop.rows[-1]["kept/variance"] == pytest.approx(float(values.var(correction=0)))


@pytest.mark.filterwarnings("ignore:Found 1 module")
@pytest.mark.parametrize("kind", [ClientModule, PerFedAvg])
def test_layers_train_in_the_modes_of_the_run(train, kind):
    modes = set()

    class Noting(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled():
                modes.add(self.training)
            return super().forward(x)

    net = nn.Sequential(Noting(6, 4).eval(), nn.Linear(4, 3))
    module = kind(net, optimizer=functools.partial(torch.optim.SGD, lr=0.1)).double()
    train(PersonalizedEvaluation(steps=2, local_steps=2), module=module, rounds=1)
    assert modes == {False}
