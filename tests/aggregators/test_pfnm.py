"""PFNM in a federation: what is merged, where clients go on, checkpoints, and what is refused."""

from itertools import pairwise

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_fl import ClientModule, Lanes
from lightning_fl.aggregators import PFNM
from lightning_fl.callbacks import FederatedLoop, PersonalizedEvaluation, RoundCheckpoint
from lightning_fl.chain import Chain
from lightning_fl.functional.networks import match_networks
from lightning_fl.policies import PersonalizedPolicyGradient, Schedule
from lightning_fl.types import ClientUpdate, FederationError

ALL = {"gamma": 1.0, "sigma2": 0.5, "sigma02": 5.0}


def net(*sizes, activation=nn.ReLU):
    layers = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out), activation()]
    return nn.Sequential(*layers[:-1])


def module(sizes=(6, 8, 3), activation=nn.ReLU, lr=0.1, seed=0):
    torch.manual_seed(seed)
    made = ClientModule(
        net(*sizes, activation=activation), optimizer=lambda p: torch.optim.SGD(p, lr=lr)
    )
    return made.double()


def vector(made):
    return torch.cat([p.detach().reshape(-1) for p in made.parameters()])


def begun(rule, made):
    rule.prepare(made, (torch.randn(2, 6, dtype=torch.float64),))
    rule.start(vector(made))
    return rule


@pytest.mark.parametrize("sizes", [(6, 8, 3), (6, 8, 5, 3)])
def test_a_round_merges_what_clients_have_become(sizes):
    made = module(sizes)
    rule = begun(PFNM(**ALL, seed=3), made)
    rule.class_counts = torch.tensor([[3, 0, 2], [1, 4, 4], [9, 9, 9], [0, 1, 1]])
    ids = torch.tensor([0, 3, 1])
    starts = rule.server_for(ids)
    assert not torch.equal(starts[0], starts[1])
    deltas = torch.randn(3, starts.shape[1], dtype=torch.float64)
    rule.update(ClientUpdate(ids[:2], deltas[:2], torch.tensor([5, 2])))
    rule.update(ClientUpdate(ids[2:], deltas[2:], torch.tensor([9])))
    assert torch.equal(rule.compute(), vector(made))
    order = [0, 2, 1]  # by their numbers
    nets = []
    for end in (starts + deltas)[order]:
        pieces = end.split([p.numel() for p in module(sizes).parameters()])
        tensors = [t.view_as(p) for t, p in zip(pieces, module(sizes).parameters(), strict=True)]
        nets.append(list(zip(tensors[::2], tensors[1::2], strict=True)))
    counts = rule.class_counts[torch.tensor([0, 1, 3])]
    seeds = rule._matched([0, 1, 3], nets, {**ALL, **rule._options()})  # the same orders
    begin = [matching.assignments for matching in seeds.matchings]
    expected = match_networks(nets, counts, **ALL, start=begin, sweeps=0)
    rule.publish()
    for (w, b), layer in zip(expected.layers, Chain(made).layers.values(), strict=True):
        torch.testing.assert_close(layer.weight, w)
        torch.testing.assert_close(layer.bias, b)
        assert (layer.out_features, layer.in_features) == tuple(w.shape)
    figures = rule.figures()
    assert figures["width_1"] == expected.widths[0]
    assert figures["neurons"] == 3 * sum(sizes[1:-1])
    # The next round starts from the neurons that a client's own became.
    rule.withdraw()
    assert [tuple(p.shape) for p in made.parameters()] == [
        tuple(p.shape) for p in module(sizes).parameters()
    ]
    again = rule.server_for(torch.tensor([3]))[0]
    own = torch.cat([t.reshape(-1) for pair in expected.of_client(2) for t in pair])
    torch.testing.assert_close(again, own)
    assert sorted(rule.assignments()) == [0, 1, 3]
    assert rule.assignments()[3][0] == expected.matchings[0].assignments[2].tolist()
    assert rule.figure() is not None


