"""Every federation of the table passes the check that users run on theirs."""

import inspect
from functools import partial
from importlib import import_module

import pytest

from federations import CLIENTS, LONG, NOT_VECTORIZED, ROWS
from frozen import frozen_once
from lightning_fl import check
from lightning_fl.testing import check_federation

#: One row of each kind of message between processes; the others of this column are slow.
ON_PROCESSES = (
    "FedAvg, Proximal, uneven steps",
    "FedOpt, WeightDivergence, WeightedSampler",
    "FedYogi, APFL",
    "FedDyn, TopK",
    "FedControl, PersonalizedPolicyGradient",
    "ClusteredFL, RunReport",
    "Gossip, a foreign module",
    "CoordinateMedian, Backdoor",
    "DPFedAvg, PoissonSampler",
    "SecureAggregation, DPFedAvg",
    "FlexLoRA",
)
#: Rows that count steps: one client is compared with Lightning without a loop.
PLAIN = "accumulated gradients", "two optimizers, kept", "a schedule that ends with the run"


@pytest.fixture
def few_processes(monkeypatch):
    """Fork only for the columns that need a new process: a fork takes longer than a small fit.

    What imports a fit leaves in this process, later forks need not repeat.
    """
    forked = check._trained

    def trained(settings, *fits):
        if fits[0].is_resumed or fits[0].processes > 1:
            return forked(settings, *fits)
        return [check._attempt(settings, fit) for fit in fits]

    monkeypatch.setattr(check, "_trained", trained)


def passes():
    """What needs a new process is slow for rows that are like another one."""
    for name in ROWS:
        shares = name in ON_PROCESSES
        resumes = shares or name in LONG or name in PLAIN
        columns = ["order", "vectorized", *["resume"] * resumes, *["processes"] * shares]
        columns += ["plain"] * (name in PLAIN)
        yield pytest.param(name, columns, id=name)
        if others := [column for column in ("resume", "processes") if column not in columns]:
            slow = f"{name}, {' and '.join(others)}"
            yield pytest.param(name, others, id=slow, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "columns"), list(passes()))
def test_federation_passes(root, few_processes, name, columns):
    rounds = 3 if name in LONG else 2
    with frozen_once():
        results = check_federation(
            partial(ROWS[name], root), rounds=rounds, clients=CLIENTS, columns=columns
        )
    for result in results:
        if result.column == "vectorized" and (reason := NOT_VECTORIZED.get(name)):
            assert result.outcome == "refused", result
            assert reason in result.detail
        else:
            assert result.outcome == "equal", result


# --- every public class has a row -----------------------------------------------------------------

#: Parts of rows that no row is about, and what is tested elsewhere.
NOT_IN_THE_TABLE = {
    *("LocalNetwork", "ModelView", "ParameterGroup", "Recorder", "Trace"),  # parts of terms
    "Message",  # what transforms are applied to
    *("AtomicCheckpointIO", "RoundCheckpoint", "RoundProgress"),  # no part in training
    *("Augment", "Characters", "Clip", "Draws", "InMemory", "LogMel", "Relabel"),
    *("ImageDataModule", "Resized", "SplitDataModule", "Words"),
    "Newsgroups",  # in memory, as TopicText
    *("LoRA", "TimmModel", "DPSGD", "SampleAccountant"),  # with an extra
}


@pytest.fixture(scope="module")
def used(root):
    """The classes of what federations of the table are made of."""
    found = set()
    for make in ROWS.values():
        run = make(root)
        loop = run.loop
        modules = (run.module, loop.aggregator, loop.policy)
        parts = [part for module in modules for part in module.modules()]
        parts += [loop, loop.options.sampler, run.data, *run.callbacks]
        parts += loop.options.update_transforms
        found |= {type(part) for part in parts}
    return found


ROOMS = "aggregators callbacks datamodules models objectives policies samplers transforms"


@pytest.mark.parametrize("name", ROOMS.split())
def test_every_class_has_a_row(used, name):
    room = import_module(f"lightning_fl.{name}")
    kinds = (getattr(room, name) for name in room.__all__)
    public = {kind for kind in kinds if inspect.isclass(kind) and not inspect.isabstract(kind)}
    assert {kind.__name__ for kind in public - used} <= NOT_IN_THE_TABLE


def test_rows_that_are_named_exist():
    assert {*ON_PROCESSES, *LONG, *PLAIN, *NOT_VECTORIZED} <= set(ROWS)
