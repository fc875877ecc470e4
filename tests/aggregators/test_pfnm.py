"""PFNM in a federation: what is merged, where clients go on, checkpoints, and what is refused."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from lightning_fl import ClientModule
from lightning_fl.aggregators import PFNM, FedAvg
from lightning_fl.aggregators.matching.layer_stack import LayerStack
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation, RoundCheckpoint
from lightning_fl.functional.networks import MatchingOptions, match_networks
from lightning_fl.policies import PersonalizedPolicyGradient
from lightning_fl.types import FederationError
from linear import WithoutForward
from mlp import MATCHED, federation, module, net
from rounds import aggregate, of, sent
from written_plainly import vector


def begun(rule, made):
    rule.prepare(made, lambda: (torch.randn(2, 6, dtype=torch.float64),))
    rule.start(vector(made))
    return rule


@pytest.mark.parametrize("sizes", [(6, 8, 3), (6, 8, 5, 3)])
def test_a_round_merges_what_clients_have_become(sizes):
    made = module(sizes)
    rule = begun(PFNM(**MATCHED, seed=3), made)
    counts = torch.tensor([[3, 0, 2], [1, 4, 4], [9, 9, 9], [0, 1, 1]])
    of(4, rule, data=SimpleNamespace(class_counts=counts))
    starts = rule.models_for(torch.tensor([0, 3, 1]))
    assert not torch.equal(starts[0], starts[1])
    deltas = torch.randn(3, starts.shape[1], dtype=torch.float64)
    rule.update(sent(deltas[:2], [5, 2], [0, 3]))
    rule.update(sent(deltas[2:], [9], [1]))
    assert torch.equal(rule.compute(), vector(made))
    order = [0, 2, 1]  # by their numbers
    nets = []
    for end in (starts + deltas)[order]:
        pieces = end.split([p.numel() for p in module(sizes).parameters()])
        tensors = [t.view_as(p) for t, p in zip(pieces, module(sizes).parameters(), strict=True)]
        nets.append(list(zip(tensors[::2], tensors[1::2], strict=True)))
    counts = rule.class_counts[torch.tensor([0, 1, 3])]
    seeds = rule._matched([0, 1, 3], nets, MatchingOptions(**MATCHED))  # the same orders
    begin = [matching.assignments for matching in seeds.matchings]
    expected = match_networks(nets, counts, MatchingOptions(**MATCHED, sweeps=0), start=begin)
    rule.load_global_network()
    torch.testing.assert_close(LayerStack(made).read(), expected.layers)
    for layer in LayerStack(made).layers.values():
        assert (layer.out_features, layer.in_features) == layer.weight.shape
    figures = rule.metrics()
    assert figures["width_1"] == expected.widths[0]
    assert figures["neurons"] == 3 * sum(sizes[1:-1])
    # The next round starts from the neurons that a client's own became.
    rule.load_client_network()
    assert [tuple(p.shape) for p in made.parameters()] == [
        tuple(p.shape) for p in module(sizes).parameters()
    ]
    again = rule.models_for(torch.tensor([3]))[0]
    own = torch.cat([t.reshape(-1) for pair in expected.of_client(2) for t in pair])
    torch.testing.assert_close(again, own)
    assert sorted(rule.assignments()) == [0, 1, 3]
    assert rule.assignments()[3][0] == expected.matchings[0].assignments[2].tolist()


def two_rounds(rule, made, rounds=2):
    """The rule after rounds of clients 0, 1, 2 and then 0, 2, 3, and the second round's updates."""
    begun(rule, made)
    random = torch.Generator().manual_seed(5)
    for round, ids in enumerate(([0, 1, 2], [0, 2, 3])):
        starts = rule.models_for(torch.tensor(ids))
        deltas = 0.4 * torch.randn(starts.shape, generator=random, dtype=torch.float64)
        if round < rounds:
            aggregate(rule, vector(made), sent(deltas, ids=ids))
            rule.load_global_network()
            rule.load_client_network()
    return rule, starts + deltas


@pytest.mark.parametrize("sizes", [(6, 8, 3), (6, 8, 5, 3)])
def test_a_second_round_goes_on_from_the_assignment_of_the_first(sizes):
    """Client 3 was not in the first round, and client 1 is not in the second."""
    options = {"gamma": 1.0, "client_variance": 0.3, "prior_variance": 5.0, "seed": 3}
    once, ends = two_rounds(PFNM(**options), module(sizes), rounds=1)
    first = once.assignments()
    start = [
        [torch.tensor(first[client][layer]) if client != 3 else None for client in (0, 2, 3)]
        for layer in range(len(sizes) - 2)
    ]
    nets = [once.module_chain.unpack(end, once._clients.shapes) for end in ends]
    given = {name: value for name, value in options.items() if name != "seed"}

    def expected(start):
        settings = MatchingOptions(**given, sweeps=3)
        found = match_networks(nets, None, settings, start=start, generator=once._orders())
        return found, [[m.assignments[row].tolist() for m in found.matchings] for row in range(3)]

    network, atoms = expected(start)
    twice, _ = two_rounds(PFNM(**options), module(sizes))
    assert [twice.assignments()[client] for client in (0, 2, 3)] == atoms
    torch.testing.assert_close(twice.merged, once.module_chain.pack(network.layers))
    assert 8 < network.widths[0] < 24  # some neurons are shared, not all
    assert expected(None)[1] != atoms