def test_narrower_clients_stay_narrow(fit, data):
    made = module((6, 8, 3))
    rule = PFNM(**ALL, widths=[8, 3])
    fit(made, FederatedLoop(aggregator=rule, policy=Schedule(num_steps=7)), data())
    assert [len(rule.assignments()[client][0]) for client in range(4)] == [8, 3, 8, 3]
    assert 8 <= Chain(made).shapes[0][0] <= 22
    rule.withdraw()
    first = Chain(made).unpack(rule.starts[1], [(8, 6), (3, 8)])
    assert not first[0][0][3:].any()
    assert not first[0][1][3:].any()
    assert not first[1][0][:, 3:].any()
    assert first[0][0][:3].all()


def test_the_search_takes_the_narrowest_of_the_good(fit, data):
    made = module()
    rule = PFNM(sigma2=1.0, tolerance=1.0)
    loop = fit(made, FederatedLoop(aggregator=rule), data(), rounds=1)
    narrow = loop.rows[0]["width_1"]
    loop = fit(
        made := module(),
        FederatedLoop(aggregator=PFNM(sigma2=1.0, tolerance=0.0)),
        data(),
        rounds=1,
    )
    assert narrow <= loop.rows[0]["width_1"] == Chain(made).shapes[0][0]
    assert loop.rows[0]["gamma"] in (1.0, 1e-3, 50.0)
    x, y = data().train.tensors
    with torch.no_grad():
        right = (made(x).argmax(1) == y).double().mean()
    assert loop.rows[0]["train_accuracy"] == pytest.approx(float(right))


def test_it_resumes_bit_equal_and_loads_elsewhere(fit, data, trainer, tmp_path):
    def rule():
        return PFNM(gamma=1.0, sigma2=0.01, sigma02=1.0, seed=5)

    def run(folder, rounds, wrap=lambda m: m, **options):
        made = module()
        loop = FederatedLoop(0.5, rule(), Schedule(num_steps=5), seed=2)
        callbacks = [RoundCheckpoint(str(folder))]
        fit(
            wrap(made),
            loop,
            data(),
            rounds=rounds,
            callbacks=callbacks,
            enable_checkpointing=True,
            **options,
        )
        return made, loop

    for wrap in (lambda m: m, lambda m: Lanes(m, lanes=2)):
        whole, one = run(tmp_path / "whole", 5, wrap)
        run(tmp_path / "parts", 3, wrap)
        last = str(tmp_path / "parts" / "last.ckpt")
        parts, two = run(tmp_path / "parts", 5, wrap, ckpt_path=last)
        assert one.rows == two.rows
        assert Chain(whole).shapes[0][0] > 8
        assert all(
            torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True)
        )
        assert torch.equal(one.aggregator.starts, two.aggregator.starts)
    saved = str(tmp_path / "whole" / "last.ckpt")
    fresh = module(seed=9)
    callbacks = [RoundCheckpoint(str(tmp_path / "whole"))]
    trainer(FederatedLoop(aggregator=rule()), callbacks=callbacks, enable_checkpointing=True).test(
        fresh, data(test=data().val), ckpt_path=saved, verbose=False
    )
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), fresh.parameters(), strict=True)
    )
    plain, state = module(seed=9), torch.load(saved, weights_only=True)["state_dict"]
    Chain(plain).fit_to(state)
    plain.load_state_dict(state)
    assert torch.equal(plain(torch.ones(1, 6).double()), whole(torch.ones(1, 6).double()))


def test_a_round_that_fails_leaves_the_network_of_before(fit, data):
    made = module()

    class Fail(RoundCheckpoint):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 2:
                raise KeyError("stop")

    rule = PFNM(**ALL)
    with pytest.raises(KeyError):
        fit(
            made,
            FederatedLoop(aggregator=rule),
            data(),
            callbacks=[Fail()],
            enable_checkpointing=True,
        )
    for (w, b), layer in zip(rule.network(), Chain(made).layers.values(), strict=True):
        assert torch.equal(layer.weight, w)
        assert torch.equal(layer.bias, b)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.a(x).relu()
        return self.c(x + self.b(x).relu())


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), "BatchNorm1d"),
        (Residual(), "order counts"),
        (
            nn.Sequential(
                nn.Linear(6, 5), nn.Softmax(1), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)
            ),
            "LayerNorm",
        ),
        (nn.Linear(6, 3), "two layers or more"),
        (nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3)), "each with a bias"),
    ],
)
def test_networks_that_cannot_be_matched(fit, data, network, message):
    made = ClientModule(network).double()
    with pytest.raises(FederationError, match=message):
        fit(made, FederatedLoop(buffers="average", aggregator=PFNM(**ALL)), data())


