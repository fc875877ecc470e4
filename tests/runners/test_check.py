"""What vmap refuses, what it gets wrong in silence, and what is left as it was."""

import copy
import random
import re

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import Metric

from lightning_fl.functional.randomness import rng_state, set_rng_state
from lightning_fl.runners import VectorizedClients, client_runner
from lightning_fl.runners.check import why_not_mapped
from lightning_fl.types import FederationError, ServerState


class Total(Metric):
    """A metric that vmap does not complain of."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value):
        self.total = self.total + value

    def compute(self):
        return self.total


class Module(L.LightningModule):
    """A net, and a step that a test replaces."""

    def __init__(self, net, step=None):
        super().__init__()
        self.net, self.step = net, step
        self.metric = Total()

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        return loss if self.step is None else self.step(self, outputs, loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ask(net, step=None, words=False, k=3, dtype=torch.float32):
    """Ask about a module whose clients have trained a little."""
    torch.manual_seed(0)
    module = Module(net(), step).to(dtype)
    group_size = VectorizedClients(module, k)
    runner = client_runner(group_size, "average", group_size.configure_optimizers(), False)
    server = runner.read()
    runner.load(ServerState(server.vector.expand(k, -1), server.counters), [{}] * k, [0.1] * k)
    x = torch.randint(5, (k, 8, 4)) if words else torch.randn(k, 8, 4, dtype=dtype)
    batch = [x, torch.randint(3, (k, 8))]
    return module, runner, lambda: why_not_mapped(runner.vectorized, [t[:2] for t in batch])


def mlp(*layers):
    return lambda: nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


class Own(nn.Module):
    """Noise by a function instead of a layer."""

    def forward(self, x):
        return F.dropout(F.dropout(x, 0.3, self.training), 0.3, self.training)


class Expanded(nn.Module):
    """A buffer is written to in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


