"""Representation matching: against other derivations, vectorized, resumed, and what is refused."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from by_hand import Batches
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.functional.representation import matching_error, pad_to, unpool
from lightning_fl.objectives import (
    EntropyRegularizer,
    ModelView,
    Proximal,
    Recorder,
    RepresentationMatching,
)
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from written import Written


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )


def conv_pool_relu():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.Sigmoid(),
        nn.Linear(5, 3),
    )


def conv_relu_pool():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, 12, 12, dtype=torch.float64, generator=generator)


def matched(net, x, **options):
    """A module with matching layers, its loss, and the sides of a batch."""
    torch.manual_seed(0)
    term = RepresentationMatching(**{"coefficient": 1.0, **options})
    module = ClientModule(net(), terms=[term]).double()
    module.build_terms(x[:1])
    fixed = {f"net.{n}": p.detach() + 0.1 * torch.randn_like(p) for n, p in _named(module)}
    return module, fixed


def _named(module):
    return list(module.net.named_parameters())


def found(module, fixed, x):
    """The term of a batch, and its gradients by the network's and its own parameters."""
    term = module.terms[0]
    loss = term(
        ModelView({}, trace=module.recorder(x)[1]),
        ModelView({}, trace=module.recorder.fixed(fixed, x)),
        (x, None),
    )
    params = [*module.net.parameters(), *term.parameters()]
    return loss, torch.autograd.grad(loss, params, allow_unused=True)


# --- against other derivations --------------------------------------------------------------------


def test_an_mlp_by_matrices():
    """Sums over layers of squared norms, with matrices alone; the top layer's gradients by hand."""
    torch.manual_seed(1)
    x = torch.randn(7, 6, dtype=torch.float64)
    module, fixed = matched(mlp, x, coefficient=0.3)

    def run(p):
        a1 = (x @ p["net.1.weight"].T + p["net.1.bias"]).clamp(min=0)
        a2 = torch.tanh(a1 @ p["net.3.weight"].T + p["net.3.bias"])
        return [x, a1, a2, a2 @ p["net.5.weight"].T + p["net.5.bias"]]

    own = run({f"net.{n}": p.detach() for n, p in _named(module)})
    target = run(fixed)
    theta = [(layer.weight.detach(), layer.bias.detach()) for layer in module.terms[0].layers]
    acts = [lambda z: z, lambda z: z.clamp(min=0), torch.tanh]
    guesses = [
        act(source @ w.T + b) for act, source, (w, b) in zip(acts, own[1:], theta, strict=True)
    ]
    expected = sum(((g - t) ** 2).sum() / len(x) for g, t in zip(guesses, target, strict=False))
    loss, grads = found(module, fixed, x)
    assert loss.item() == pytest.approx(0.3 * expected.item(), rel=1e-12)
    # Of the top matching layer: 2 c / n (g - t) g' by its bias, times the source by its weight.
    error = 0.3 * 2 / len(x) * (guesses[2] - target[2]) * (1 - guesses[2] ** 2)
    torch.testing.assert_close(grads[-1], error.sum(0), atol=1e-12, rtol=0)
    torch.testing.assert_close(grads[-2], error.T @ own[3], atol=1e-12, rtol=0)
    # By the top layer's bias: through the logits.
    torch.testing.assert_close(grads[5], (error @ theta[2][0]).sum(0), atol=1e-12, rtol=0)


