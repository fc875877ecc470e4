"""What rules for adapters of different ranks share: ranks, cut models, traffic, what is refused."""

import pytest
import torch
from torch import nn

from adapted import HEAD, PAIRS, Adapted, train
from lightning_fl import ClientModule
from lightning_fl.aggregators import FedAvg, FlexLoRA, Staged, ZeroPadding
from lightning_fl.callbacks import ClientFaults
from lightning_fl.functional.low_rank import draw_ranks
from lightning_fl.functional.randomness import RandomStream, generator
from lightning_fl.transforms import TopK
from lightning_fl.types import FederationError

RANKS = [1, 2, 4, 3, 4]
OPTIMIZERS = [
    None,  # SGD
    lambda ps: torch.optim.Adam(ps, lr=0.05, weight_decay=0.1),
    lambda ps: torch.optim.AdamW(ps, lr=0.05),
]


@pytest.fixture
def run(fit, data):
    """Train a module of five clients; returns it and the loop."""

    def run(rule, module=None, rounds=1, **options):
        module = Adapted() if module is None else module
        return module, train(fit, data, module, rule, rounds, **options)

    return run


# --- ranks and cut models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "optimizer"), [(FlexLoRA, make) for make in OPTIMIZERS] + [(ZeroPadding, None)]
)
def test_what_is_beyond_a_clients_rank_is_zero_before_and_after_training(run, rule, optimizer):
    module, _ = run(rule(RANKS), Adapted(optimizer=optimizer), rounds=2)
    for i, states in enumerate(module.seen):
        rank = RANKS[i % 5]  # all clients train, in order
        for state in states:
            for a, b in PAIRS:
                assert not state[a][rank:].any()
                assert not state[b][:, rank:].any()
        after = states[1]
        assert all(after[b][:, :rank].any(0).all() for _, b in PAIRS), "each rank is trained"
    assert all(module.net[i].product().any() for i in (0, 2))


def test_ranks_are_drawn_by_the_seed(run):
    for seed in (1, 2):
        _, loop = run(FlexLoRA({1: 0.4, 4: 0.6}), seed=seed)
        wanted = draw_ranks({1: 0.4, 4: 0.6}, 5, generator(seed, RandomStream.RANKS))
        assert torch.equal(loop.aggregator.client_ranks, wanted)
    assert run(FlexLoRA(3))[1].aggregator.client_ranks.tolist() == [3] * 5
    assert run(FlexLoRA())[1].aggregator.client_ranks.tolist() == [4] * 5


# --- zero-padding, beside a plain derivation ----------------------------------------------------


@pytest.mark.parametrize("weighting", ["samples", "uniform", "norm"])
def test_padded_factors_are_averaged(run, weighting):
    module, loop = run(ZeroPadding(RANKS, weighting), rounds=2)
    starts, ends = zip(*module.seen[5:], strict=True)  # in the second round
    norms = [sum((e[b] @ e[a]).square().sum() for a, b in PAIRS).sqrt() for e in ends]
    samples = loop.fit.federation.num_samples.double()
    of_samples = torch.ones(5).double() if weighting == "uniform" else samples
    weights = torch.stack(norms) if weighting == "norm" else of_samples
    found = module.state()
    for names, each in (((n for pair in PAIRS for n in pair), weights), (HEAD, of_samples)):
        for name in names:
            mean = sum(p * end[name] for p, end in zip(each / each.sum(), ends, strict=True))
            torch.testing.assert_close(found[name], mean, rtol=0, atol=1e-12)
    for a, _ in PAIRS:  # the second round starts from the first's average, cut to the rank
        whole = starts[2][a]
        for rank, start in zip(RANKS, starts, strict=True):
            assert torch.equal(start[a][:rank], whole[:rank])
            assert not start[a][rank:].any()


# --- traffic --------------------------------------------------------------------------------------


def bytes_of(rank):
    """Bytes of a client of a rank in float64: both adapters, and the head."""
    return 8 * (rank * (6 + 8) + rank * (8 + 7) + 7 * 3 + 3)


