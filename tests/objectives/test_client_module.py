"""A client's local objective: its loss and every figure that it logs, by hand."""

import functools
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from by_hand import Batches
from lightning_fl import ClientModule
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.objectives import DPSGD, FedEM, FedProto, ModelView, Proximal, Term
from lightning_fl.partition import QuantitySkew
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError


@pytest.fixture
def module():
    """A linear classifier of blobs in float64, always the same."""

    def make(kind=ClientModule, terms=(), **options):
        torch.manual_seed(0)
        return kind(nn.Linear(6, 3), terms, **options).double()

    return make


def cross_entropy(weight, bias, x, y):
    """Each sample's loss and the gradient of their mean, without autograd."""
    p = (x @ weight.T + bias).softmax(1)
    error = p.clone()
    error[torch.arange(len(y)), y] -= 1
    return -p[torch.arange(len(y)), y].log(), error.T @ x / len(y), error.mean(0)


def own(module):
    return module.net.weight.detach().clone(), module.net.bias.detach().clone()


def figures(kind, weight, bias, x, y):
    """What validation or a test logs."""
    loss = cross_entropy(weight, bias, x, y)[0].mean()
    accuracy = ((x @ weight.T + bias).argmax(1) == y).double().mean()
    return {f"{kind}_loss": float(loss), f"{kind}_acc": float(accuracy)}


# --- by hand --------------------------------------------------------------------------------------


