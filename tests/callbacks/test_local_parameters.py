"""``FederatedLoop(local_parameters=...)``: partial exchange of any module."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.aggregators import PFNM, ClusteredFL, Scaffold
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import PersonalizedPolicyGradient, Schedule
from lightning_fl.types import FederationError
from linear import Linear

pytestmark = pytest.mark.filterwarnings("ignore:validation and test use the global model")
grouped = pytest.mark.parametrize("group_size", [None, 3], ids=["plain", "vectorized"])
HEAD = ["net.3.*"]


class Net(Linear):
    """Knows nothing of this library: two layers with BatchNorm between, and one weight of all."""

    def __init__(self):
        torch.manual_seed(0)
        layers = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
        super().__init__(nn.Sequential(*layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.fixture
def ragged(data, blobs):
    """Seven clients with different numbers of samples."""

    def make(**options):
        return data(blobs(180), num_clients=7, partition=Dirichlet(0.4, min_size=6), **options)

    return make


@pytest.fixture
def run(fit, ragged):
    """Train Net with full batches; returns the module, the loop and the data."""

    def train(patterns, module=None, aggregator=None, buffers="average", **options):
        module, data = module or Net(), ragged(batch_size=100, local_test_size=0.3)
        names = {"policy", "clients_per_round"} & options.keys()
        of_loop = {"policy": Schedule(num_steps=2)} | {name: options.pop(name) for name in names}
        of_loop |= {"buffers": buffers, "seed": 1, "local_parameters": patterns}
        loop = FederatedLoop(aggregator, **of_loop)
        fit(module, loop, data, **{"rounds": 2} | options)
        return module, loop, data

    return train


@grouped
def test_without_patterns_it_is_fedavg(run, flat, group_size):
    one, of_one, _ = run([], group_size=group_size)
    other, of_other, _ = run(["type:_Batch*"], group_size=group_size)
    torch.manual_seed(0)
    assert of_one.store.rows == {}
    assert sorted(of_other.store.get(0)) == sorted(
        [f"buffer.net.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")]
        + ["parameter.net.1.bias", "parameter.net.1.weight"]
    )
    assert not torch.equal(flat(one), flat(other))
    # The BatchNorm layer of the server is as it was: 8 parameters, 8 statistics and a counter.
    for name, value in Net().net[1].state_dict().items():
        assert torch.equal(other.net[1].state_dict()[name], value)
    assert of_one.rows[0]["bytes_up"] - of_other.rows[0]["bytes_up"] == 7 * 17 * 8


def test_patterns_add_to_what_the_module_names(run, fit, ragged):
    module = Net()
    module.federated_local_parameters = ["scale"]
    loop = FederatedLoop(buffers="local", local_parameters=["net.1.weight"])
    fit(module, loop, ragged(batch_size=100), rounds=1)
    assert loop.fit.federation.local_parameters == ["scale", "net.1.weight"]
    assert {"parameter.scale", "parameter.net.1.weight", "buffer.net.1.running_mean"} < set(
        loop.store.get(0)
    )


@grouped
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_clients_are_evaluated_with_their_own_tensors(run, group_size, buffers):
    personal = PersonalizedEvaluation(steps=0)
    patterns = [*HEAD, "net.1.running_mean"]
    options = {"group_size": group_size, "callbacks": [personal]}
    module, loop, data = run(patterns, buffers=buffers, **options)
    for row in personal.rows:
        own, client = Net(), int(row["client"])
        own.load_state_dict(module.state_dict())
        stored = {n.partition(".")[2]: v for n, v in loop.store.get(client).items()}
        assert len(stored) == (3 if buffers == "average" else 5)
        own.load_state_dict({**module.state_dict(), **stored})
        x, y = data.train.fetch(data.local_tests[client])
        right = own.eval()(x).argmax(1) == y
        assert row["server"] == pytest.approx(right.double().mean().item())
    assert torch.equal(module.net[3].weight, Net().net[3].weight)


def test_a_warning_names_the_evaluation_of_clients(run):
    with pytest.warns(UserWarning, match="global model, in which.*add PersonalizedEvaluation"):
        run(HEAD, rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": ["head.*"]}, r"'head\.\*' in local_parameters matches no .* are "),
        (
            {"policy": PersonalizedPolicyGradient([{"lr": 0.1}, {"lr": 0.2}])},
            "learns from contributions",
        ),
        ({"aggregator": PFNM(), "patterns": HEAD}, "PFNM replaces the network .* local_parameters"),
    ],
)
def test_patterns_that_do_not_fit_raise(fit, ragged, options, message):
    options = {"patterns": ["net.1.*"]} | options
    patterns = options.pop("patterns")
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    module = ClientModule(net) if "aggregator" in options else Net()
    loop = FederatedLoop(**options, buffers="average", local_parameters=patterns)
    with pytest.raises(FederationError, match=message):
        fit(module.double(), loop, ragged(batch_size=100))


@grouped
@pytest.mark.parametrize("rule", [Scaffold, ClusteredFL], ids=lambda rule: rule.__name__)
def test_rules_see_exchanged_parameters_only(run, flat, rule, group_size):
    patterns = ["net.1.*", "net.3.weight"]
    options = {"policy": Schedule(lr=0.1, num_steps=2), "rounds": 3}
    module, loop, _ = run(patterns, aggregator=rule(), group_size=group_size, **options)
    assert loop.fit.federation.num_parameters == 6 * 4 + 4 + 3 + 1
    if group_size:
        expected, *_ = run(patterns, aggregator=rule(), **options)
        torch.testing.assert_close(flat(module), flat(expected), atol=1e-12, rtol=0)


@pytest.mark.parametrize("changed", [[], ["net.3.weight"]])
def test_a_run_resumes_with_the_same_patterns_only(run, tmp_path, changed):
    _, loop, _ = run(HEAD)
    path = str(tmp_path / "a.ckpt")
    loop.fit.trainer.save_checkpoint(path)
    with pytest.raises(FederationError, match=r"its local parameters is \['net.3.weight', 'net.3"):
        run(changed, rounds=3, ckpt_path=path)


class Diverging(Net):
    """The local scale of a client whose samples have a large mean becomes infinite."""

    def training_step(self, batch, batch_idx):
        away = torch.where(batch[0].mean() > self.limit, torch.inf, 0.0).double()
        return super().training_step(batch, batch_idx) + away * self.scale


@grouped
@pytest.mark.filterwarnings("ignore:round 1. dropped 1 of 7")
def test_a_client_whose_local_parameters_are_not_finite_is_dropped(group_size, fit, ragged):
    data, module = ragged(batch_size=100), Diverging()
    options = {"policy": Schedule(num_steps=1), "buffers": "average", "seed": 1}
    loop = FederatedLoop(local_parameters=["scale"], **options)
    data.setup("fit")
    means = torch.stack([data.train.fetch(part)[0].mean() for part in data.parts])
    module.limit = means.sort().values[-2]
    fit(module, loop, data, rounds=1, group_size=group_size)
    worst = int(means.argmax())
    assert loop.rows[0]["dropped_clients"] == str(worst)
    assert sorted(loop.store.rows) == [i for i in range(7) if i != worst]


class Begun(Net):
    """Has its first values from hooks, as the mean of the targets; they see the number of fits."""

    fits = 0

    def set_values(self, extra=0.0):
        with torch.no_grad():
            self.net[3].bias.fill_(2.0 + extra)
            self.net[0].bias.fill_(0.5)
        self.net[1].running_mean = self.net[1].running_mean * 0 + 0.25


def begins_in(hook, **attributes):
    def call(self):
        if hook != "on_train_epoch_start" or self.trainer.current_epoch == 0:
            self.fits += 1
            self.set_values()

    return type("InHook", (Begun,), {hook: call, **attributes})


NAMES = ("net.3.weight", "net.3.bias", "net.1.running_mean")


@grouped
@pytest.mark.parametrize(
    "kind",
    [
        *map(begins_in, ("on_fit_start", "on_train_start", "on_train_epoch_start")),
        begins_in("on_train_start", federated_local_parameters=NAMES),
    ],
    ids=["fit", "train", "epoch", "named by the module"],
)
def test_clients_begin_with_the_values_when_the_first_round_begins(run, flat, group_size, kind):
    options = {"clients_per_round": 3, "group_size": group_size}
    own = getattr(kind, "federated_local_parameters", None)
    patterns = () if own else ("net.3.*", "net.1.running_mean")
    module, loop, _ = run(patterns, kind(), **options)
    before = Begun()
    before.federated_local_parameters = own
    before.set_values()
    expected, other, _ = run(patterns, before, **options)
    assert module.fits == 1
    assert torch.equal(module.net[3].bias, torch.full((3,), 2.0).double())
    assert torch.equal(flat(module), flat(expected))
    assert loop.store.rows.keys() == other.store.rows.keys()
    for client, rows in loop.store.rows.items():
        for name, row in rows.items():
            assert torch.equal(row, other.store.rows[client][name])


class Drifting(Begun):
    """Writes other values at the start of a resumed fit."""

    def __init__(self, extra=0.0):
        super().__init__()
        self.extra = extra

    def on_fit_start(self):
        with torch.no_grad():
            self.net[3].bias.fill_(2.0 + self.extra)

    def on_train_start(self):
        with torch.no_grad():
            self.net[3].weight.fill_(1.0 + self.extra)


class SaveAtStart(L.Callback):
    """Save a checkpoint before the first round of a fit."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_start(self, trainer, pl_module):
        if not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_keeps_the_initial_values_of_the_run(run, flat, tmp_path):
    def trained(module, rounds=4, **options):
        run(HEAD, module, clients_per_round=2, rounds=rounds, **options)
        return module

    whole = flat(trained(Drifting()))
    first, start = tmp_path / "first.ckpt", tmp_path / "start.ckpt"
    trained(Drifting(), 1).trainer.save_checkpoint(first)
    # A checkpoint before the first round of the resumed fit has them, too.
    resumed = trained(Drifting(7.0), ckpt_path=first, callbacks=[SaveAtStart(start)])
    assert torch.equal(flat(resumed), whole)
    assert torch.equal(flat(trained(Drifting(9.0), ckpt_path=start)), whole)
