"""SCAFFOLD: the algorithm written plainly, its traffic, and what is not sent."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_fl import VectorizedClients
from lightning_fl.aggregators import Scaffold
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.policies import Schedule
from lightning_fl.transforms import Quantize
from two_classes import samples
from written_plainly import LR, Noted, close, module, of_all_samples, trained, vector


def plainly(loop, data, option, server_lr, weighting, weight_decay=0.0, momentum=0.0):
    """Algorithm 1 of the paper, on the batches of a run."""
    n = [len(part) for part in data.parts]
    p = [1 / len(n)] * len(n) if weighting == "uniform" else [k / sum(n) for k in n]
    x = vector(module())
    c, own = torch.zeros_like(x), {k: torch.zeros_like(x) for k in range(len(n))}
    models = []
    for batches in loop.batches:
        moves, changes = {}, {}
        for k, steps in batches.items():
            y = trained(x, steps, decay=weight_decay, added=c - own[k], momentum=momentum)
            if option == "I":
                after = of_all_samples(x, data, k)[1]
            else:
                after = own[k] - c + (x - y) / (len(steps) * LR)
            moves[k], changes[k] = y - x, after - own[k]
            own[k] = after
        share = sum(p[k] for k in moves)
        x = x + server_lr * sum(p[k] / share * moves[k] for k in moves)
        c = c + sum(p[k] * changes[k] for k in moves)
        models.append(x)
    return models, c, own


@pytest.mark.parametrize(
    ("option", "momentum"), [("I", 0.0), ("II", 0.0), ("II", 0.8)], ids=["I", "II", "momentum"]
)
@pytest.mark.parametrize(
    ("server_lr", "weighting", "decay"), [(1.0, "uniform", 0.0), (0.7, "samples", 0.1)]
)
def test_rounds_are_the_algorithm_with_partial_participation(
    fit, option, momentum, server_lr, weighting, decay
):
    data, rule = samples(), Scaffold(option, server_lr, weighting)
    loop = Noted(rule, Schedule(num_steps=4), seed=1, clients_per_round=3)
    fit(module(weight_decay=decay, momentum=momentum), loop, data, rounds=5)
    models, control, own = plainly(loop, data, option, server_lr, weighting, decay, momentum)
    assert len({*map(str, (sorted(batches) for batches in loop.batches))}) > 1
    close(loop.models, models)
    close(rule.control, control)
    for client, rows in loop.store.rows.items():
        close(rows["part.0.control"], own[client])
    for row in loop.rows:  # three clients send and receive ten parameters, and as many numbers more
        assert row["bytes_up"] == row["bytes_down"] == 3 * 2 * 10 * 8


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_gradients_are_corrected_where_a_graph_would_make_the_update(fit, monkeypatch, momentum):
    """Plain SGD of whole groups is part of the compiled graph, which knows no correction."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def run(wrap):
        made, rule = module(momentum=momentum), Scaffold()
        loop = FederatedLoop(rule, Schedule(num_steps=3), seed=1, clients_per_round=4)
        fit(wrap(made), loop, samples(), rounds=3)
        return vector(made), rule.control

    plain = run(lambda m: m)
    graphs = run(lambda m: VectorizedClients(m, 2, compile=True))
    close(graphs, plain)


class FreezesTheRest(Callback):
    """Only the last layer, which stays with the clients, is trained from the second round on."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(not trainer.current_epoch)


def test_a_round_may_train_nothing_that_is_sent(fit, blobs, data):
    made = module(make=lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    rule, options = Scaffold("I"), {"local_parameters": ["net.1.*"]}
    options |= {"update_transforms": [Quantize(4)], "policy": Schedule(num_steps=2)}
    kept = []

    class Note(FreezesTheRest):
        def on_train_epoch_end(self, trainer, pl_module):
            kept.append((made.net[0].weight.detach().clone(), rule.control.clone()))

    with pytest.warns(UserWarning, match="keep their initial values"):
        fit(made, FederatedLoop(rule, **options), data(), rounds=2, callbacks=[Note()])
    assert all(torch.equal(first, second) for first, second in zip(*kept, strict=True))