def test_the_loss_of_a_step_is_the_mean_plus_the_terms(module, blobs):
    batch = blobs(7).tensors
    made = module(terms=[Proximal(mu=0.5), Proximal(mu=0.1)])
    made.federated_global_parameters = {
        name: p.detach().clone() for name, p in made.named_parameters()
    }
    start = own(made)
    with torch.no_grad():
        made.net.weight += 0.2
    loss, gradient, _ = cross_entropy(made.net.weight.detach(), start[1], *batch)
    found = made.training_step(batch, 0)
    # 18 weights are 0.2 away.
    expected = loss.mean() + 0.6 / 2 * 18 * 0.2**2
    torch.testing.assert_close(found["loss"].detach(), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(found["task_loss"], loss.mean(), atol=1e-12, rtol=0)
    found["loss"].backward()
    torch.testing.assert_close(made.net.weight.grad, gradient + 0.6 * 0.2, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mu", [None, 0.0, 0.7])
def test_all_figures_of_a_federation_are_those_by_hand(fit, module, data, blobs, trainer, mu):
    made = module(terms=[] if mu is None else [Proximal(mu)])
    (weight, bias), seen = own(made), Batches()
    sizes = {"batch_size": 16, "eval_batch_size": 25}  # 25, 25 and 10
    samples = data(num_clients=3, partition=QuantitySkew(), test=blobs(50, seed=2), **sizes)
    policy = Schedule(lr=0.2, local_epochs=2, decay=0.5)
    loop = fit(made, FederatedLoop(policy=policy), samples, rounds=3, callbacks=[seen])
    mu = mu or 0.0
    for t, (row, clients) in enumerate(zip(loop.rows, seen.rounds, strict=True)):
        total, moved = 0.0, []
        for n, batches in zip(samples.num_samples.tolist(), clients.values(), strict=True):
            assert sum(len(y) for _, y in batches) == 2 * n
            w, b = weight.clone(), bias.clone()
            for x, y in batches:
                loss, w_gradient, b_gradient = cross_entropy(w, b, x, y)
                drift = (w - weight).square().sum() + (b - bias).square().sum()
                total += (loss.mean() + mu / 2 * drift) * len(y)
                w = w - 0.2 * 0.5**t * (w_gradient + mu * (w - weight))
                b = b - 0.2 * 0.5**t * (b_gradient + mu * (b - bias))
            moved.append((n / 120 * w, n / 120 * b))
        weight, bias = (sum(parts) for parts in zip(*moved, strict=True))
        expected = figures("val", weight, bias, *blobs(60, seed=1).tensors)
        expected["train_loss"] = float(total / 240)
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(own(made), (weight, bias), atol=1e-12, rtol=0)

    (found,) = trainer(False).test(made, datamodule=samples, verbose=False)
    expected = figures("test", weight, bias, *blobs(50, seed=2).tensors)
    assert found == pytest.approx(expected, rel=1e-6)


# --- terms ----------------------------------------------------------------------------------------


class Learns(Term):
    """A term with a parameter of its own, that notes what it is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.given = []

    def forward(self, own: ModelView, fixed: ModelView, batch):
        self.given.append((own, fixed, batch))
        return self.scale.square()


def test_a_term_sees_both_models_the_outputs_and_the_batch(module, blobs):
    term, batch = Learns(), blobs(7).tensors
    made = module(terms=[term])
    made.training_step(batch, 0)
    mine, fixed, seen = term.given[0]
    assert mine.params["net.weight"] is made.net.weight
    assert torch.equal(mine.outputs, made(batch[0]))
    assert fixed.params.keys() == mine.params.keys() == {"net.weight", "net.bias"}
    assert fixed.outputs is None
    assert not any(p.requires_grad for p in fixed.params.values())
    assert fixed.params["net.weight"].data_ptr() != made.net.weight.data_ptr()
    assert seen is batch


def test_a_terms_parameters_are_trained_and_averaged_and_saved(fit, module, data):
    made = module(terms=[Learns()])
    fit(made, FederatedLoop(policy=Schedule(lr=0.1, num_steps=2)), data(), rounds=1)
    # Two steps of 0.1 * 2 * scale.
    assert made.terms[0].scale.item() == pytest.approx(0.8**2)
    assert made.state_dict().keys() == {"net.weight", "net.bias", "terms.0.scale"}


# --- what training leaves behind ------------------------------------------------------------------


class Wild(ClientModule):
    """Its loss is infinite where a feature is."""

    def federated_losses(self, batch, outputs=None):
        x, y = batch
        losses = super().federated_losses((x.nan_to_num(posinf=0.0), y))
        return losses.where(x.isfinite().all(1), torch.inf)


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(("kind", "bad"), [(ClientModule, torch.nan), (Wild, torch.inf)])
def test_train_loss_leaves_out_a_client_whose_loss_is_not_finite(
    fit, module, data, blobs, kind, bad
):
    made = module(kind)
    start, train, federated = own(made), blobs(), data(batch_size=None)
    federated.setup("fit")
    federated.train.tensors[0][federated.parts[2][0]] = bad
    loop = fit(made, FederatedLoop(policy=Schedule(num_steps=1)), federated, rounds=1)
    x, y = (t[torch.cat([federated.parts[k] for k in (0, 1, 3)])] for t in train.tensors)
    expected = cross_entropy(*start, x, y)[0].mean()
    assert loop.rows[0]["train_loss"] == pytest.approx(float(expected), rel=1e-6)


class Break(Callback):
    """Ends the run at a step."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 7:
            raise ZeroDivisionError


def test_a_round_that_was_cut_short_leaves_nothing_in_the_next_runs_train_loss(fit, module, data):
    made = module()
    with pytest.raises(ZeroDivisionError):
        fit(made, callbacks=[Break()])
    expected = fit(module(), rounds=1).rows
    assert fit(made, rounds=1).rows == expected


def test_a_checkpoint_holds_the_net_alone_and_no_optimiser_function(fit, module, tmp_path):
    made = module(optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    fit(made, callbacks=[RoundCheckpoint(str(tmp_path))], enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == {"net.weight", "net.bias"}
    assert "hyper_parameters" not in saved
    assert dict(made.hparams) == {}
    again = ClientModule.load_from_checkpoint(tmp_path / "last.ckpt", net=nn.Linear(6, 3).double())
    assert torch.equal(again.net.weight, made.net.weight)


# --- outside of a federation ----------------------------------------------------------------------


def loaders(blobs, batch_size=32):
    return DataLoader(blobs(), batch_size), DataLoader(blobs(60, seed=1), 25)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_module_trains_without_a_federation(trainer, module, blobs):
    made = module(optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    runner = trainer(False, 2, log_every_n_steps=1)
    runner.fit(made, *loaders(blobs))
    for name, data in (("train_loss", blobs()), ("val_loss", blobs(60, seed=1))):
        expected = cross_entropy(*own(made), *data.tensors)[0].mean()
        assert float(runner.callback_metrics[name]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_outside_of_a_federation_terms_hold_it_where_it_began(trainer, module, blobs):
    moved = []
    for mu in (0.0, 4.0):
        made = module(terms=[Proximal(mu)], optimizer=functools.partial(torch.optim.SGD, lr=0.2))
        start = own(made)
        trainer(False, 10, log_every_n_steps=1).fit(made, *loaders(blobs))
        pairs = zip(own(made), start, strict=True)
        moved.append(float(sum((now - then).square().sum() for now, then in pairs) ** 0.5))
    assert moved[1] < moved[0] / 3


class Calling(ClientModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Instead(ClientModule):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [Calling, Instead])
def test_a_step_that_leaves_out_the_terms_is_said(fit, kind):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(kind(nn.Linear(6, 3), [Proximal(0.1)]).double(), rounds=1)
    said = [str(each.message) for each in found if "did not use the terms" in str(each.message)]
    assert len(said) == (kind is Instead)
    assert all("Instead.training_step" in text and "Proximal" in text for text in said)


@pytest.mark.parametrize("made", [lambda net: ClientModule(net, [FedProto()]), FedEM, DPSGD])
def test_what_sums_over_samples_refuses_half_precision(fit, made):
    with pytest.raises(FederationError, match="sums over samples, which half precision rounds"):
        fit(made(nn.Sequential(nn.Linear(6, 3))), rounds=1, precision="bf16-true")


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_losses_of_half_precision_are_summed_in_double_and_single_precision(fit, data, precision):
    """Those of training in double, and those of validation in single precision."""
    train, val = [], []

    class Watched(ClientModule):
        def _record(self, loss, count):
            train.append((loss.detach().double() * count).item())
            super()._record(loss, count)

        def federated_losses(self, batch, outputs):
            losses = super().federated_losses(batch, outputs)
            if not self.training:
                val.append(losses.detach().double())
            return losses

    module = Watched(torch.nn.Linear(6, 3), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loop = FederatedLoop(buffers="average", seed=1)
    fit(module, loop, data(batch_size=5, eval_batch_size=1), rounds=1, precision=precision)
    found = module.trainer.callback_metrics
    expected = sum(train) / loop.rows[0]["num_samples"]
    assert found["train_loss"].item() == pytest.approx(expected, rel=1e-6)
    expected = torch.cat(val[-60:]).mean().item()
    assert found["val_loss"].item() == pytest.approx(expected, rel=1e-6)
    assert module.train_loss.sums.dtype == torch.float64
    assert module.val_loss.mean_value.dtype == torch.float32
    assert module.to(torch.float64).val_loss.mean_value.dtype == torch.float64
    assert module.train_loss.to(torch.float16).sums.dtype == torch.float64


def test_weights_of_samples_make_a_weighted_mean(module, blobs):
    x, y = blobs(7).tensors
    made = module()
    made._sample_weight = torch.tensor([0.5, 0.25, 0.25, 0, 0, 0, 0]).double()
    losses = cross_entropy(*own(made), x, y)[0]
    expected = losses[0] / 2 + losses[1] / 4 + losses[2] / 4
    torch.testing.assert_close(made.training_step((x, y), 0).detach(), expected)


class Regression(ClientModule):
    """Another task: the loss is another function of the same batch."""

    def federated_losses(self, batch, outputs=None):
        x, y = batch
        return (self(x) if outputs is None else outputs).sub(y[:, None]).square().mean(1)


def test_another_loss_is_used_in_training_and_in_validation(fit, module, blobs):
    made = module(Regression)
    start, train = own(made), blobs()
    data = FederatedDataModule(train, train, num_clients=2, batch_size=None)
    loop = fit(made, FederatedLoop(policy=Schedule(lr=1e-9, num_steps=1)), data, rounds=1)
    x, y = train.tensors
    expected = (x @ start[0].T + start[1] - y[:, None]).square().mean()
    for name in ("train_loss", "val_loss"):
        assert loop.rows[0][name] == pytest.approx(float(expected), rel=1e-5)