def _conv(x, layer):
    return F.conv2d(x, layer.weight, layer.bias, padding=layer.weight.shape[-1] // 2)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_pooling_is_reversed_before_the_layer_where_it_follows_a_convolution(kernel_size):
    """conv - pool - ReLU, with torch's own max_unpool2d."""
    x = images()
    module, fixed = matched(conv_pool_relu, x, kernel_size=kernel_size)
    assert module.terms[0].layers[0].weight.shape == (2, 3, kernel_size, kernel_size)

    def activations(p):
        h1, i1 = F.max_pool2d(
            F.conv2d(x, p["0.weight"], p["0.bias"], padding=1), 2, return_indices=True
        )
        a1 = h1.relu()
        h2, i2 = F.max_pool2d(F.conv2d(a1, p["3.weight"], p["3.bias"]), 2, return_indices=True)
        a2 = h2.relu()
        a3 = torch.sigmoid(a2.flatten(1) @ p["7.weight"].T + p["7.bias"])
        return [x, a1, a2, a3, a3 @ p["9.weight"].T + p["9.bias"]], i1, i2

    def guesses(layers, own, i1, i2):
        return [
            _conv(F.max_unpool2d(own[1], i1, 2), layers[0]),
            # A convolution without padding: 4x4 maps of the pooling's input, zeros around them.
            _conv(F.pad(F.max_unpool2d(own[2], i2, 2), (1, 1, 1, 1)), layers[1]).relu(),
            (own[3] @ layers[2].weight.T + layers[2].bias).relu(),
            torch.sigmoid(own[4] @ layers[3].weight.T + layers[3].bias),
        ]

    _agree(module, fixed, x, activations, guesses)


def activations_of_conv_relu_pool(x, p):
    a1 = F.conv2d(x, p["0.weight"], p["0.bias"], padding=1).relu()
    h1, i1 = F.max_pool2d(a1, 2, return_indices=True)
    a2 = F.conv2d(h1, p["3.weight"], p["3.bias"]).relu()
    return [x, a1, a2, a2.flatten(1) @ p["6.weight"].T + p["6.bias"]], i1


def test_pooling_is_reversed_after_the_layer_where_it_follows_the_nonlinearity():
    """conv - ReLU - pool: the switches have the target's channels."""
    x = images()
    module, fixed = matched(conv_relu_pool, x)

    def guesses(layers, own, i1):
        return [
            _conv(own[1], layers[0]),
            F.max_unpool2d(_conv(F.pad(own[2], (1, 1, 1, 1)), layers[1]), i1, 2).relu(),
            (own[3] @ layers[2].weight.T + layers[2].bias).relu(),
        ]

    _agree(module, fixed, x, partial(activations_of_conv_relu_pool, x), guesses)


def _agree(module, fixed, x, activations, guesses):
    """Compare with functions that return activations, and guesses of those of the fixed model."""
    target = activations({n.removeprefix("net."): p for n, p in fixed.items()})[0]
    guesses = guesses(module.terms[0].layers, *activations(dict(_named(module))))
    pairs = list(zip(guesses, target, strict=False))
    expected = sum(((g.flatten(1) - t.flatten(1)) ** 2).sum() / len(x) for g, t in pairs)
    params = [*module.net.parameters(), *module.terms[0].parameters()]
    wanted = torch.autograd.grad(expected, params, allow_unused=True)
    loss, grads = found(module, fixed, x)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    mean = matching_error(guesses[0], target[0], "mean")
    assert mean.item() == pytest.approx(((guesses[0] - target[0]) ** 2).mean().item())


def test_layers_are_reconstructed_from_the_same_layers():
    """Without unpooling; the input, which both models share, is left out."""
    x = images()
    module, fixed = matched(conv_relu_pool, x, source="same")

    def activations(p):
        return [activations_of_conv_relu_pool(x, p)[0][1:]]

    def guesses(layers, own):
        return [
            _conv(own[0], layers[0]).relu(),
            _conv(own[1], layers[1]).relu(),
            own[2] @ layers[2].weight.T + layers[2].bias,
        ]

    _agree(module, fixed, x, activations, guesses)


# --- networks -------------------------------------------------------------------------------------


def test_the_fixed_model_leaves_statistics_and_parameters_alone():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    recorder = Recorder(net)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    zeros = {f"net.{n}": torch.zeros_like(p) for n, p in net.named_parameters()}
    trace = recorder.fixed(zeros, torch.randn(5, 6).double())
    assert not trace.activations[-1].any()
    assert not trace.activations[-1].requires_grad
    assert all(torch.equal(before[n], t) for n, t in net.state_dict().items())


def test_points_may_be_named():
    recorder = Recorder(mlp(), points=["3"])
    _, trace = recorder(torch.randn(2, 6))
    assert [a.shape[1] for a in trace.activations] == [6, 4, 3]
    assert [point.nonlinearity for point in recorder.points] == [None] * 3


def test_a_forward_of_the_users_own_and_other_points_are_refused():
    class Mine(ClientModule):
        def forward(self, x):
            return self.net(x) * 2

    with pytest.raises(FederationError, match="would not be called"):
        Mine(mlp(), terms=[RepresentationMatching()]).build_terms(torch.randn(2, 6))
    both = [RepresentationMatching(), RepresentationMatching(points=["3"])]
    with pytest.raises(FederationError, match="same points"):
        ClientModule(mlp(), terms=both).build_terms(torch.randn(2, 6))


def test_without_a_data_module_an_example_is_asked_for(trainer, blobs):
    loader = torch.utils.data.DataLoader(blobs(), batch_size=8)
    module = ClientModule(mlp(), terms=[RepresentationMatching()]).double()
    with pytest.raises(FederationError, match="example_input_array"):
        trainer(False, log_every_n_steps=1).fit(module, loader, loader)
    module.example_input_array = torch.zeros(1, 6)
    trainer(False, log_every_n_steps=1, rounds=1).fit(module, loader, loader)
    assert len(module.terms[0].layers) == 3


# --- in a federation ------------------------------------------------------------------------------


@pytest.fixture
def federation(fit, blobs):
    """Train a network with matching; returns the module and the loop."""

    def run(net=mlp, wrap=lambda m: m, rounds=2, terms=(), matching=None, loop=None, **options):
        torch.manual_seed(0)
        every = [RepresentationMatching(coefficient=0.01, **(matching or {})), *terms]
        module = ClientModule(net(), terms=every).double()
        samples = blobs(96)
        if net is not mlp:
            x = torch.randn(96, 2, 12, 12, generator=torch.Generator().manual_seed(2)).double()
            samples = TensorDataset(x, torch.arange(96) % 3)
        count = options.pop("num_clients", 4)
        datamodule = FederatedDataModule(samples, num_clients=count, batch_size=10, seed=1)
        given = {"policy": Schedule(lr=0.05, num_steps=3), "seed": 3} | (loop or {})
        made = FederatedLoop(**given)
        fit(wrap(module), made, datamodule, rounds=rounds, **options)
        return module, made

    return run


def adam(params):
    return torch.optim.Adam(params, lr=0.5)


@pytest.mark.parametrize(
    ("keeps", "optimizer"), [("reset", None), ("reset", adam), ("local", adam)]
)
def test_matching_layers_have_a_rate_and_an_optimizer_of_their_own(federation, keeps, optimizer):
    """One client, beside training with two optimizers of torch, of which one may go on."""
    watch = Batches()
    matching = {"lr_factor": 0.4, "optimizer": optimizer}
    options = {"matching": matching, "loop": {"optimizer_state": keeps}, "num_clients": 1}
    module, loop = federation(rounds=3, callbacks=[watch], **options)
    plain, _ = federation(rounds=0, **options)
    plain.build_terms(torch.zeros(1, 6))
    kind = torch.optim.SGD if optimizer is None else torch.optim.Adam
    for round, clients in enumerate(watch.rounds):
        start = {n: p.detach().clone() for n, p in plain.net.named_parameters(prefix="net")}
        plain.federated_global_parameters = start
        network = torch.optim.SGD(plain.net.parameters(), lr=0.05)
        if round == 0 or keeps == "reset":
            layers = kind(plain.terms.parameters(), lr=0.02)
        for batch in clients[0]:
            plain.zero_grad()
            plain.training_step(batch, 0)["loss"].backward()
            network.step()
            layers.step()
    for name, expected in plain.net.named_parameters():
        torch.testing.assert_close(module.net.get_parameter(name), expected, atol=1e-12, rtol=0)
    for name, expected in plain.terms.named_parameters(prefix="parameter.terms"):
        torch.testing.assert_close(loop.store.get(0)[name], expected.detach(), atol=1e-12, rtol=0)


def test_theta_belongs_to_the_client(federation):
    module, loop = federation(loop={"clients_per_round": 2}, rounds=1)
    took_part = [client for client in range(4) if loop.store.get(client)]
    assert len(took_part) == 2
    first = {n: p for n, p in module.named_parameters() if n.startswith("terms.")}
    assert len(first) == 6
    one, other = (loop.store.get(client) for client in took_part)
    assert one.keys() == other.keys() == {f"parameter.{n}" for n in first}
    for name, start in first.items():
        key = f"parameter.{name}"
        assert not torch.equal(one[key], other[key])
        assert not torch.equal(one[key], start)
    assert not any("terms" in name for name in module.state_dict())
    # Neither sent nor averaged: the vector that clients send is the network's.
    assert loop.runner.num_parameters == sum(p.numel() for p in module.net.parameters())


# --- any network ----------------------------------------------------------------------------------


def flat_net(nonlinearity):
    """Two linear layers with something in between."""

    def forward(net, x):
        return net.top(nonlinearity(net.first(x)))

    def make():
        layers = {"first": nn.Linear(6, 5), "top": nn.Linear(5, 3)}
        if isinstance(nonlinearity, nn.Module):
            layers["between"] = nonlinearity
            return Written(lambda net, x: net.top(net.between(net.first(x))), **layers)
        return Written(forward, **layers)

    return make


NONLINEARITIES = {
    "PReLU": nn.PReLU(),
    "in place": nn.LeakyReLU(0.2, inplace=True),
    "F.threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "F.leaky_relu_": lambda x: F.leaky_relu_(x, 0.2),
    "torch.tanh_": torch.tanh_,
    "expit": torch.special.expit,
    "x.clamp": lambda x: x.clamp(min=0),
    "F.relu in place": lambda x: F.relu(x, inplace=True),
}


@pytest.mark.parametrize("name", NONLINEARITIES)
def test_every_nonlinearity_is_a_point_and_brings_back_its_target(name):
    """By hand: the hidden layer is made of the logits by the same non-linearity."""
    nonlinearity = NONLINEARITIES[name]
    x = torch.randn(4, 6, dtype=torch.float64)
    module, fixed = matched(flat_net(nonlinearity), x)
    assert len(module.recorder.points) == 3
    loss, _ = found(module, fixed, x)
    net, (low, high) = module.net, module.terms[0].layers
    act = nonlinearity.double() if isinstance(nonlinearity, nn.Module) else nonlinearity
    hidden = act(net.first(x))
    logits = net.top(hidden)
    f = {n.removeprefix("net."): p for n, p in fixed.items()}
    before = x @ f["first.weight"].T + f["first.bias"]
    target = F.prelu(before, f["between.weight"]) if name == "PReLU" else act(before)
    errors = ((low(hidden) - x) ** 2).sum(1) + ((act(high(logits)) - target) ** 2).sum(1)
    torch.testing.assert_close(loss, errors.mean(), atol=1e-10, rtol=0)


def test_a_clamp_that_does_not_cut_at_zero_is_no_point():
    module, _ = matched(flat_net(lambda x: x.clamp(min=1e-6)), torch.randn(1, 6).double())
    assert len(module.recorder.points) == 2


def pooled(pool, **layers):
    """A convolution, a pooling, and a convolution after it."""
    layers = {"a": nn.Conv2d(2, 3, 3, padding=1), "b": nn.Conv2d(3, 3, 3, padding=1)} | layers
    return lambda: Written(
        lambda net, x: net.top(F.relu(net.b(pool(net, F.relu(net.a(x))))).flatten(1)),
        **layers,
        top=nn.Linear(108, 3),
    )


POOLINGS = {
    "torch": (lambda net, x: torch.max_pool2d(x, 2), {}),
    "with switches": (lambda net, x: F.max_pool2d(x, 2, return_indices=True)[0], {}),
    "adaptive": (lambda net, x: F.adaptive_max_pool2d(x, 6), {}),
    "module": (lambda net, x: net.p(x), {"p": nn.MaxPool2d(2)}),
    "module with switches": (
        lambda net, x: net.p(x)[0],
        {"p": nn.MaxPool2d(2, return_indices=True)},
    ),
    "adaptive module": (lambda net, x: net.p(x), {"p": nn.AdaptiveMaxPool2d(6)}),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_every_form_of_max_pooling_is_reversed(name):
    pool, layers = POOLINGS[name]
    x, found_losses = images(), []
    for make in (pooled(pool, **layers), pooled(lambda net, x: F.max_pool2d(x, 2))):
        module, fixed = matched(make, x)
        plain = module.net(x)
        torch.testing.assert_close(module.recorder(x)[0], plain, atol=0, rtol=0)
        assert len(module.recorder.points[2].unpool_first) == 1
        params = {n: torch.full_like(p, 0.01) for n, p in fixed.items()}
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.02)
            module.net.a.weight.copy_(torch.linspace(-1, 1, 54).view(3, 2, 3, 3))
        found_losses.append(found(module, params, x)[0])
    torch.testing.assert_close(found_losses[0], found_losses[1], atol=1e-12, rtol=0)


def test_how_a_sum_is_written_does_not_matter():
    """A pooling that a branch goes around is not reversed."""
    x, losses = images(), []
    for both in (
        lambda net, h: net.b(h) + F.max_pool2d(h, 2),
        lambda net, h: F.max_pool2d(h, 2) + net.b(h),
    ):
        torch.manual_seed(5)
        net = Written(
            lambda net, x, both=both: net.top(F.relu(both(net, F.relu(net.a(x)))).flatten(1)),
            a=nn.Conv2d(2, 3, 3, padding=1),
            b=nn.Conv2d(3, 3, 3, padding=1, stride=2),
            top=nn.Linear(108, 3),
        )
        module, fixed = matched(lambda net=net: net, x)
        assert module.recorder.points[2].unpool_first == ()
        losses.append(found(module, fixed, x)[0])
    torch.testing.assert_close(*losses, atol=1e-12, rtol=0)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_batch_that_is_changed_in_place_is_the_same_for_both(in_place):
    def forward(net, x):
        x = x.sub_(1.0) if in_place else x - 1.0
        return net.top(F.gelu(net.first(x)))

    net = Written(forward, first=nn.Linear(6, 5), top=nn.Linear(5, 3))
    x = torch.ones(4, 6, dtype=torch.float64) * 3
    module, fixed = matched(lambda: net, torch.ones(1, 6, dtype=torch.float64))
    module.federated_global_parameters = {**fixed}
    batch = x.clone(), torch.tensor([0, 1, 2, 0])
    found = module.training_step(batch, 0)
    found["loss"].backward()
    assert torch.equal(batch[0], x)
    assert torch.equal(module.recorder.fixed(fixed, x).activations[0], x)
    logits = module.net.top(F.gelu(module.net.first(x - 1)))
    assert found["task_loss"].item() == pytest.approx(F.cross_entropy(logits, batch[1]).item())


def test_an_activation_is_noted_before_dropout_writes_over_it():
    net = nn.Sequential(
        nn.Linear(6, 50), nn.GELU(), nn.Dropout(0.5, inplace=True), nn.Linear(50, 3)
    )
    module, _ = matched(lambda: net, torch.randn(1, 6).double())
    x = torch.randn(8, 6).double()
    activation = module.recorder(x)[1].activations[1]
    torch.testing.assert_close(activation, F.gelu(module.net[0](x)), atol=0, rtol=0)


class Optional(nn.Module):
    """A forward with arguments that the module never passes."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x, mask=None, features=False, scale=0.5):
        h = self.body(x).relu() * scale
        if mask is not None:
            h = h * mask
        return h if features else self.head(h)


class Wrapped(nn.Module):
    """A forward that passes on whatever it is given, as that of LoRA."""

    def __init__(self):
        super().__init__()
        self.net = Optional()

    def forward(self, *args, **kwargs):
        return self.net(*args, **kwargs)


def test_arguments_with_defaults_have_their_defaults():
    net, x = Wrapped(), torch.randn(5, 4)
    inner = net.net
    outputs, trace = Recorder(net)(x)
    assert torch.equal(outputs, net(x))
    expected = [x, inner.body(x).relu(), net(x)]
    assert all(map(torch.equal, trace.activations, expected))
    assert len(trace.activations) == 3


def test_the_network_is_run_as_it_is_written():
    """Statements whose values nobody reads count, and a frozen normalization stays frozen."""

    def forward(net, x):
        net.dropout(x)
        hidden = net.first(x)
        hidden.mul_(2.0)
        return net.dropout(net.top(net.norm(hidden).relu()))

    layers = {"first": nn.Linear(6, 5), "norm": nn.BatchNorm1d(5), "top": nn.Linear(5, 3)}
    net = Written(forward, **layers, dropout=nn.Dropout(0.5))
    net.norm.eval()
    recorder, x = Recorder(net), torch.randn(4, 6)
    with torch.random.fork_rng():
        expected = net(x)
    assert torch.equal(recorder(x)[0], expected)
    assert net.training
    assert not net.norm.training


class Statistics(nn.Module):
    """A layer with statistics of its own, and a part without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.top = nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))
        self.last = None

    def forward(self, x):
        with torch.no_grad():
            fixed = self.first(x)
            self.mean.mul_(0.9)
            self.mean.add_(0.1 * fixed.mean(0))
            self.scale.copy_(self.scale + fixed.abs().mean(0))
        self.last = fixed
        return self.top(((self.first(x) - self.mean) * (1 / self.scale)).relu() + fixed)


