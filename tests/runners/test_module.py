"""Vectorized training gives the results of sequential training, up to rounding."""

import copy
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import Dataset

from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.aggregators import FedAvg
from lightning_fl.callbacks import RoundCheckpoint
from lightning_fl.objectives import Proximal, Term
from lightning_fl.policies import HyperparameterPolicy
from lightning_fl.types import FederationError
from linear import Linear
from own_starts import OwnStarts
from written import Written

adam = functools.partial(torch.optim.Adam, lr=0.01)
sgd = functools.partial(torch.optim.SGD, lr=0.1)
momentum = functools.partial(sgd, momentum=0.9)


# --- vectorization does not change results --------------------------------------------------------


def test_group_size_does_not_change_results(agree, tiny):
    agree(lambda: tiny(optimizer=momentum), (1, 3, 7))  # one, some and all of the clients


@pytest.mark.parametrize(
    ("batch_size", "most_steps"), [(4, (2, 50)), (10, (1, 3)), (None, (2, 50))]
)
def test_most_steps_do_not_change_results(agree, tiny, ragged, most_steps, batch_size):
    data = functools.partial(ragged, batch_size=batch_size)
    agree(lambda: tiny(optimizer=momentum), (3,), most_steps, data)


# --- modules of all kinds -------------------------------------------------------------------------


def norm():
    # In place, as many do: a stack must not be written to while its gradient needs it.
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3))


@pytest.mark.filterwarnings("ignore:Found 2 module.* in eval mode")
def test_layers_that_the_user_set_to_eval_stay_so(agree, tiny):
    """Also after validation, which sets all layers to eval and must restore each one's mode."""

    def net():
        layers = nn.BatchNorm1d(6).eval(), nn.Dropout(0.5).eval(), nn.Linear(6, 3)
        return nn.Sequential(nn.Linear(6, 6), *layers)

    agree(lambda: tiny(net=net), (1, 3), most_steps=2, rounds=3)
    for module in agree.modules:
        assert [part.training for part in module.net] == [True, False, False, True]
        assert module.net[1].num_batches_tracked == 0


def tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def twice():
    """One layer under two names."""
    inner = nn.Linear(6, 6)
    layers = nn.Sequential(inner, nn.Tanh(), nn.Linear(6, 3))
    return Written(lambda net, x: net.layers(x), inner=inner, layers=layers)


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


def parametrized():
    """Its weight is made of another that is trained."""
    net = nn.Linear(6, 3)
    return nn.utils.parametrize.register_parametrization(net, "weight", nn.Softplus())


@pytest.mark.parametrize("net", [tied, twice, Counting, parametrized])
def test_vectorized_nets_agree(agree, tiny, net):
    agree(lambda: tiny(net=net, optimizer=momentum))