def test_a_client_of_a_lower_rank_sends_and_receives_less(run):
    _, loop = run(FlexLoRA(RANKS))
    wanted = sum(bytes_of(rank) for rank in RANKS)
    assert (loop.rows[0]["bytes_up"], loop.rows[0]["bytes_down"]) == (wanted, wanted)
    _, loop = run(FlexLoRA(RANKS), rounds=3, clients_per_round=2)
    for row in loop.rows:
        assert row["bytes_up"] == row["bytes_down"]
    assert len({row["bytes_up"] for row in loop.rows}) > 1


def test_a_transform_compresses_what_a_client_sends(run):
    options = {"update_transforms": [TopK(0.5, error_feedback=False)]}
    (_, full), (_, half) = (run(FlexLoRA(rank), **options) for rank in (4, 2))
    share = half.rows[0]["bytes_up"] / full.rows[0]["bytes_up"]
    assert share == pytest.approx(bytes_of(2) / bytes_of(4), rel=0.02)


def test_a_stage_counts_its_own_traffic(run):
    _, loop = run(Staged([1], [FlexLoRA(RANKS), FedAvg()]), rounds=2)
    wanted = [sum(bytes_of(rank) for rank in RANKS), 5 * bytes_of(4)]
    assert [row["bytes_up"] for row in loop.rows] == wanted


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1, 2], "ranks has 2 entries, but there are 5 clients"),
        ([1, 2, 3, 4, 5], "ranks has rank 5, but the module's adapters have rank 4"),
        ([1, 2, 3, 4, 0], "a rank in ranks must be an integer of at least 1, got 0"),
        ({2: 0.0}, "a share in ranks must be a finite number greater than 0, got 0"),
        ("8", "ranks must be an integer"),
        (True, "ranks must be an integer of at least 1, or None, got True"),
    ],
)
def test_ranks_are_checked(run, ranks, words):
    with pytest.raises(FederationError, match=words):
        run(FlexLoRA(ranks))


def frozen_a():
    module = Adapted()
    module.net[0].lora_A.requires_grad_(False)
    return module


def no_adapters():
    return ClientModule(nn.Linear(6, 3)).double()


def local_b():
    module = Adapted()
    module.local = ["net.0.lora_B.default.weight"]
    return module


def grouped():
    module = Adapted()
    module.net[0].lora_B["grouped"] = nn.Linear(2, 8, bias=False).double()
    module.net[0].lora_A["grouped"] = nn.Linear(6, 4, bias=False).double()
    return module


def embedding():
    module = Adapted()
    module.net[0].register_parameter("lora_embedding_A", nn.Parameter(torch.zeros(4, 6)))
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (frozen_a, "trains both factors of an adapter, but .*lora_A.* is frozen: .*use FedAvg"),
        (no_adapters, "the module has none that are trained: build"),
        (local_b, "lora_A.* is not one of them: train both"),
        (grouped, "lora_A.* is not one of them.*leave its layer out"),
        (embedding, "lora_embedding_A is not one of them"),
    ],
)
def test_modules_that_do_not_fit_are_refused(run, make, words):
    with pytest.raises(FederationError, match=words):
        run(FlexLoRA(2), make())


def test_convolutions_are_products_of_flattened_filters(run):
    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.lora_A = nn.Conv2d(1, 3, (2, 3), bias=False)
            self.lora_B = nn.Conv2d(3, 4, 1, bias=False)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.lora_B(self.lora_A(x.reshape(-1, 1, 2, 3))).flatten(1))

    torch.manual_seed(0)
    module = ClientModule(Conv(), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)).double()
    before = torch.einsum("orij,rcxy->ocxy", module.net.lora_B.weight, module.net.lora_A.weight)
    run(FlexLoRA(), module)
    after = torch.einsum("orij,rcxy->ocxy", module.net.lora_B.weight, module.net.lora_A.weight)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_a_client_of_a_lower_rank_takes_less_time_on_the_virtual_clock(run):
    faults = ClientFaults(step_seconds=0.0, bandwidth=1.0)
    _, loop = run(FlexLoRA([1] * 5), callbacks=[faults])
    row = loop.rows[0]
    each = (row["bytes_up"] + row["bytes_down"]) / 5
    assert row["virtual_time"] == pytest.approx(each)