def test_operations_of_buffers_and_parts_without_gradients_are_recorded():
    """They are not made once, when the network is traced, and gradients do not pass the parts."""
    net, x = Statistics(), torch.randn(3, 5, 4)
    other = copy.deepcopy(net)
    recorder = Recorder(net)
    assert net.last is None
    for batch in x:
        outputs, expected = recorder(batch)[0], other(batch)
        assert torch.equal(outputs, expected)
        for tensor in (outputs, expected):
            tensor.square().sum().backward()
        assert torch.is_grad_enabled()
    for one, two in zip(net.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_an_assignment_to_a_buffer_is_refused():
    def forward(net, x):
        net.steps += 1
        return net.top(x)

    net = Written(forward, top=nn.Linear(6, 3))
    net.register_buffer("steps", steps := torch.zeros(()))
    with pytest.raises(FederationError, match=r"buffer '?steps"):  # PyTorch 2.6 refuses it itself
        Recorder(net)
    assert net.steps is steps


@pytest.mark.parametrize(
    ("net", "points", "words"),
    [
        (
            Written(lambda n, x: n.a(x) if x.sum() > 0 else x[:, :3], a=nn.Linear(6, 3)),
            None,
            "cannot be traced",
        ),
        (mlp(), ["relu"], "points contains 'relu'"),
        (
            nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.ReLU()),
            None,
            "use other points",
        ),
        (
            nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3)),
            ["0", "0.1"],
            "0.1",
        ),
        (flat_net(torch.relu)(), [""], "points contains ''"),
        (
            Written(lambda n, x: n.a(x), a=nn.Linear(6, 3), unused=nn.Linear(2, 2)),
            ["unused"],
            "'unused', which cannot be recorded",
        ),
        (
            flat_net(lambda x: F.hardtanh(x, -x.size(1), x.size(1)))(),
            None,
            "does not support hardtanh",
        ),
        (Written(lambda n, x: (n.a(x), x), a=nn.Linear(6, 3)), None, "returns a single tensor"),
        (
            Written(lambda n, x: n.top(n.r(x)[0]), r=nn.RNN(6, 4), top=nn.Linear(4, 3)),
            ["r"],
            "activation 1 is tuple",
        ),
    ],
)
def test_networks_and_points_that_do_not_fit_are_refused(net, points, words):
    with pytest.raises(FederationError, match=words):
        matched(lambda: net, torch.randn(1, 6).double(), points=points)