def test_narrower_clients_stay_narrow(fit, data):
    made = module((6, 8, 3))
    rule = PFNM(**MATCHED, widths=[8, 3])
    fit(made, federation(rule, 7), data())
    assert [len(rule.assignments()[client][0]) for client in range(4)] == [8, 3, 8, 3]
    assert 8 <= LayerStack(made).shapes[0][0] <= 22
    rule.load_client_network()
    first = LayerStack(made).unpack(rule.starts[1], [(8, 6), (3, 8)])
    assert not first[0][0][3:].any()
    assert not first[0][1][3:].any()
    assert not first[1][0][:, 3:].any()
    assert first[0][0][:3].all()


def test_its_checkpoint_loads_elsewhere(fit, data, trainer, tmp_path):
    def rule():
        return PFNM(gamma=1.0, client_variance=0.01, prior_variance=1.0, seed=5)

    keep = {"callbacks": [RoundCheckpoint(str(tmp_path))], "enable_checkpointing": True}
    whole, loop = module(), federation(rule(), seed=2, client_fraction=0.5)
    fit(whole, loop, data(), rounds=2, **keep)
    assert LayerStack(whole).shapes[0][0] > 8
    fresh, saved = module(seed=9), str(tmp_path / "last.ckpt")
    elsewhere = trainer(FederatedLoop(aggregator=rule()), **keep)
    elsewhere.test(fresh, data(test=data().val), ckpt_path=saved, verbose=False)
    assert torch.equal(vector(whole), vector(fresh))


def test_checkpoints_of_all_moments(fit, data, tmp_path):
    """In a round, after an exception: as of the round's start, with the network of before."""

    class Fail(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 2 and batch_idx == trainer.num_training_batches - 1:
                raise KeyError("stop")

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 2 and batch_idx == 0:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    def run(callbacks=(), **options):
        made = module()
        rule = PFNM(gamma=50.0, client_variance=0.1, prior_variance=1.0, seed=5)
        loop = federation(rule, 9, seed=2)
        with warnings.catch_warnings():  # of callbacks that a checkpoint had
            warnings.simplefilter("ignore")
            fit(made, loop, data(), rounds=4, callbacks=callbacks, **options)
        return made, loop

    whole, one = run()
    saver = OnExceptionCheckpoint(str(tmp_path), "failed")
    with pytest.raises(KeyError, match="stop"):
        run([Save(), Fail(), saver], enable_checkpointing=True)
    plain = torch.utils.data.DataLoader(data().val or data().train, batch_size=60)
    x = next(iter(plain))[0]
    for name in ("within", "failed"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        rows = saved["callbacks"]["FederatedLoop"]["rows"]
        assert len(rows) == 2
        fresh = module(seed=9)
        LayerStack(fresh).fit_to(saved["state_dict"])
        fresh.load_state_dict(saved["state_dict"])
        assert LayerStack(fresh).shapes[0][0] == int(rows[-1]["width_1"]) > 8
        assert fresh(x).isfinite().all()
        again, two = run(ckpt_path=str(tmp_path / f"{name}.ckpt"))
        assert one.rows == two.rows
        assert torch.equal(vector(whole), vector(again))


def test_dropout_is_no_order_and_nothing_is_drawn_elsewhere(fit, data):
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    drawn = []
    for made, rule in ((network, PFNM(**MATCHED)), (nn.Linear(6, 3), FedAvg())):
        user = ClientModule(made).double()
        torch.manual_seed(5)
        fit(user, FederatedLoop(aggregator=rule), data(), rounds=1)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.a(x).relu()
        return self.c(x + self.b(x).relu())


FLAT, IMAGES = torch.randn(2, 6).double(), torch.randn(2, 1, 8, 8).double()
CONV = nn.Conv2d(1, 4, 3)


@pytest.mark.parametrize(
    ("layers", "x", "message"),
    [
        ([nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)], FLAT, "BatchNorm1d"),
        ([Residual()], FLAT, "depends on the order"),
        (
            [nn.Linear(6, 5), nn.Softmax(1), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)],
            FLAT,
            "LayerNorm",
        ),
        ([nn.Linear(6, 3)], FLAT, "two or more layers"),
        ([nn.Linear(6, 5, bias=False), nn.Linear(5, 3)], FLAT, "layers with biases"),
        ([nn.Linear(6, 5), nn.Linear(4, 3)], FLAT, "each layer must feed the next"),
        (
            [CONV, nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)],
            IMAGES,
            "without groups",
        ),
        ([CONV, nn.Conv2d(4, 3, 6), nn.Flatten()], IMAGES, "the last of them Linear"),
        (
            [CONV, nn.LocalResponseNorm(3, alpha=9.0), nn.Flatten(), nn.Linear(144, 3)],
            IMAGES,
            "depends on the order",
        ),
    ],
)
def test_networks_that_cannot_be_matched_are_refused(layers, x, message):
    module = ClientModule(nn.Sequential(*layers)).double()
    with pytest.raises(FederationError, match=message):
        PFNM(**MATCHED).prepare(module, lambda: (x,))


