"""Vectorized training gives the results of sequential training, up to rounding."""

import copy
import functools
from contextlib import contextmanager

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAvg
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.objectives import Proximal, Term
from lightning_fl.policies import HyperparameterPolicy, Schedule
from lightning_fl.types import FederationError
from linear import Linear

adam, adamw = (functools.partial(kind, lr=0.01) for kind in (torch.optim.Adam, torch.optim.AdamW))
sgd = functools.partial(torch.optim.SGD, lr=0.1)
momentum = functools.partial(sgd, momentum=0.9)
OPTIMIZERS = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": functools.partial(momentum, nesterov=True, weight_decay=0.01),
    "dampened": functools.partial(momentum, dampening=0.5, maximize=True),
    "adam": adam,
    "amsgrad": functools.partial(adam, amsgrad=True, weight_decay=0.01),
    "adamw": functools.partial(adamw, weight_decay=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
}


# --- vectorization does not change results --------------------------------------------------------


SLOW = ("amsgrad", "adamw", "adagrad")  # the others take the same paths


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in OPTIMIZERS],
)
def test_optimizers(agree, tiny, optimizer):
    group_size = (1, 3, 7) if optimizer == "momentum" else (3,)  # some, one and all of the clients
    agree(lambda: tiny(optimizer=OPTIMIZERS[optimizer]), group_size)


def test_an_optimiser_that_is_not_linear_in_its_rate(agree, tiny):
    def make():
        return tiny(optimizer=functools.partial(torch.optim.ASGD, lr=0.1, lambd=0.1))

    with pytest.raises(FederationError, match="different learning rates with ASGD"):
        agree(make)
    agree(make, federation={"policy": Schedule(num_steps=3)})


@pytest.mark.parametrize(
    ("batch_size", "steps_per_batch"), [(4, (2, "auto")), (10, (1, 3)), (None, (2, "auto"))]
)
def test_steps_in_a_batch(agree, tiny, ragged, steps_per_batch, batch_size):
    agree(
        lambda: tiny(optimizer=momentum),
        (3,),
        steps_per_batch,
        lambda: ragged(batch_size=batch_size),
    )


@pytest.mark.parametrize(("count", "lr"), [(4, True), (3, False), (1, True)])
def test_cohorts(agree, train, tiny, count, lr):
    policy = train.policy(lr=lr)
    agree(
        lambda: tiny(optimizer=adam),
        ("auto", 2),
        federation={"clients_per_round": count, "policy": policy},
    )


@pytest.mark.parametrize("lr", [False, True])
def test_a_client_keeps_its_momentum(agree, train, tiny, lr):
    federation = {
        "clients_per_round": 4,
        "optimizer_state": "keep",
        "policy": train.policy(lr=lr),
    }
    agree(lambda: tiny(optimizer=momentum), (1, 3, 7), 2, rounds=3, federation=federation)


@pytest.mark.parametrize(
    "clipping",
    [
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 100},
    ],
)
def test_clipping(agree, tiny, train, flat, clipping):
    agree(tiny, steps_per_batch=2, **clipping)
    ends = []
    for options in (clipping, {}):
        module = tiny()
        train(module, 3, **options)
        ends.append(flat(module))
    assert torch.equal(*ends) == (clipping["gradient_clip_val"] == 100)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers(agree, tiny, interval):
    class Scheduled(tiny.kind):
        def configure_optimizers(self):
            optimizer = momentum(self.parameters())
            halve = torch.optim.lr_scheduler.StepLR(optimizer, 2 if interval == "step" else 1, 0.5)
            return [optimizer], [{"scheduler": halve, "interval": interval}]

    agree(lambda: tiny(Scheduled), steps_per_batch=(1, 3), rounds=3)


# --- modules of all kinds -------------------------------------------------------------------------


class Norm(nn.Sequential):
    def __init__(self):
        # In place, as many do: a stack must not be written to while its gradient needs it.
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3))


