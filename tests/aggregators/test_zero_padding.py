"""Zero-padding beside a plain derivation, and its limits."""

import pytest
import torch

from adapted import HEAD, PAIRS, Adapted
from lightning_fl.aggregators import FedAvg, ZeroPadding
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import Schedule
from lightning_fl.types import FederationError

RANKS = [1, 2, 4, 3, 4]


@pytest.fixture
def run(fit, data):
    def run(rule, rounds=1):
        module, samples = Adapted(), data(num_clients=5, partition=Dirichlet(2.0))
        loop = FederatedLoop(rule, Schedule(num_steps=3), seed=2)
        fit(module, loop, samples, rounds=rounds)
        return module, samples.num_samples.double()

    return run


@pytest.mark.parametrize("weighting", ["samples", "uniform", "norm"])
def test_padded_factors_are_averaged(run, weighting):
    module, samples = run(ZeroPadding(RANKS, weighting), rounds=2)
    starts, ends = zip(*module.seen[5:], strict=True)  # in the second round
    norms = [sum((e[b] @ e[a]).square().sum() for a, b in PAIRS).sqrt() for e in ends]
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


def test_equal_ranks_are_fedavg(run):
    padded, plain = run(ZeroPadding(), 2)[0].state(), run(FedAvg(), 2)[0].state()
    for name, value in plain.items():
        torch.testing.assert_close(padded[name], value, rtol=0, atol=1e-12)


def test_the_weighting_is_checked():
    with pytest.raises(
        FederationError, match="weighting must be samples, uniform or norm, got 'n'"
    ):
        ZeroPadding(weighting="n")
