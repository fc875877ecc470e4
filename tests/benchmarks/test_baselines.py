"""What else could be made of networks that a rule merges: ensembles, averages, distillation."""

import copy
import warnings

import pytest
import torch
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.aggregators import PFNM, FedAvg, FedMA
from lightning_fl.aggregators.matching.layer_stack import LayerStack
from lightning_fl.callbacks import FederatedLoop, RoundCheckpoint
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError
from mlp import MATCHED, module, net


def student():
    torch.manual_seed(7)
    return net(6, 16, 3).double()


@pytest.fixture
def skewed(data):
    def make(**options):
        return data(partition=Dirichlet(0.3, min_size=4), seed=1, **options)

    return make


@pytest.fixture
def run(fit, skewed):
    def run(callback, rule=None, rounds=1, wrap=lambda m: m, datamodule=None, **options):
        made = module()
        rule = PFNM(**MATCHED) if rule is None else rule
        loop = FederatedLoop(aggregator=rule, policy=Schedule(num_steps=9), seed=3)
        callbacks = [callback, *options.pop("callbacks", ())]
        datamodule = skewed() if datamodule is None else datamodule
        with warnings.catch_warnings():  # of callbacks that a checkpoint had
            warnings.simplefilter("ignore")
            fit(wrap(made), loop, datamodule, rounds=rounds, callbacks=callbacks, **options)
        return made, loop

    return run


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: VectorizedClients(m, group_size=3)], ids=["one", "vectorized"]
)
def test_by_hand(run, bench, skewed, wrap):
    callback = bench.MatchingBaselines()
    made, loop = run(callback, wrap=wrap)
    samples = skewed()
    samples.setup("fit")
    x, y = samples.val.tensors
    counts = samples.class_counts.double()
    assert (counts.sum(1).unique().numel()) > 1
    each = []
    for (w, b), (v, c) in callback.networks:
        assert w.shape == (8, 6)
        each.append(((x @ w.mT + b).relu() @ v.mT + c).softmax(1))
    votes = {
        "uniform": sum(each) / 4,
        "weighted": sum(n / counts.sum(0) * p for n, p in zip(counts, each, strict=True)),
    }
    mean = [
        [torch.stack(t).mean(0) for t in zip(*layer, strict=True)]
        for layer in zip(*callback.networks, strict=True)
    ]
    (w, b), (v, c) = mean
    votes["average"] = (x @ w.mT + b).relu() @ v.mT + c
    row = loop.rows[0]
    for name, vote in votes.items():
        right = (vote.argmax(1) == y).double().mean()
        assert row[f"ensemble/{name}"] == pytest.approx(float(right), abs=1e-6), name
    alone = torch.stack([(p.argmax(1) == y).double().mean() for p in each]).mean()
    assert row["ensemble/local"] == pytest.approx(float(alone), abs=1e-6)
    assert "ensemble/distilled" not in row
    # The module still has the merged network, in tensors that can be trained.
    assert LayerStack(made).shapes[0][0] == row["width_1"]
    assert not any(p.is_inference() for p in made.parameters())


def test_networks_are_evaluated_in_the_precision_of_the_trainer(run, bench):
    """In double precision, tensors that a student creates are in double precision, too."""

    class Rotated(nn.Linear):
        def forward(self, x):
            return super().forward(x @ torch.eye(6))

    pupil = nn.Sequential(Rotated(6, 8), nn.ReLU(), nn.Linear(8, 3))  # of another dtype
    callback = bench.MatchingBaselines(pupil, epochs=1)
    _, loop = run(callback, precision="64-true")
    assert {"ensemble/uniform", "ensemble/distilled"} <= loop.rows[0].keys()
    assert callback.student[0].weight.dtype == torch.float64


def test_the_student_learns_what_the_ensemble_says(run, bench, skewed):
    callback = bench.MatchingBaselines(student(), epochs=60, lr=0.02, batch_size=8)
    _, loop = run(callback)
    samples = skewed()
    samples.setup("fit")
    x = samples.train.tensors[0]
    with torch.no_grad():
        wanted = sum(
            ((x @ w.mT + b).relu() @ v.mT + c).softmax(1) for (w, b), (v, c) in callback.networks
        )
        said = callback.student(x)
    assert (said.argmax(1) == wanted.argmax(1)).double().mean() > 0.95
    assert (said.softmax(1) - wanted / 4).abs().mean() < 0.05
    assert abs(loop.rows[0]["ensemble/distilled"] - loop.rows[0]["ensemble/uniform"]) < 0.1


def test_the_users_student_stays_and_two_runs_agree(run, bench):
    given = student()
    before = copy.deepcopy(given.state_dict())
    rows = []
    for _ in range(2):
        callback = bench.MatchingBaselines(given, epochs=2)
        rows.append(run(callback, rounds=2)[1].rows)
    assert rows[0] == rows[1]
    assert all(torch.equal(before[k], v) for k, v in given.state_dict().items())
    assert not torch.equal(callback.student[0].weight, given[0].weight)


def test_it_changes_nothing(run, bench):
    one, _ = run(bench.MatchingBaselines(student(), epochs=1), rounds=2)
    two, _ = run(RoundCheckpoint(), rounds=2, enable_checkpointing=True)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_networks_of_different_widths_have_no_average(run, bench):
    _, loop = run(bench.MatchingBaselines(), PFNM(**MATCHED, widths=[8, 3]))
    assert "ensemble/average" not in loop.rows[0]
    assert "ensemble/uniform" in loop.rows[0]


def test_other_rules_that_merge(run, bench):
    _, loop = run(bench.MatchingBaselines(), FedMA(), rounds=2)
    assert {"ensemble/uniform", "ensemble/average"} <= loop.rows[1].keys()


def test_what_is_refused(run, bench):
    with pytest.raises(FederationError, match="got FedAvg"):
        run(bench.MatchingBaselines(), FedAvg())
    for options, message in (
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"batch_size": 0.5}, "batch_size must be"),
        ({"lr": 0}, "lr must be a finite number greater than 0"),
    ):
        with pytest.raises(FederationError, match=message):
            bench.MatchingBaselines(**options)
