"""How clients train is chosen at the first local step."""

import functools
from time import sleep

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fl.callbacks import RoundCheckpoint
from lightning_fl.policies import Schedule
from lightning_fl.runners.tuning import compiling_pays, seconds
from lightning_fl.types import FederationError
from linear import Linear


class Recurrent(nn.Module):
    """Takes the samples of a batch for a sequence."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("group_size", [3, 7])
def test_what_cannot_be_mapped_is_trained_one_after_another(agree, tiny, group_size):
    with pytest.warns(UserWarning, match=r"one client after another, .*: RuntimeError: .*lstm"):
        agree(lambda: tiny(net=Recurrent), (group_size,))


def test_a_step_that_asks_for_a_number_is_trained_one_after_another(agree, tiny):
    class Asks(tiny.kind):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss.item(), on_step=False, on_epoch=True)
            return loss * (2 if loss.item() > 1 else 1)

    with pytest.warns(UserWarning, match=r"one client after another, .*: RuntimeError: .*item"):
        agree(lambda: tiny(Asks))


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_a_checkpoint_with_a_backward_pass_of_its_own(agree, tiny, at):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for i, layer in enumerate(self):
                again = i == at and self.training
                # As the documentation of torch advises for the first layer.
                x = x.clone().requires_grad_() if again and not x.requires_grad else x
                x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
            return x

    def make():
        return Checkpointed(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    agree(lambda: tiny(net=make), (1, 3))


class Alternating(nn.Module):
    """Two layers that swap their places, and so their names, from step to step."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers, self.head = nn.ModuleList(self.pair), nn.Linear(6, 3)

    def forward(self, x):
        one, other = self.layers
        return self.head(other(one(x).tanh()))


def test_layers_that_a_step_moves_to_other_names(agree, tiny):
    class Swaps(tiny.kind):
        def training_step(self, batch, batch_idx):
            self.net.layers = nn.ModuleList(self.net.pair[:: -1 if batch_idx % 2 else 1])
            return super().training_step(batch, batch_idx)

    agree(lambda: tiny(Swaps, net=Alternating), (1,), federation={"policy": Schedule(num_steps=3)})


class Embedded(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


@pytest.fixture
def words(ragged, blobs):
    """Sentences of four words; those of number 0 are at the end."""

    def make(rare):
        tokens = torch.randint(0, 5, (180, 4), generator=torch.Generator().manual_seed(0))
        if rare:
            tokens = tokens.clamp(min=1)
            tokens[::37, 3] = 0
        val = TensorDataset(tokens, blobs(180).tensors[1])
        return ragged(val, val=val)

    return make


@pytest.mark.parametrize("rare", [False, True])
def test_an_embedding_that_vmap_gets_wrong_is_found_out(agree, tiny, words, rare):
    """Also if only a later batch has a sample of which the gradient is wrong."""
    net = functools.partial(Embedded, padding_idx=0)
    with pytest.warns(UserWarning, match="after another, .*: an Embedding with padding_idx"):
        agree(lambda: tiny(net=net), datamodule=lambda: words(rare))


@pytest.mark.filterwarnings("ignore:.*one client after another", "ignore:.*not vectorized")
@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}])
def test_embeddings(agree, tiny, words, options):
    agree(lambda: tiny(net=functools.partial(Embedded, **options)), datamodule=lambda: words(False))


@pytest.mark.parametrize("how", ["update", "log", "list"])
@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_what_a_module_keeps_of_its_steps_is_right(agree, tiny, how):
    class Keeps(tiny.kind):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")
            self.losses = []

        def training_step(self, batch, batch_idx):
            outputs = self.net(batch[0])
            loss = F.cross_entropy(outputs, batch[1])
            if how == "list":
                self.losses.append(loss.detach())
            else:
                self.accuracy(outputs.detach(), batch[1])
            if how == "log":
                self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self):
            if how == "update":
                self.log("accuracy", self.accuracy.compute())
                self.accuracy.reset()
            if how == "list":
                self.log("accuracy", torch.stack(self.losses).mean())
                self.losses = []

    agree(lambda: tiny(Keeps), (3,))


def test_a_metric_that_all_clients_update_alike_is_right(agree, tiny):
    class Keeps(tiny.kind):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")

        def training_step(self, batch, batch_idx):
            self.accuracy.update(self.net(batch[0]).detach(), batch[1])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("accuracy", self.accuracy.compute())
            self.accuracy.reset()

    with pytest.warns(UserWarning, match="Keeps is trained one client after another"):
        agree(lambda: tiny(Keeps), (3,), federation={"policy": Schedule(num_steps=2)})


class HookedLater:
    """Halves gradients by hooks."""

    @staticmethod
    def begin(module, out):
        if out.requires_grad:
            out.register_hook(lambda grad: grad / 2)
        return out.square().mean()


class DrawsLater:
    """Draws random numbers with a generator of its own."""

    @staticmethod
    def begin(module, out):
        generator = torch.Generator().manual_seed(3)
        return (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).mean()


class AsksLater:
    """Depends on the value of a tensor."""

    @staticmethod
    def begin(module, out):
        return out.mean() if out.mean() > 0 else out.square().mean()