class LowerPrecision(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self[0](x)
        return self[1](x.float().relu())


def test_a_part_in_lower_precision_cannot_be_recorded():
    net = LowerPrecision(nn.Linear(4, 5), nn.Linear(5, 3))
    with pytest.raises(FederationError, match=r"autocast cannot be recorded.*points=\["):
        Recorder(net)
    inner = nn.Sequential(net, nn.Linear(3, 3))
    x = torch.randn(2, 4)
    assert torch.equal(Recorder(inner, ["0"])(x)[0], inner(x))


def test_unpooling_is_torchs_own_where_windows_do_not_overlap():
    x = images()
    pooled, index = F.max_pool2d(x, 3, return_indices=True)
    assert torch.equal(unpool(pooled, index, (12, 12)), F.max_unpool2d(pooled, index, 3))
    # Overlapping windows: every winner gets its own value back.
    pooled, index = F.max_pool2d(x, 3, stride=1, return_indices=True)
    back = unpool(pooled, index, (12, 12))
    winners = back != 0
    torch.testing.assert_close(back[winners], x[winners])


def test_maps_are_padded_or_cut_half_on_either_side():
    x = torch.arange(1.0, 4).view(1, 1, 3)
    assert pad_to(x, (6,)).tolist() == [[[0, 1, 2, 3, 0, 0]]]
    assert pad_to(x, (3,)) is x
    assert pad_to(x, (1,)).tolist() == [[[2]]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("net", [mlp, conv_pool_relu, conv_relu_pool])
def test_compiled_vectorized_training_changes_nothing(federation, flat, recwarn, net):
    terms = [EntropyRegularizer(0.9), Proximal(0.1)]
    plain, expected = federation(net, terms=terms)
    module, loop = federation(net, lambda m: VectorizedClients(m, 3, compile=True), terms=terms)
    assert not [w for w in recwarn if "not compiled" in str(w.message)]
    torch.testing.assert_close(flat(module), flat(plain), atol=1e-12, rtol=0)
    for client in range(4):
        one, other = loop.store.get(client), expected.store.get(client)
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_parameters_of_the_net_itself_are_those_of_the_fixed_model():
    layers = {"scale": nn.Parameter(torch.ones(1)), "top": nn.Linear(6, 3)}
    net, x = Written(lambda net, x: net.top(torch.relu(x * net.scale)), **layers), torch.ones(2, 6)
    recorder = Recorder(net)
    params = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    trace = recorder.fixed(params | {"net.scale": torch.full((1,), 3.0)}, x)
    assert torch.equal(trace.activations[1], 3 * x)
    assert torch.equal(recorder(x)[1].activations[1], x)