@pytest.mark.parametrize(
    "net",
    [
        mlp(nn.ReLU(inplace=True)),
        mlp(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.GELU()),
        mlp(nn.LayerNorm(6), nn.Dropout(0.5), nn.Dropout(0.2)),
        mlp(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.LazyLinear(6)),
        mlp(Expanded()),
        mlp(Own()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_can_be_mapped(net, dtype):
    def ready():
        made = net()
        made(torch.randn(3, 4))
        return made

    assert ask(ready, dtype=dtype)[2]() is None


def test_embeddings_can_be_mapped():
    assert ask(Words, words=True)[2]() is None


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Counting(nn.Module):
    """Every second call is another: mapped, there is one call for all clients."""

    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.head(x) * (1 + self.calls % 2)


def use_item(module, outputs, loss):
    return loss * (2 if loss.item() > 1 else 1)


def use_branch(module, outputs, loss):
    return loss * 2 if loss > 1 else loss


def use_metric(module, outputs, loss):
    module.metric.update(loss.detach())
    return loss


def no_loss(module, outputs, loss):
    return None


def mistake(module, outputs, loss):
    return outputs @ outputs @ loss


@pytest.mark.parametrize(
    ("net", "step", "words", "why"),
    [
        (Recurrent, None, False, "RuntimeError: .*lstm"),
        (lambda: Words(padding_idx=0), None, True, "Embedding with padding_idx"),
        (Counting, None, False, "vectorized .* gives different results"),
        # Dropout, which vectorized clients draw differently, does not hide it.
        (lambda: nn.Sequential(nn.Dropout(), Counting()), None, False, "different results"),
        (mlp(), use_item, False, "RuntimeError: .*item"),
        (mlp(), use_branch, False, "RuntimeError: .*data-dependent control flow"),
        (mlp(), use_metric, False, "training_step updates the metric Total"),
        (mlp(), no_loss, False, "no loss"),
        (mlp(), mistake, False, "RuntimeError: "),
    ],
)
def test_what_cannot_and_why(net, step, words, why):
    assert re.search(why, ask(net, step, words)[2]() or "nothing")


def test_a_step_that_is_written_for_float32_can_be_mapped():
    class Casts(nn.Sequential):
        def forward(self, x):
            return super().forward(x.float())

    assert ask(lambda: Casts(nn.Linear(4, 3)))[2]() is None


def test_a_step_with_a_part_in_float32_can_be_mapped():
    def halved(module, outputs, loss):
        return outputs.float().square().mean().to(loss) + loss

    assert ask(mlp(nn.Tanh()), halved)[2]() is None


def test_steps_that_never_give_the_same_cannot_be_compared():
    numbers = iter(range(100))

    def noise(module, outputs, loss):
        return loss * (1 + next(numbers))

    assert "two equal steps of a client give different results" in ask(mlp(), noise)[2]()


def noise_and(step):
    """A step with noise, which must not hide what else it does."""

    def noisy(module, outputs, loss):
        return step(module, outputs + 1e-6 * torch.randn_like(outputs), loss)

    return noisy


def in_a_list(module, outputs, loss):
    return outputs.square().mean() + sum(p.square().sum() for p in module.metric.decayed)


class Padded(Words):
    """Padding by the function, which vmap does not support."""

    def forward(self, x):
        words = F.embedding(x, self.words.weight, padding_idx=0)
        return self.head(F.dropout(words.mean(1), 0.5))


@pytest.mark.parametrize("step", [in_a_list, noise_and(in_a_list)])
def test_noise_does_not_hide_a_list_of_parameters(step):
    module, _, why = ask(mlp(), step)
    vars(module.metric)["decayed"] = list(module.parameters())
    assert "in a list, for example" in why()


def test_noise_does_not_hide_padding():
    assert ask(Padded, words=True)[2]() == "its vectorized step gives different results"


@pytest.mark.parametrize(
    "noise",
    [
        torch.randn_like,
        lambda x: F.dropout(x, 0.3),
        lambda x: F.gumbel_softmax(x),
        lambda x: x[torch.randperm(len(x))],
        lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
    ],
)
def test_random_steps_are_compared_with_the_same_numbers(noise):
    assert (
        ask(mlp(), lambda module, outputs, loss: loss + noise(outputs).square().mean())[2]() is None
    )


def test_numbers_drawn_with_other_parameters_for_each_client_cannot_be_compared():
    def drawn(module, outputs, loss):
        return loss * torch.bernoulli(outputs.detach().sigmoid()).mean()

    assert "torch.bernoulli" in ask(mlp(), drawn)[2]()


@pytest.mark.parametrize("number", [random.random, np.random.rand])
def test_numbers_of_python_and_numpy_would_be_shared(number):
    why = ask(mlp(), lambda module, outputs, loss: loss * number())[2]
    assert "random numbers with Python or NumPy" in why()


def of_a_generator(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def of_a_seed(x, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.randn_like(x)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("noise", [of_a_generator, of_a_seed])
def test_numbers_of_a_seed_in_the_step_would_be_others_for_each_client(noise, seed):
    why = ask(mlp(), lambda module, outputs, loss: loss + (noise(outputs, seed) * outputs).mean())[
        2
    ]
    assert "a seed or generator of its own" in why()


def test_a_step_that_reads_the_parameters_of_its_optimizer_is_refused(train, tiny):
    class Decayed(tiny.kind):
        def training_step(self, batch, batch_idx):
            groups = self.optimizers().param_groups
            decay = sum(p.square().sum() for group in groups for p in group["params"])
            return super().training_step(batch, batch_idx) + 0.1 * decay

    train(tiny(Decayed), rounds=1)
    with pytest.raises(FederationError, match=r"reads the parameters of its optimizer \(net\."):
        train(tiny(Decayed), 3)


def draw():
    return random.random(), np.random.rand(), torch.rand(1)


def test_what_the_check_draws_is_drawn_from_streams_of_its_own():
    def noise(module, outputs, loss):
        return loss * (1 + sum(draw()[:2]) * torch.rand(()))

    why = ask(mlp(), noise)[2]
    rng = rng_state()
    expected = draw()
    set_rng_state(rng)
    why()
    assert draw() == expected


def test_the_check_leaves_everything_as_it_was(trainer):
    module, runner, why = ask(mlp(nn.BatchNorm1d(6), nn.Dropout(0.5), Expanded()), use_metric)
    module.trainer = trainer(False)
    before = copy.deepcopy(module.state_dict())
    stacks = {n: t.clone() for n, t in {**runner.stacks.params, **runner.stacks.buffers}.items()}
    why()
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
    now = {**runner.stacks.params, **runner.stacks.buffers}
    assert all(torch.equal(now[name], stack) for name, stack in stacks.items())
    assert all(param.grad is None for param in runner.stacks.params.values())
    assert module.metric._update_count == module.metric.total == 0
    assert [m.p for m in module.modules() if isinstance(m, nn.Dropout)] == [0.5]
    assert module.trainer is not None
    assert next(module.parameters()).dtype == torch.float32


def test_the_check_leaves_what_a_step_notes_as_it_was():
    def noting(module, outputs, loss):
        module.notes["losses"]["all"].append(1.0)
        module.notes["seen"].add(len(module.notes["losses"]["all"]))
        return loss

    module, _, why = ask(mlp(), noting)
    inner = []
    module.notes = {"losses": {"all": inner}, "seen": {0}}
    assert why() is None
    assert module.notes == {"losses": {"all": []}, "seen": {0}}
    assert module.notes["losses"]["all"] is inner