def by_layer(module):
    return torch.optim.SGD(
        [
            {"params": module.net[0].parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": module.net[2].parameters(), "weight_decay": 0.1},
        ],
        lr=0.2,
    )


@pytest.mark.parametrize(
    ("configure", "options"),
    [
        (by_layer, {}),
        (lambda module: module.made, {}),
        (lambda module: sgd(module.net[2].parameters()), {"gradient_clip_val": 0.1}),
    ],
)
def test_optimizers_of_some_parameters_agree(agree, tiny, configure, options):
    def make():
        module = tiny()
        module.made = sgd(module.parameters())
        module.optimizer = lambda params: configure(module)
        return module

    agree(make, (3,), **options)


@pytest.mark.parametrize("hook", ["on_client_start", "on_train_epoch_start"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_layer_that_a_hook_freezes_is_not_trained(agree, tiny, hook, is_late):
    def freeze(self):
        self.net[0].requires_grad_((self.current_epoch > 0) != is_late)

    agree(lambda: tiny(type("Freezes", (tiny.kind,), {hook: freeze})), (1, 3), rounds=3)


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


def test_batches_of_dictionaries_and_random_transforms_agree(agree, tiny, blobs, ragged):
    class OfDicts(tiny.kind):
        def training_step(self, batch, batch_idx):
            return {"loss": F.cross_entropy(self.net(batch["x"]), batch["deep"][0])}

    data = functools.partial(ragged, Pairs(blobs(180).tensors))
    agree(lambda: tiny(OfDicts), most_steps=2, datamodule=data)


READS = {
    "optimizers": lambda m: m.optimizers().param_groups[0]["lr"],
    "trainer.optimizers": lambda m: m.trainer.optimizers[0].param_groups[0]["lr"],
    "global_step": lambda m: 1 + 1 / (1 + m.global_step),
    "num_training_batches": lambda m: m.trainer.num_training_batches,
    "is_last_batch": lambda m: 1 + m.trainer.is_last_batch,
}


@pytest.mark.parametrize("name", READS)
def test_a_step_that_reads_what_clients_share_is_not_vectorized(agree, tiny, name):
    def read(module, loss, *_):
        return loss * READS[name](module)

    with pytest.warns(UserWarning, match="one client after another, not at once: .* reads|uses"):
        agree(lambda: tiny(step=read))


@pytest.mark.parametrize("name", ["optimizers", "global_step", "num_training_batches"])
def test_a_later_step_that_reads_what_clients_share_ends_the_run(train, tiny, name):
    def read_later(module, loss, *_):
        return loss * READS[name](module) if module.current_epoch else loss

    with pytest.raises(FederationError, match="--ckpt_path=last"):
        train(tiny(step=read_later), 3)


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


class OneElement(Short):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch)[None]


@pytest.mark.parametrize("kind", [Short, Named, Unnamed, OneElement])
def test_forms_of_training_step_agree(agree, tiny, kind):
    agree(lambda: tiny(type("Own", (kind, tiny.kind), {})), (1, 3))


# --- ClientModule ---------------------------------------------------------------------------------


@pytest.fixture
def client(tiny):
    def make(kind=ClientModule, terms=(), optimizer=momentum, net=tiny.net):
        torch.manual_seed(0)
        return kind(net(), [term() for term in terms], optimizer).double()

    return make


def prox():
    return Proximal(0.5)


class Scale(Term):
    """A term with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, own, fixed, batch):
        return self.scale.square() + 0.1 * (own.params["net.0.bias"] * self.scale).sum()


def centered():
    """Takes the mean over the samples of a batch, and is no BatchNorm."""
    center = Written(lambda _, x: x - x.mean(0))
    return nn.Sequential(nn.Linear(6, 5), center, nn.Linear(5, 3))


def instance_norm():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)  # means over the batch
    layers = nn.Linear(6, 4), nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers)


class OwnStep(ClientModule):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self):
        pass


#: Modules of the library; batches of those that mix samples must not be filled up.
CLIENT_MODULES = {
    "terms": {"terms": (prox, Scale), "optimizer": adam},
    "own step": {"kind": OwnStep},
    "instance norm": {"net": instance_norm},
    "centered": {"net": centered},
}


@pytest.mark.parametrize("options", CLIENT_MODULES.values(), ids=CLIENT_MODULES)
def test_client_modules_agree(agree, client, ragged, options):
    data = functools.partial(ragged, batch_size=25)
    agree(lambda: client(**options), (1, 3, 7), 2, datamodule=data)


def test_a_user_module_is_given_what_its_client_started_from(agree, tiny):
    def near(module, loss, *_):
        start = module.federated_global_parameters
        return loss + 3 * sum((p - start[n]).square().sum() for n, p in module.named_parameters())

    # A module asks for them by having the attribute.
    kind = type("Near", (tiny.kind,), {"federated_global_parameters": {}})
    agree(lambda: tiny(kind, step=near), federation={"aggregator": OwnStarts()})
    assert [module.federated_global_parameters for module in agree.modules] == [{}, {}]


@pytest.mark.filterwarnings("ignore:validation and test use the global")
def test_a_local_parameter_starts_from_the_clients_own_value_whoever_names_it(agree, client, flat):
    class Named(ClientModule):
        federated_local_parameters = ("net.2.weight",)

    def found(kind, **federation):
        agree(lambda: client(kind, [prox]), federation=federation, rounds=3)
        return flat(agree.modules[0])

    patterns = Named.federated_local_parameters
    assert found(Named).equal(found(ClientModule, local_parameters=patterns))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["client", "own starts", "user module"])
def test_compiled_steps_do_not_change_results(agree, client, tiny, ragged, kind):
    if kind == "user module":
        data, options = functools.partial(ragged, drop_last=True), {"gradient_clip_val": 0.3}
        agree(lambda: tiny(net=norm), (7,), 1, data, compile=True, **options)
    else:
        rule = OwnStarts() if kind == "own starts" else FedAvg()
        federation = {"aggregator": rule}
        agree(lambda: client(terms=(prox,)), (7,), 2, federation=federation, compile=True)


# --- clients that fail ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(
    ("kind", "options"), [("tiny", {}), ("client", {"gradient_clip_val": 0.5}), ("keep", {})]
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

    make = tiny if kind == "tiny" else lambda: client(terms=(prox,))
    loop = agree(make, datamodule=first_broken, federation={"policy": FewSteps()})
    figure = "loss" if kind == "tiny" else "train_loss"
    assert all(row["dropped"] == 0 and row[figure] < 9 for row in loop.rows)


# --- random layers --------------------------------------------------------------------------------


def test_one_vectorized_client_draws_what_the_module_draws(train, tiny, flat):
    def random():
        return nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))

    plain, vectorized = tiny(net=random), tiny(net=random)
    train(plain)
    train(vectorized, 1)  # products of batches are rounded
    torch.testing.assert_close(flat(plain), flat(vectorized), rtol=0, atol=1e-13)


def test_vectorized_clients_draw_different_numbers(train, tiny):
    def note(module, loss, *_):
        module.noise.copy_(torch.rand(8, dtype=torch.float64))
        return loss

    noting, seen = tiny(step=note), []
    noting.register_buffer("noise", torch.zeros(8, dtype=torch.float64))

    class Keep(FedAvg):
        def update(self, clients):
            seen.extend(clients.delta[:, -8:])
            super().update(clients)

    train(noting, 7, rounds=1, federation={"aggregator": Keep()})
    assert len(seen) == 7
    assert len(torch.stack(seen).unique()) == 56


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(None, 3), (3, None), (2, 7)])
def test_a_checkpoint_resumes_with_another_group_size(train, tiny, flat, tmp_path, first, second):
    whole, begun, resumed = tiny(), tiny(), tiny()
    expected = train(whole).rows
    options = {"callbacks": [RoundCheckpoint(str(tmp_path))], "enable_checkpointing": True}
    train(begun, first, rounds=1, **options)
    loop = train(resumed, second, ckpt_path=str(tmp_path / "last.ckpt"), **options)
    torch.testing.assert_close(flat(resumed), flat(whole), atol=1e-12, rtol=0)
    assert [row["round"] for row in loop.rows] == [row["round"] for row in expected]


class Saved(Linear):
    """It keeps its hyperparameters."""

    def __init__(self, width=4, lr=0.1):
        net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))
        super().__init__(net, functools.partial(torch.optim.SGD, lr=lr))
        self.save_hyperparameters()


def test_a_checkpoint_is_the_modules(train, tmp_path):
    module = Saved(width=2).double()
    group_size = VectorizedClients(module)
    assert group_size.hparams is module.hparams
    assert group_size.hparams_initial == module.hparams_initial
    keep = RoundCheckpoint(str(tmp_path / "c"))
    train(module, 3, callbacks=[keep], enable_checkpointing=True)
    path = tmp_path / "c" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    for user in (module, group_size):
        assert saved["state_dict"].keys() == user.state_dict().keys()
    assert saved["hyper_parameters"] == {"width": 2, "lr": 0.1}
    plain = Saved.load_from_checkpoint(path)
    torch.testing.assert_close(plain.net[0].weight, module.net[0].weight.float())
    fresh = VectorizedClients(Saved(width=2).double())
    fresh.load_state_dict(saved["state_dict"])
    assert torch.equal(fresh.module.net[0].weight, module.net[0].weight)


# --- after training -------------------------------------------------------------------------------


def test_validation_test_and_prediction_are_the_modules(trainer, foreign, data, blobs):
    class Whole(type(foreign())):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    module, federated = Whole().double(), data(test=blobs(30, seed=5))
    users = module, VectorizedClients(module)
    for verb in ("validate", "test"):
        found = [
            getattr(trainer(False), verb)(user, datamodule=federated, verbose=False)
            for user in users
        ]
        assert found[0] == found[1]
        assert found[0][0]
    predicted = [trainer(False).predict(user, datamodule=federated)[0] for user in users]
    assert torch.equal(*predicted)


def test_it_runs_and_prints_and_is_copied_as_the_module(tiny):
    group_size = VectorizedClients(module := tiny())
    x = torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(group_size(x), module(x))
    other = copy.deepcopy(group_size)
    with torch.no_grad():
        other.module.net[0].weight.zero_()
    assert module.net[0].weight.abs().sum() > 0
    other.load_state_dict(group_size.state_dict())
    assert torch.equal(other.module.net[0].weight, module.net[0].weight)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.0, "many", None, True])
def test_group_size_out_of_range_is_refused(tiny, value):
    expected = f"group_size must be an integer of at least 1, got {value!r}: .* auto"
    with pytest.raises(FederationError, match=expected):
        VectorizedClients(tiny(), group_size=value)


def test_only_a_module_of_lightning_is_vectorized(tiny):
    for other in (nn.Linear(1, 1), VectorizedClients(tiny())):
        words = f"VectorizedClients takes a LightningModule, got {type(other).__name__}"
        with pytest.raises(FederationError, match=words):
            VectorizedClients(other)


@pytest.mark.parametrize("fitted", [False, True])
def test_vectorized_clients_without_a_loop_are_refused(trainer, tiny, data, fit, fitted):
    group_size = VectorizedClients(tiny())
    if fitted:
        fit(group_size)
    with pytest.raises(FederationError, match="VectorizedClients requires a FederatedLoop"):
        trainer(False, log_every_n_steps=1).fit(group_size, datamodule=data())


# --- where samples come from ----------------------------------------------------------------------


COLLATE = {"collate_fn": lambda samples: torch.utils.data.default_collate(samples)}


@pytest.mark.parametrize(
    "options",
    [COLLATE, {"num_workers": 2}, COLLATE | {"batch_size": None}],
    ids=["collate_fn", "num_workers", "whole batches"],
)
def test_steps_fetched_together_are_those_fetched_singly(train, tiny, flat, options, ragged):
    ends, fetched = [], []
    for given in ({n: v for n, v in options.items() if n == "batch_size"}, options):
        data = ragged(**given)
        train(module := tiny(), 3, datamodule=data)
        ends.append(flat(module))
        fetched.append(data.can_fetch_steps)
    assert torch.equal(*ends)
    assert fetched == [True, False]


# --- modules that do unusual things ---------------------------------------------------------------


class Unfreezes(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_parameters_that_come_later_are_refused(train, tiny, data):
    with pytest.raises(FederationError, match="trains 1 tensors that are not parameters"):
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
    agree(lambda: tiny(Words, sparse, momentum), (1, 3))
    assert all(module.order.tolist() == [2, 0, 2**60, 1] for module in agree.modules)


@pytest.mark.filterwarnings("ignore:.*trains one client after another")
def test_samples_that_a_module_keeps_do_not_change(train, tiny):
    kept = []

    def keep(module, loss, batch, batch_idx):
        if batch[0].sum().item() is not None:  # which cannot be mapped
            kept.append((batch[0], batch[0].clone()))
        return loss

    train(tiny(step=keep), 3)
    assert len(kept) > 20
    assert all(torch.equal(*pair) for pair in kept)