@pytest.mark.parametrize("buffers", ["average", "server", "local"])
def test_batchnorm(agree, tiny, ragged, buffers):
    agree(
        lambda: tiny(net=Norm),
        (1, 3),
        steps_per_batch=2,
        datamodule=lambda: ragged(drop_last=True),
        federation={"buffers": buffers, "clients_per_round": 5},
    )


def test_batchnorm_in_a_client_module_is_not_filled_up(agree, ragged):
    def make():
        torch.manual_seed(0)
        return ClientModule(Norm(), [Proximal(0.1)], sgd).double()

    agree(make, datamodule=lambda: ragged(drop_last=True, batch_size=25))


def test_complex_parameters_in_a_client_module(agree, ragged):
    def make():
        torch.manual_seed(0)
        return ClientModule(Complex(), (), sgd).double()

    agree(make, (3,), datamodule=ragged)


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        self[2].weight = self[0].weight


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.all = nn.Sequential(self.inner, nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.all(x)


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self[0].requires_grad_(False)


class Complex(nn.Module):
    """A complex weight, whose gradient is complex too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).abs()


class OddComplex(Complex):
    """Before it comes an odd number of other numbers."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight = nn.Parameter(self._parameters.pop("weight"))

    def forward(self, x):
        return super().forward(x) + self.bias


class Counting(nn.Module):
    """Its buffers are set anew, not written to: a mean, a count and a flag."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            # Neither most steps nor a client that fails makes the most.
            self.count = self.count + (x[:, 0] > 0).sum() + 100 * x.isnan().any()
        return self.net(x - self.mean) + self.mask.exp()


class Parametrized(nn.Sequential):
    """Its weight is made of another that is trained."""

    def __init__(self):
        linear = nn.Linear(6, 3)
        nn.utils.parametrize.register_parametrization(linear, "weight", nn.Softplus())
        super().__init__(linear)


class Convolution(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.GroupNorm(2, 2), nn.Flatten(),
            nn.Linear(8, 3),
        )  # fmt: skip


@pytest.mark.parametrize(
    "net", [Tied, Twice, Frozen, Complex, OddComplex, Counting, Convolution, Parametrized]
)
def test_nets(agree, tiny, net):
    agree(lambda: tiny(net=net, optimizer=momentum))


def by_layer(module):
    return torch.optim.SGD(
        [
            {"params": module.net[0].parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": module.net[2].parameters(), "weight_decay": 0.1},
        ],
        lr=0.2,
    )


def by_dimensions(module):
    """As transformers are trained: no weight decay for biases."""
    return torch.optim.SGD(
        [{"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.5},
         {"params": [p for p in module.parameters() if p.ndim <= 1]}],
        lr=0.1,
    )  # fmt: skip


def made_before(module):
    return module.made


@pytest.mark.parametrize(
    ("configure", "options"),
    [
        (by_layer, {}),
        (by_dimensions, {}),
        (made_before, {}),
        (lambda module: sgd(module.net[2].parameters()), {}),
        (lambda module: sgd(module.net[2].parameters()), {"gradient_clip_val": 0.1}),
    ],
)
def test_optimisers_of_some_parameters(agree, tiny, configure, options):
    class Own(tiny.kind):
        def configure_optimizers(self):
            return configure(self)

    def make():
        module = tiny(Own)
        module.made = sgd(module.parameters())
        return module

    agree(make, (3,), **options)


def test_a_layer_that_is_frozen_for_a_client(agree, tiny):
    class Freezes(tiny.kind):
        def on_client_start(self):
            self.net[0].requires_grad_(self.current_epoch > 0)

    agree(lambda: tiny(Freezes), (1, 3), rounds=3)


def test_a_layer_that_is_frozen_in_a_later_round(agree, tiny):
    class Freezes(tiny.kind):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch == 0)

    agree(lambda: tiny(Freezes), (3,))


class Pairs(Dataset):
    """Dictionaries with noise of their own: not a data set that is in memory."""

    def __init__(self, tensors):
        self.x, self.y = tensors
        self.labels = self.y.tolist()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        noise = 0.1 * torch.randn(6, dtype=torch.float64) + np.random.rand()
        return {"x": self.x[i] + noise, "deep": [self.y[i]]}


def test_batches_of_any_shape_and_random_transforms(agree, tiny, blobs, ragged):
    class OfDicts(tiny.kind):
        def training_step(self, batch, batch_idx):
            return {"loss": F.cross_entropy(self.net(batch["x"]), batch["deep"][0])}

    agree(
        lambda: tiny(OfDicts),
        steps_per_batch=2,
        datamodule=lambda: ragged(Pairs(blobs(180).tensors)),
    )


def test_what_the_trainer_knows_is_known_in_a_step(agree, tiny):
    class Asks(tiny.kind):
        def training_step(self, batch, batch_idx):
            assert self.device.type == "cpu"
            return super().training_step(batch, batch_idx) * (1 + self.current_epoch)

    agree(lambda: tiny(Asks))


READS = {
    "optimizers": lambda m: m.optimizers().param_groups[0]["lr"],
    "trainer.optimizers": lambda m: m.trainer.optimizers[0].param_groups[0]["lr"],
    "global_step": lambda m: 1 + 1 / (1 + m.global_step),
    "num_training_batches": lambda m: m.trainer.num_training_batches,
    "is_last_batch": lambda m: 1 + m.trainer.is_last_batch,
}


@pytest.fixture
def reads(tiny):
    def make(name, since=0):
        class Reads(tiny.kind):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                return loss * READS[name](self) if self.current_epoch >= since else loss

        return tiny(Reads)

    return make


@pytest.mark.parametrize("name", READS)
def test_a_step_that_reads_what_clients_share_is_not_vectorized(agree, reads, name):
    with pytest.warns(UserWarning, match="one client after another, not at once: .* reads|uses"):
        agree(lambda: reads(name))


@pytest.mark.parametrize("name", ["optimizers", "global_step", "num_training_batches"])
def test_a_later_step_that_reads_what_clients_share_ends_the_run(train, reads, name):
    with pytest.raises(FederationError, match="--ckpt_path=last"):
        train(reads(name, since=1), 3)


class Short:
    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Named(Short):
    def training_step(self, batch, **options):
        return super().training_step(batch)


class Unnamed(Short):
    def training_step(self, *arguments):
        batch, batch_idx = arguments
        return super().training_step(batch) / (1 + batch_idx)


@pytest.mark.parametrize("kind", [Short, Named, Unnamed])
def test_a_step_takes_the_arguments_that_lightning_gives(agree, tiny, kind):
    agree(lambda: tiny(type("Own", (kind, tiny.kind), {})), (1, 3))


def test_a_loss_of_one_element_may_have_a_dimension(agree, tiny):
    class Stacked(tiny.kind):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)[None]

    agree(lambda: tiny(Stacked), (1, 3))


# --- ClientModule ---------------------------------------------------------------------------------


@pytest.fixture
def client():
    def make(kind=ClientModule, terms=(), optimizer=momentum):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        return kind(net, [term() for term in terms], optimizer).double()

    return make


class OwnStarts(FedAvg):
    """Every client starts somewhere else."""

    def models_for(self, clients):
        return self.server + 0.1 * (1 + clients[:, None])


def prox():
    return Proximal(0.5)


class Scale(Term):
    """A term with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, own, fixed, batch):
        return self.scale.square() + 0.1 * (own.params["net.0.bias"] * self.scale).sum()