@pytest.mark.parametrize(
    ("made", "widths", "message"),
    [
        ({"activation": nn.Sigmoid}, [3], "requires an activation that maps 0 to 0"),
        ({}, [9], "9 neurons, the module's network 8"),
        ({"sizes": (6, 8, 4)}, None, "no client has a training sample of class 3, of 4"),
        ({"sizes": (6, 8, 2)}, None, "has 2 outputs, and the largest label is 2"),
    ],
)
def test_networks_that_do_not_fit_the_clients_are_refused(fit, data, made, widths, message):
    with pytest.raises(FederationError, match=message):
        fit(module(**made), FederatedLoop(aggregator=PFNM(**MATCHED, widths=widths)), data())


def test_what_needs_one_network_is_refused(fit, data):
    tested, personal = data(local_test_size=0.2), [PersonalizedEvaluation()]
    with pytest.raises(FederationError, match="remove one of them"):
        fit(module(), FederatedLoop(aggregator=PFNM(**MATCHED)), tested, callbacks=personal)
    policy = PersonalizedPolicyGradient([{"lr": 0.1}, {"lr": 0.2}])
    with pytest.raises(FederationError, match="replaces its network"):
        fit(module(), FederatedLoop(aggregator=PFNM(**MATCHED), policy=policy), data())


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ([3, 0], r"widths\[1\] must be an integer of at least 1, got 0"),
        ([2.5], r"widths\[0\] must be an integer of at least 1, got 2.5"),
        ([], "widths must be a non-empty list of numbers"),
        (5, "widths must be a non-empty list"),
    ],
)
def test_widths_that_are_none_are_refused(widths, message):
    with pytest.raises(FederationError, match=message):
        PFNM(**MATCHED, widths=widths)


def test_search_without_a_score_is_refused():
    made = module()
    rule = begun(PFNM(), made)
    aggregate(rule, vector(made), sent(0 * vector(made)[None]))
    with pytest.raises(FederationError, match="set gamma, client_variance and"):
        rule.load_global_network()


def test_what_is_no_pair_or_has_no_forward_is_refused(fit, data):
    made = WithoutForward(net(6, 8, 3)).double()
    with pytest.raises(FederationError, match=r"forward\(x\), and WithoutForward has none"):
        fit(made, FederatedLoop(aggregator=PFNM(**MATCHED)), data())
    rule = PFNM(**MATCHED)
    with pytest.raises(FederationError, match="got a batch of type dict"):
        rule.prepare(module(), lambda: {"x": torch.ones(2, 6)})


def test_the_search_takes_the_narrowest_that_is_not_much_worse():
    made = module()
    rule = begun(PFNM(seed=3), made)
    moves = 0.3 * torch.randn(3, len(vector(made)), generator=torch.Generator().manual_seed(0))
    widths = []

    def chosen(score):
        rule.update(sent(moves.double()))
        rule.compute()
        rule.load_global_network(score)
        width = LayerStack(made).shapes[0][0]
        rule.load_client_network()
        rule.reset()
        rule.round.zero_()
        rule.starts.zero_()
        rule.known.zero_()
        return width

    def seen():
        widths.append(LayerStack(made).shapes[0][0])
        return 0.9

    narrowest = chosen(seen)
    assert narrowest == min(widths) < max(widths)

    def worse():
        return 0.9 - 0.1 * (LayerStack(made).shapes[0][0] == narrowest)

    assert chosen(worse) == min(width for width in widths if width > narrowest)
    rule.tolerance = 1.0
    assert chosen(worse) == narrowest


def test_a_stop_in_a_round_leaves_the_network_of_before(fit, data, trainer):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.current_epoch == 2 and batch_idx == 1

    made, rule = module(), PFNM(gamma=50.0, client_variance=0.1, prior_variance=1.0)
    loop = fit(made, federation(rule, 4), data(), rounds=4, callbacks=[Stop()])
    assert loop.round == 2
    assert LayerStack(made).shapes[0][0] == int(loop.rows[-1]["width_1"]) > 8
    torch.testing.assert_close(LayerStack(made).read(), rule.network(), rtol=0, atol=0)


def test_a_round_without_anybody_keeps_the_network_and_has_no_figures_of_another():
    made = module()
    rule, _ = two_rounds(PFNM(**MATCHED, seed=1), made)
    merged = rule.network()
    assert "width_1" in rule.metrics()
    rule.start(vector(made))
    rule.conclude(returned=0, min_clients=1)
    rule.load_global_network()
    assert "width_1" not in rule.metrics()
    torch.testing.assert_close(LayerStack(made).read(), merged, rtol=0, atol=0)