def test_what_does_not_go_together(fit, data):
    with pytest.raises(FederationError, match="does not map 0 to 0"):
        fit(
            module(activation=nn.Sigmoid), FederatedLoop(aggregator=PFNM(**ALL, widths=[3])), data()
        )
    with pytest.raises(FederationError, match="9 neurons, the module's network 8"):
        fit(module(), FederatedLoop(aggregator=PFNM(**ALL, widths=[9])), data())
    with pytest.raises(FederationError, match="no client has a training sample of class 3, of 4"):
        fit(module((6, 8, 4)), FederatedLoop(aggregator=PFNM(**ALL)), data())
    with pytest.raises(FederationError, match="labels go up to 2, the network has 2"):
        fit(module((6, 8, 2)), FederatedLoop(aggregator=PFNM(**ALL)), data())
    with pytest.raises(FederationError, match="leave one of them out"):
        fit(
            module(),
            FederatedLoop(aggregator=PFNM(**ALL)),
            data(local_test_size=0.2),
            callbacks=[PersonalizedEvaluation()],
        )
    policy = PersonalizedPolicyGradient([{"lr": 0.1}, {"lr": 0.2}])
    with pytest.raises(FederationError, match="replaces its network"):
        fit(module(), FederatedLoop(aggregator=PFNM(**ALL), policy=policy), data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "gamma must be positive and finite"),
        ({"sigma2": float("nan")}, "sigma2 must be positive"),
        ({"sigma02": -1.0}, "sigma02 must be positive"),
        ({"start": "mine"}, "start must be own or server"),
        ({"sweeps": -1}, "sweeps must be at least 0"),
        ({"widths": [3, 0]}, "widths must be at least 1, got 0"),
        ({"cap": 0}, "cap must be at least 1"),
        ({"max_width": 0}, "max_width must be at least 1"),
        ({"tolerance": -0.1}, "tolerance must be at least 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(FederationError, match=message):
        PFNM(**options)


def test_it_needs_a_loop_and_a_score():
    rule = PFNM()
    rule.start(torch.zeros(3))
    with pytest.raises(FederationError, match="FederatedLoop"):
        rule.server_for(torch.tensor([0]))
    made = module()
    rule = begun(PFNM(), made)
    rule.update(ClientUpdate(torch.tensor([0]), 0 * vector(made)[None], torch.tensor([1])))
    rule.compute()
    with pytest.raises(FederationError, match="give them all"):
        rule.publish()


def test_a_module_of_any_kind(fit, data):
    class Mine(LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.last(torch.sigmoid(self.first(x)))

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    made = Mine().double()
    fit(made, FederatedLoop(aggregator=PFNM(**ALL), policy=Schedule(num_steps=20)), data())
    assert made.first.out_features == made.last.in_features >= 8


def test_the_search_leaves_out_what_is_much_worse():
    made = module()
    rule = begun(PFNM(seed=3), made)
    ids = torch.arange(3)
    moves = 0.3 * torch.randn(3, len(vector(made)), generator=torch.Generator().manual_seed(0))
    widths = []

    def chosen(score):
        rule.update(ClientUpdate(ids, moves.double(), torch.ones(3)))
        rule.compute()
        rule.publish(score)
        width = Chain(made).shapes[0][0]
        rule.withdraw()
        rule.reset()
        rule.round.zero_()
        rule.starts.zero_()
        rule.known.zero_()
        return width

    def seen():
        widths.append(Chain(made).shapes[0][0])
        return 0.9

    narrowest = chosen(seen)
    assert narrowest == min(widths) < max(widths)
    better = chosen(lambda: 0.9 - 0.1 * (Chain(made).shapes[0][0] == narrowest))
    assert better == min(width for width in widths if width > narrowest)