class Confidence(Term):
    """A term of the outputs, a mean over the batch."""

    def forward(self, own, fixed, batch):
        return own.outputs.square().mean()


@pytest.mark.parametrize(
    ("terms", "optimizer"),
    [((), "sgd"), ((prox,), "momentum"), ((prox, Scale), "adam"), ((prox, Scale), "adamw")],
)
def test_the_clients_own_module(agree, client, terms, optimizer):
    agree(lambda: client(terms=terms, optimizer=OPTIMIZERS[optimizer]), (1, 3), 2)


@pytest.mark.parametrize(("terms", "group_size"), [((), (3,)), ((prox,), (1, 3, 7))])
def test_clients_that_start_from_models_of_their_own(agree, client, terms, group_size):
    rule = OwnStarts()
    agree(lambda: client(terms=terms), group_size, federation={"aggregator": rule})


def test_a_user_module_is_given_what_its_client_started_from(agree, tiny):
    class Near(tiny.kind):
        federated_global_parameters = {}  # noqa: RUF012  # a module asks for it by having it

        def training_step(self, batch, batch_idx):
            drift = sum(
                (p - self.federated_global_parameters[n]).square().sum()
                for n, p in self.named_parameters()
            )
            return super().training_step(batch, batch_idx) + 3 * drift

    agree(lambda: tiny(Near), federation={"aggregator": OwnStarts()})