@pytest.mark.parametrize("kind", [HookedLater, DrawsLater, AsksLater])
@pytest.mark.parametrize("by_attribute", [False, True])
def test_a_step_that_cannot_be_mapped_after_a_warm_up(agree, tiny, kind, by_attribute):
    class WarmUp(tiny.kind):
        is_warm = False

        def on_train_epoch_start(self):
            self.is_warm = by_attribute and self.current_epoch == 2

        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            is_warm = self.is_warm if by_attribute else self.current_epoch == 2
            return F.cross_entropy(out, batch[1]) + (kind.begin(self, out) if is_warm else 0)

    with pytest.warns(UserWarning, match="one client after another from here on, not at once: "):
        agree(lambda: tiny(WarmUp), (3,), rounds=3)


def test_a_resumed_run_begins_with_what_cannot_be_mapped(train, tiny, flat, tmp_path):
    class WarmUp(tiny.kind):
        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            later = HookedLater.begin(self, out) if self.current_epoch else 0
            return F.cross_entropy(out, batch[1]) + later

    whole, resumed = tiny(WarmUp), tiny(WarmUp)
    train(whole, rounds=2)
    keep = {"callbacks": [RoundCheckpoint(str(tmp_path))], "enable_checkpointing": True}
    train(tiny(WarmUp), 3, rounds=1, **keep)
    with pytest.warns(
        UserWarning, match="one client after another from here on, not at once: hooks"
    ):
        train(resumed, 3, rounds=2, ckpt_path=str(tmp_path / "last.ckpt"), **keep)
    torch.testing.assert_close(flat(resumed), flat(whole), atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_without_a_loss_is_refused(agree, tiny):
    class Now(tiny.kind):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch[1][0] == 0 else loss

    with pytest.raises(FederationError, match="returned no loss"):
        agree(lambda: tiny(Now), (3,))


class Counted(Linear):
    """Does something else in some of a client's steps."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 3 if batch_idx % 3 == 1 else loss


class CountedAlone(Counted):
    """The same, in a way that cannot be mapped."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1 if loss.item() > 0 else 2)


@pytest.mark.parametrize("kind", [Counted, CountedAlone])
@pytest.mark.parametrize("steps_per_batch", [1, 2])
@pytest.mark.filterwarnings("ignore:.*one client after another")
def test_a_step_is_counted_by_client(agree, tiny, kind, steps_per_batch):
    agree(lambda: tiny(kind), steps_per_batch=steps_per_batch, rounds=3)


class Starts(Counted):
    """Keeps what ``on_client_start`` notes in an attribute."""

    def training_step(self, batch, batch_idx):
        pairs = zip(self.parameters(), self.start, strict=True)
        distance = sum((param - start).square().sum() for param, start in pairs)
        return super().training_step(batch, batch_idx) + distance

    def on_client_start(self):
        self.start = [p.detach().clone() for p in self.parameters()]


class Draws(Starts):
    def on_client_start(self):
        self.start = [torch.randn_like(p) for p in self.parameters()]


class StartsFromItsOwn(Starts):
    federated_local_parameters = ("net.bias",)


@pytest.mark.parametrize(("kind", "rounds"), [(Draws, 1), (StartsFromItsOwn, 3)])
def test_an_attribute_of_one_client_is_refused(train, tiny, kind, rounds):
    with pytest.raises(FederationError, match=r"depends on start, which on_client_start sets"):
        train(tiny(kind), 3, rounds=rounds)


def test_an_attribute_that_is_equal_for_all_clients_is_not(agree, tiny):
    agree(lambda: tiny(Starts), (3,), rounds=3)


class Halves(Counted):
    """Writes to its batch, with which trials must not begin the first step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x.mul_(0.5) + 1), y)


@pytest.mark.parametrize("group_size", [3, "auto"])
def test_trials_do_not_change_the_batch(agree, tiny, group_size):
    agree(lambda: tiny(Halves), (group_size,), compile="auto")


def test_a_step_that_uses_its_number_is_not_compiled(agree, tiny):
    with pytest.warns(
        UserWarning, match="vectorized step is not compiled: training_step uses batch_idx"
    ):
        agree(
            lambda: tiny(Counted),
            (3,),
            steps_per_batch=3,
            compile=True,
            federation={"policy": Schedule(num_steps=4)},
        )


@pytest.mark.parametrize(
    ("work", "steps", "at_once", "pays"),
    [
        (6e-8, 9_999, True, False),  # Python's own time: 2 ms a step, of which half is saved
        (6e-8, 10_001, True, True),
        (0.6, 33, True, False),  # 0.6 s of arithmetic a step
        (0.6, 34, True, True),
        (0.6, 83, False, False),  # of which a fifth is saved
        (0.6, 84, False, True),
        (6e-8, -1, True, False),  # no end of the run is known
    ],
)
def test_compiling_pays_by_the_work_that_is_left(work, steps, at_once, pays):
    assert compiling_pays(work, steps, at_once) is pays


def test_the_shortest_time_counts_but_not_the_first():
    waits = [0.0, 0.03, 0.02, 0.04]
    took = seconds(lambda: sleep(waits.pop(0)))
    assert not waits
    assert took >= 0.02