def test_statistics_of_a_batch_do_not_see_padding_samples(agree, ragged):
    def make():
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(2, track_running_stats=True)  # means over the batch
        net = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2)), norm, nn.Flatten())
        return ClientModule(net.append(nn.Linear(4, 3)), (), sgd).double()

    agree(make, (3,), datamodule=ragged, federation={"policy": Schedule(num_steps=4)})


def test_a_term_of_the_data_does_not_see_padding_samples(agree, client):
    agree(lambda: client(terms=(Confidence,)))


def test_a_child_with_a_step_of_its_own(agree, client):
    class Own(ClientModule):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        def on_train_epoch_end(self):
            pass

    agree(lambda: client(Own))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("own", [False, True])
def test_compiled_vectorized_clients_do_the_same(agree, client, own):
    rule = OwnStarts() if own else FedAvg()
    agree(lambda: client(terms=(prox,)), (7,), 2, federation={"aggregator": rule}, compile=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_user_module_does_the_same(agree, tiny, ragged):
    agree(
        lambda: tiny(net=Norm),
        (7,),
        datamodule=lambda: ragged(drop_last=True),
        gradient_clip_val=0.3,
        compile=True,
    )


# --- clients that fail ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("tiny", {}), ("client", {"gradient_clip_val": 0.5}), ("keep", {})],
)
def test_a_client_that_diverges_touches_nobody_else(agree, tiny, client, ragged, kind, options):
    def broken():
        made = ragged()
        made.setup("fit")
        made.train.tensors[0][made.parts[2]] = torch.nan
        return made

    make = {
        "tiny": lambda: tiny(net=Counting, optimizer=adam),
        "client": lambda: client(terms=(prox,)),
        "keep": lambda: tiny(optimizer=momentum),
    }[kind]
    federation = {"optimizer_state": "keep" if kind == "keep" else "reset"}
    loop = agree(make, (3, 7), datamodule=broken, federation=federation, **options)
    assert [row["dropped_clients"] for row in loop.rows] == ["2"] * 2


@pytest.mark.parametrize("kind", ["tiny", "client"])
def test_a_padding_sample_changes_nothing(agree, tiny, client, ragged, kind):
    """A client that is done is padded with its first sample, on which it may never train."""

    def first_broken():
        made = ragged(batch_size=2)
        made.setup("fit")
        for part in made.parts:
            if len(part) > 30:
                made.train.tensors[0][part[0]] = torch.inf
        return made

    class FewSteps(HyperparameterPolicy):
        def sample(self, round, clients):
            return {"num_steps": torch.where(first_broken().num_samples > 30, 1, 3)}

    loop = agree(
        tiny if kind == "tiny" else lambda: client(terms=(prox,)),
        datamodule=first_broken,
        federation={"policy": FewSteps()},
    )
    figure = "loss" if kind == "tiny" else "train_loss"
    assert all(row["dropped"] == 0 and row[figure] < 9 for row in loop.rows)


@pytest.mark.filterwarnings(
    "ignore:.*dropped", "ignore:.*clients returned, too few", "ignore:the global model was kept"
)
def test_a_round_in_which_everyone_diverges_keeps_the_model(train, tiny, flat, ragged):
    federated = ragged()
    federated.setup("fit")
    federated.train.tensors[0][:] = torch.nan
    module = tiny()
    before = flat(module)
    loop = train(module, 3, datamodule=federated)
    assert torch.equal(flat(module), before)
    assert [row["dropped"] for row in loop.rows] == [7, 7]


# --- random layers --------------------------------------------------------------------------------


class Random(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Dropout(0.3), nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))


def test_one_vectorized_client_draws_what_the_module_draws(train, tiny):
    plain, vectorized = tiny(net=Random), tiny(net=Random)
    train(plain)
    train(vectorized, 1)
    for a, b in zip(plain.parameters(), vectorized.parameters(), strict=True):
        assert torch.equal(a, b)


def test_vectorized_clients_draw_the_same_for_the_same_seed_and_each_its_own(train, tiny, flat):
    ends = []
    for seed in (0, 0, 1):
        module = tiny(net=Random)
        train(module, 3, federation={"seed": seed})
        ends.append(flat(module))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_vectorized_clients_draw_different_numbers(train, tiny):
    class Noting(tiny.kind):
        def __init__(self):
            super().__init__()
            self.register_buffer("noise", torch.zeros(8))

        def training_step(self, batch, batch_idx):
            self.noise.copy_(torch.rand(8, dtype=torch.float64))
            return super().training_step(batch, batch_idx)

    seen = []

    class Keep(FedAvg):
        def update(self, clients):
            seen.extend(clients.delta[:, -8:])
            super().update(clients)

    train(tiny(Noting), 7, rounds=1, federation={"aggregator": Keep()})
    assert len(seen) == 7
    assert len(torch.stack(seen).unique()) == 56


# --- resume and checkpoints -----------------------------------------------------------------------


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step >= self.step:
            raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("setting", "optimizer", "steps_per_batch"),
    [({}, adam, 1), ({"optimizer_state": "keep", "buffers": "local"}, momentum, 2)],
)
@pytest.mark.parametrize("kind", ["round", "middle"])
def test_a_killed_run_resumes_bit_equal(
    train, tiny, ragged, tmp_path, kind, setting, optimizer, steps_per_batch
):
    def net():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))

    def run(**options):
        module = tiny(net=net, optimizer=optimizer)
        federated = ragged(drop_last=True)
        loop = train(module, 3, steps_per_batch, federated, setting, rounds=3, **options)
        return module.state_dict(), loop.rows, loop.store.rows

    if kind == "round":
        keep = RoundCheckpoint(str(tmp_path / "c"))
    else:
        keep = ModelCheckpoint(
            str(tmp_path / "c"), "last", every_n_train_steps=1, enable_version_counter=False
        )
    expected, rows, kept = run()
    path = tmp_path / "c" / "last.ckpt"
    # Some 3 groups of 3 steps a round.
    with pytest.raises(ZeroDivisionError):
        run(callbacks=[keep, StopAt(14 // steps_per_batch)], enable_checkpointing=True)
    assert torch.load(path, weights_only=True)["state_dict"].keys() == expected.keys()
    found, again, stored = run(callbacks=[keep], enable_checkpointing=True, ckpt_path=str(path))
    assert again == rows
    assert stored.keys() == kept.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("group_size", [(None, 3), (3, None), (2, 7)])
def test_a_checkpoint_resumes_with_another_group_size(train, tiny, flat, tmp_path, group_size):
    whole, begun, resumed = tiny(), tiny(), tiny()
    expected = train(whole, rounds=2).rows
    keep = RoundCheckpoint(str(tmp_path / "c"))
    train(begun, group_size[0], rounds=1, callbacks=[keep], enable_checkpointing=True)
    path = str(tmp_path / "c" / "last.ckpt")
    loop = train(
        resumed,
        group_size[1],
        rounds=2,
        callbacks=[keep],
        enable_checkpointing=True,
        ckpt_path=path,
    )
    torch.testing.assert_close(flat(resumed), flat(whole), atol=1e-12, rtol=0)
    assert [row["round"] for row in loop.rows] == [row["round"] for row in expected]


def test_a_stop_in_mid_round_leaves_the_server_model(train, tiny, flat):
    whole, stopped = tiny(), tiny()
    train(whole, 3, rounds=1)
    with pytest.raises(ZeroDivisionError):
        train(stopped, 3, rounds=2, callbacks=[StopAt(11)])
    assert torch.equal(flat(stopped), flat(whole))


class Saved(L.LightningModule):
    """It keeps its hyperparameters."""

    def __init__(self, width=4, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


@pytest.mark.filterwarnings("ignore:You passed.*val_dataloader|.*validation_step")
def test_a_checkpoint_is_the_modules(train, tmp_path):
    module = Saved(width=2).double()
    group_size = VectorizedClients(module)
    assert group_size.hparams is module.hparams
    keep = RoundCheckpoint(str(tmp_path / "c"))
    train(module, 3, callbacks=[keep], enable_checkpointing=True)
    path = tmp_path / "c" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    assert (
        saved["state_dict"].keys() == module.state_dict().keys() == group_size.state_dict().keys()
    )
    assert saved["hyper_parameters"] == {"width": 2, "lr": 0.1}
    plain = Saved.load_from_checkpoint(path)
    torch.testing.assert_close(plain.net[0].weight, module.net[0].weight.float())
    fresh = VectorizedClients(Saved(width=2).double())
    fresh.load_state_dict(saved["state_dict"])
    assert torch.equal(fresh.module.net[0].weight, module.net[0].weight)


@pytest.mark.filterwarnings("ignore:You passed.*val_dataloader|.*validation_step")
def test_loggers_get_the_modules_hyper_parameters(train, tmp_path):
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    train(Saved(width=2).double(), 3, logger=logger)
    logged = logger.experiment.hparams
    assert {name: logged[name] for name in ("width", "lr")} == {"width": 2, "lr": 0.1}
    assert logged["aggregator"] == "FedAvg"


# --- after training -------------------------------------------------------------------------------


def test_validation_test_and_prediction_are_the_modules(trainer, foreign, data, blobs):
    class Whole(type(foreign())):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    module = Whole().double()
    federated = data(test=blobs(30, seed=5))
    for verb in ("validate", "test"):
        found = [
            getattr(trainer(False), verb)(user, datamodule=federated, verbose=False)
            for user in (module, VectorizedClients(module))
        ]
        assert found[0] == found[1]
        assert found[0][0]
    predicted = [
        trainer(False).predict(u, datamodule=federated) for u in (module, VectorizedClients(module))
    ]
    assert torch.equal(predicted[0][0], predicted[1][0])


def test_it_runs_and_prints_and_is_copied_as_the_module(tiny):
    module = tiny()
    module.forward = module.net.forward
    group_size = VectorizedClients(module)
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(group_size(x), module(x))
    other = copy.deepcopy(group_size)
    with torch.no_grad():
        other.module.net[0].weight.zero_()
    assert module.net[0].weight.abs().sum() > 0
    other.load_state_dict(group_size.state_dict())
    assert torch.equal(other.module.net[0].weight, module.net[0].weight)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["group_size", "steps_per_batch"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "many", None, True])
def test_options_out_of_range_are_refused(tiny, name, value):
    with pytest.raises(
        FederationError, match=f"{name} must be an integer of at least 1, got {value!r}: .* auto"
    ):
        VectorizedClients(tiny(), **{name: value})


def test_only_a_module_of_lightning_is_vectorized(tiny):
    with pytest.raises(
        FederationError, match="VectorizedClients takes a LightningModule, got Linear"
    ):
        VectorizedClients(nn.Linear(1, 1))
    with pytest.raises(
        FederationError, match="VectorizedClients takes a LightningModule, got VectorizedClients"
    ):
        VectorizedClients(VectorizedClients(tiny()))


def test_manual_optimisation_is_refused(train, tiny):
    module = tiny()
    module.automatic_optimization = False
    with pytest.raises(FederationError, match="Tiny uses manual optimization"):
        train(module, 3)


@pytest.mark.parametrize("fitted", [False, True])
def test_vectorized_clients_without_a_loop_are_refused(trainer, tiny, data, fit, fitted):
    group_size = VectorizedClients(tiny())
    if fitted:
        fit(group_size)
    with pytest.raises(FederationError, match="VectorizedClients requires a FederatedLoop"):
        trainer(False, log_every_n_steps=1).fit(group_size, datamodule=data())


@pytest.mark.parametrize("group_size", [1, 3])
def test_fast_dev_run_is_one_tiny_round(train, tiny, group_size):
    loop = train(tiny(), group_size, fast_dev_run=5)
    assert [row["clients"] for row in loop.rows] == [5]


# --- where samples come from ----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [10, None])
def test_local_steps_are_fetched_one_at_a_time_or_together(trained, tiny, ragged, batch_size):
    ends, fetched = [], []
    for collate in (None, lambda samples: torch.utils.data.default_collate(samples)):
        module, data = tiny(), ragged(batch_size=batch_size, collate_fn=collate)
        ends.append(trained(VectorizedClients(module, 3), module, data))
        fetched.append(data.can_fetch_steps)
    assert torch.equal(*ends)
    assert fetched == [True, False]


def test_what_a_data_module_does_on_the_device_it_does_for_each_local_step(trained, tiny, blobs):
    class Doubled(FederatedDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return 2 * batch[0], batch[1]

    train = blobs(120)
    twice = TensorDataset(2 * train.tensors[0], train.tensors[1])
    options = {"num_clients": 4, "batch_size": 8, "val_size": 12, "seed": 1}
    ends = []
    for data in (Doubled(train, **options), FederatedDataModule(twice, **options)):
        module = tiny()
        ends.append(trained(VectorizedClients(module, 2), module, data))
    assert torch.equal(*ends)


def test_a_module_that_keeps_its_samples_keeps_them_as_they_were(trained, tiny, ragged):
    class Keeps(tiny.kind):
        def __init__(self, **options):
            super().__init__(**options)
            self.kept = []

        def training_step(self, batch, batch_idx):
            if batch[0].sum().item() is not None:  # which cannot be mapped
                self.kept.append((batch[0], batch[0].clone()))
            return super().training_step(batch, batch_idx)

    module = tiny(Keeps)
    trained(VectorizedClients(module, 3), module, ragged())
    assert len(module.kept) > 20
    assert all(torch.equal(kept, copied) for kept, copied in module.kept)


def test_loader_workers_load_the_same_samples_for_vectorized_clients(trained, tiny, ragged):
    ends, fetched = [], []
    for workers in (0, 2):
        module, data = tiny(), ragged(num_workers=workers)
        ends.append(trained(VectorizedClients(module, 3), module, data))
        fetched.append(data.can_fetch_steps)
    assert torch.equal(*ends)
    assert fetched == [True, False]


# --- modules that do unusual things ---------------------------------------------------------------


class OwnNames(Linear):
    """Has attributes of its own with names that the library once used, each of another type."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sample_weight", torch.tensor([1.0, 5.0, 0.2]))
        self.fixed = nn.Linear(6, 3)
        self.losses = nn.ModuleList([nn.CrossEntropyLoss()])
        self.local_parameters = 0.5
        self.knows_weights = True

    def record(self, loss, factor):
        return loss * factor

    def training_step(self, batch, _):
        outputs = self.net(batch[0]) + self.fixed(batch[0])
        loss = F.cross_entropy(outputs, batch[1], weight=self.sample_weight)
        return self.record(loss + self.losses[0](outputs, batch[1]), self.local_parameters)


class OwnDictionary(Linear):
    """Has the same loss, and names with values that the library would take for its own."""

    def __init__(self):
        super().__init__()
        self.fixed, self.sample_weight, self.losses = {"scale": 2.0}, None, []
        self.knows_weights, self.local_parameters = True, 0.5

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.fixed["scale"]
        return self.record(loss, self.local_parameters)

    def record(self, loss, factor):
        return loss * factor if self.sample_weight is None else loss


@pytest.mark.parametrize("kind", [OwnNames, OwnDictionary])
def test_a_modules_own_names_are_its_own(agree, tiny, ragged, kind):
    modules = []

    def make():
        modules.append(tiny(kind))
        return modules[-1]

    agree(make, group_size=(4,), datamodule=ragged)
    for module in modules:
        assert module.local_parameters == 0.5
        if kind is OwnDictionary:
            assert (module.fixed, module.sample_weight, module.losses) == ({"scale": 2.0}, None, [])


@pytest.mark.parametrize("group_size", [None, 4])
def test_a_modules_own_names_change_nothing(train, tiny, flat, group_size):
    found = []
    for kind in (OwnDictionary, Linear):
        train(module := tiny(kind), group_size)
        found.append(flat(module))
    torch.testing.assert_close(*found, atol=1e-14, rtol=0)


class Unfreezes(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_parameters_that_come_later_are_refused(train, tiny, data):
    with pytest.raises(FederationError, match="after the start"):
        train(tiny(), 2, datamodule=data(), callbacks=[Unfreezes()])


def test_vectorized_clients_have_the_dtype_of_their_module(foreign):
    """Data modules bring samples to it."""
    assert VectorizedClients(foreign()).dtype == torch.float64
    assert VectorizedClients(foreign().float()).dtype == torch.float32


# --- parameters of other kinds --------------------------------------------------------------------


class Words(Linear):
    """Looks up words; its gradients may be sparse, and a parameter may hold integers."""

    def __init__(self, sparse, momentum=0.0):
        super().__init__()
        self.words, self.net = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 3)
        self.order = nn.Parameter(torch.tensor([2, 0, 2**60, 1]), requires_grad=False)
        self.momentum = momentum

    def training_step(self, batch, batch_idx):
        found = self.words(batch[0].abs().clamp(max=4).long()).mean(1)
        return F.cross_entropy(self.net(found[:, self.order % 4]), batch[1])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.5, momentum=self.momentum)


@pytest.mark.parametrize(("sparse", "momentum"), [(False, 0.0), (True, 0.0), (True, 0.9)])
@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_sparse_gradients_and_integer_parameters(agree, tiny, sparse, momentum):
    made = []

    def make():
        made.append(tiny(Words, sparse, momentum))
        return made[-1]

    agree(make, (1, 3))
    assert all(module.order.tolist() == [2, 0, 2**60, 1] for module in made)


@pytest.mark.parametrize("uses", [None, "term", "subclass"])
def test_client_hooks_of_terms_run_for_each_client_only_if_one_uses_them(fit, data, uses):
    calls = []

    class Marks(Proximal):
        def on_client_end(self, module):
            calls.append(module.net.weight.detach().clone())

    class Module(ClientModule):
        def on_client_start(self):
            super().on_client_start()
            calls.append(self.net.weight.detach().clone())

    made = []

    class Watched(VectorizedClients):
        def _call_for_each(self, name):
            with watched_clients(self.runner.stacks, made):
                super()._call_for_each(name)

    kind = Module if uses == "subclass" else ClientModule
    term = Marks(0.1) if uses == "term" else Proximal(0.1)
    module = kind(torch.nn.Linear(6, 3), [term], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    options = {"policy": Schedule(num_steps=2), "buffers": "average", "seed": 1}
    loop = FederatedLoop(**options, check=False)  # which calls hooks of copies
    fit(Watched(module.double(), group_size=4, compile=False), loop, data(num_clients=4), rounds=1)
    assert len(calls) == (0 if uses is None else 4)
    assert made == ([] if uses is None else list(range(4)))
    assert module.trainer.callback_metrics["train_loss"] > 0


@contextmanager
def watched_clients(stacks, made):
    """Note the rows whose tensors are put into the module."""
    client = stacks.client

    def watched(row):
        made.append(row)
        return client(row)

    stacks.client = watched
    yield
    del stacks.client
