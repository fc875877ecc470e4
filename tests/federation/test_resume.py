"""What a checkpoint holds is compared with what the running federation would save: plain trees."""

import copy
import re
import zipfile

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from lightning_fl.aggregators import ClusteredFL, FedAdam
from lightning_fl.callbacks import AtomicCheckpointIO, ClientFaults, FederatedLoop
from lightning_fl.callbacks.checkpoint import check_outline
from lightning_fl.federation.compare import compare
from lightning_fl.federation.context import Federation as Description
from lightning_fl.federation.memory import ClientMemory
from lightning_fl.federation.progress import Progress
from lightning_fl.federation.resume import Resume, check_contents, check_rule
from lightning_fl.files import error_context
from lightning_fl.policies import (
    DiscreteGaussianReinforce,
    PersonalizedPolicyGradient,
)
from lightning_fl.runners import client_runner
from lightning_fl.store import ClientStore
from lightning_fl.transforms import TopK
from lightning_fl.types import Cohort, FederationError

COUNTS = {"ready": 1, "started": 1, "processed": 1, "completed": 0}
IDENTITY = ("num_clients", "checksum", "aggregator_class", "policy_class", "optimizer_state")


class Federation:
    """What a fit is when it resumes, and a checkpoint of it."""

    def __init__(self, folder="/runs", optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        self.module = L.LightningModule()
        self.module.net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.module.register_buffer("seen", torch.zeros(2), persistent=False)
        self.module.register_buffer("late", None, persistent=False)
        self.optimizer = optimizer(self.module.net[0].parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, "min")
        best = ModelCheckpoint(str(folder), monitor="val_loss")
        self.trainer = L.Trainer(
            accelerator="cpu",
            logger=False,
            callbacks=[best, EarlyStopping("val_loss")],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.strategy.optimizers = [self.optimizer]
        self.trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(self.scheduler)]
        self.runner = client_runner(self.module, "local", self.optimizer, True)
        description = Description(4, Cohort(4, 4), layout=self.runner.layout)
        store = ClientStore()
        self.memory = ClientMemory(store, [TopK(0.5)], [], description, torch.device("cpu"))

    def checkpoint(self):
        trainer, loops = self.trainer, ("fit_loop", "validate_loop", "test_loop", "predict_loop")
        saved = {
            "pytorch-lightning_version": "2.6.0",
            "epoch": 0,
            "global_step": 4,
            "state_dict": self.module.state_dict(),
            "loops": {name: getattr(trainer, name).state_dict() for name in loops},
            "callbacks": {c.state_key: c.state_dict() for c in trainer.callbacks if c.state_dict()},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.scheduler.state_dict()],
        }
        saved["loops"]["fit_loop"]["epoch_progress"] = {"total": COUNTS, "current": COUNTS}
        saved["callbacks"]["FederatedLoop"] = {
            **{"seed": 0, "num_clients": 4, "number of parameter tensors": 4, "checksum": "ab"},
            **{"aggregator_class": "FedAvg", "policy_class": "Schedule", "buffers": "local"},
            **{"optimizer_state": "keep", "round": 1, "val_loss": 0.5, "base_lr": 0.1},
            "exchanged": self.runner.num_parameters,
            "local parameters": [],
            "rows": [{"round": 1, "lr": 0.1, "dropped_clients": "2 3"}],
            "monitored": {"val_loss": 0.5},
            "steps": 3,
            "runner": {"graphs": True},
            "trained": [True, False, True, True, True],
            "options": {"client_fraction": 0.5, "transforms": ["TopK"], "optimizer": "Adam"},
            **{"aggregator": {}, "policy": {}, "server": None},
            "unsaved buffers": {"seen": torch.ones(2), "late": torch.ones(5)},
            "store": [
                kept("buffer.net.1.running_mean", torch.zeros(2, 2)),
                kept("optimizer.0.step", torch.ones(2)),
                kept("optimizer.0.exp_avg", torch.ones(2, 2, 3)),
                kept("optimizer.0.exp_avg_sq", torch.ones(2, 2, 3)),
                kept("transform.0.error", torch.zeros(2, 12)),
            ],
        }
        return copy.deepcopy(saved)

    def resume(self, tree):
        """Check everything, in the order of ``FederatedLoop``."""
        with error_context("it cannot be loaded", Exception):
            check_outline(tree, 10**4)
            check_contents(self.trainer, tree, state := tree["callbacks"].get("FederatedLoop"))
            options = FederatedLoop().options
            resume = Resume(options, Progress(), self.memory.store)
            own = self.checkpoint()["callbacks"]["FederatedLoop"]
            resume._identity = {name: own[name] for name in IDENTITY}
            resume._options = own["options"]
            resume.check(self.trainer, self.module, tree, state, True)
            resume.load(state)
        resume.restore(self)


def refused(call, *args):
    """Return the message of a refusal; empty if there is none."""
    try:
        call(*args)
    except FederationError as error:
        return str(error)
    return ""


def kept(name, rows, clients=(1, 3)):
    return {"name": name, "clients": torch.tensor(clients), "rows": rows}


@pytest.fixture
def federation():
    return Federation()


@pytest.fixture
def refuses(federation):
    """Change a checkpoint; it has to be refused, in one printable line."""

    def check(change, words):
        tree = federation.checkpoint()
        change(tree)
        with pytest.raises(FederationError, match=words) as error:
            federation.resume(tree)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 1000

    return check


def test_a_checkpoint_of_the_federation_is_accepted(federation):
    federation.resume(federation.checkpoint())


# --- the comparison -------------------------------------------------------------------------------

leaves = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.just("min"),
    st.builds(torch.zeros, st.tuples(st.integers(0, 3), st.integers(1, 2))),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)
#: What fits into no place of these trees.
wrong = st.sampled_from([None, "other", b"x", 10**30, torch.zeros(7), {1, 2}, 1j, [], {}])
quick = settings(max_examples=80, derandomize=True, database=None, deadline=None)


def places(tree):
    """Where a tree has its leaves and containers, as containers and keys."""
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from places(tree[key])


@quick
@given(trees)
def test_a_tree_fits_itself_and_other_numbers(tree):
    compare(copy.deepcopy(tree), tree)
    for names, left in (
        ("more", {"x", "more"}),
        ("added", {"x", "more", "new"}),
        ("same", {"x", "new"}),
    ):
        saved = {"x": copy.deepcopy(tree), "more": 1}
        compare(saved, {"x": tree} | ({} if names == "more" else {"new": 2}), names=names)
        assert saved.keys() == left


@quick
@given(trees.filter(lambda tree: isinstance(tree, dict | list)), wrong, st.data())
def test_a_tree_with_anything_wrong_in_it_is_refused(tree, value, data):
    damaged = copy.deepcopy(tree)
    spot, key = data.draw(st.sampled_from(list(places(damaged))))
    spot[key] = value
    with pytest.raises(FederationError) as error:
        compare(damaged, tree, "it")
    assert str(error.value).isprintable()
    spot, key = data.draw(st.sampled_from(list(places(damaged := copy.deepcopy(tree)))))
    del spot[key]
    if spot or tree:  # an entry is missing
        with pytest.raises(FederationError, match=r"is missing|entries, here|the state"):
            compare(damaged, tree)


@pytest.mark.parametrize(
    ("value", "like", "words"),
    [
        (3, {}, "the state must be of type dict, got 3"),
        (True, 1, r"int \| float, got True"),
        (1, True, "of type bool, got 1"),
        (2**63, 1, "must be of type int"),
        (True, range(2), "an integer from 0 to 1, got True"),
        (-1, range(2), "an integer from 0 to 1, got -1"),
        (1, float, "of type float, got 1"),
        ("\x1b[2J", str, "of type str, got .*x1b"),
        ("max", "min", "must be 'min', as here, got 'max'"),
        (torch.zeros(2), torch.zeros(3), r"a tensor of float32 \[3\], got a tensor of float32 \[2"),
        (torch.zeros(2), torch.zeros(2).long(), r"a tensor of int64 \[2\], got"),
        (torch.zeros(2), None, "got a tensor"),
        (torch.zeros(2) * 1j, torch.zeros(2), r"must be .* float32 \[2\], got .* complex64"),
        ({"a": 1}, None, "got {'a': 1}"),
        ([1, "a"], [int, ...], r"\[1\] must be of type int, got 'a'"),
        ({"a": "b"}, {str: int}, "'a' must be of type int, got 'b'"),
        ({1: 1}, {str: int}, "each name in it must be of type str, got 1"),
        ({"a": [{"b": 1}]}, {"a": [{"b": str}]}, r"'a'\[0\]\['b'\] must be of type str, got 1"),
        ({"a": 1}, {7: 2}, "each name in it must be of type int, got 'a'"),
    ],
)
def test_what_differs_is_named(value, like, words):
    with pytest.raises(FederationError, match=words):
        compare(value, like)


def test_what_fits_an_example():
    compare(torch.zeros(2).double(), torch.zeros(2))  # loading casts
    compare({"a": [1, 2.0], "b": None}, {"a": [0.5, 1], "b": None})
    compare({7: 3, 9: 1}, {2: 1})  # milestones of a scheduler
    compare((1, "x", []), [None, str, []])
    for value in (None, True, 3, 0.5, "x", [1], torch.zeros(())):
        compare(value, None)


# --- Lightning's part -----------------------------------------------------------------------------


def laughs():
    """30 lists of ten times the next: 10^30 parts, in a file of a kilobyte."""
    tree = [0]
    for _ in range(30):
        tree = [tree] * 10
    return tree


def endless():
    tree = []
    tree.append(tree)
    return tree


def deep():
    tree = []
    for _ in range(100):
        tree = [tree]
    return tree


def epochs(tree):
    return tree["loops"]["fit_loop"]["epoch_progress"]


def hide(tree):
    tree["state_dict"].get = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("pytorch-lightning_version"), "version' is missing"),
        (lambda t: t.update({"pytorch-lightning_version": "x"}), "Invalid version"),
        (lambda t: t.update({"pytorch-lightning_version": "1.5"}), "Lightning 1.5: bring it up to"),
        (lambda t: t.update({"pytorch-lightning_version": 2}), "version' must be of type str"),
        (lambda t: t.pop("state_dict"), "'state_dict' is missing"),
        (lambda t: t.update(state_dict=[1]), "'state_dict' must be of type dict"),
        (lambda t: t["state_dict"].update({None: 2}), "each name in 'state_dict' must be of type"),
        (lambda t: t["state_dict"].update({1: 2}), "each name in 'state_dict' must be of type str"),
        (lambda t: t.update(callbacks=[]), "'callbacks' must be of type dict"),
        (lambda t: t.update(callbacks={"FederatedLoop": 3}), "must be of type dict, got 3"),
        (lambda t: t.update(loops={"fit_loop": 1}), "must be of type dict, got 1"),
        (lambda t: t["loops"]["fit_loop"].update(epoch_progress=[]), "must be of type dict"),
        (lambda t: epochs(t)["total"].update(ready="1"), r"'ready'\] must be of type int"),
        (lambda t: epochs(t)["total"].update(started=7), "epochs are not the 1 rounds: 'total'"),
        (lambda t: epochs(t)["current"].update(completed=-1), "epochs are not the 1 rounds"),
        (lambda t: epochs(t)["current"].update(completed=2), "epochs are not the 1 rounds"),
        (
            lambda t: t["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"].update(
                ready=3
            ),
            "in the middle of a batch",
        ),
        (lambda t: t.update(epoch=-1), "'epoch' must be an integer from 0"),
        (lambda t: t.update(global_step=10**30), "'global_step' must be an integer"),
        (lambda t: t.update(optimizer_states=[]), "has 0 entries, here there are 1"),
        (lambda t: t.pop("optimizer_states"), "optimizer_states must be of type list .* got None"),
        (
            lambda t: t["optimizer_states"][0]["param_groups"][0].update(lr="1"),
            r"\['lr'\] must be of type int \| float, got '1'",
        ),
        (lambda t: t["optimizer_states"][0].update(step=1), "has 'step', which is a method"),
        (lambda t: t["lr_schedulers"][0].update(mode="no"), "must be 'min', as here, got 'no'"),
        (lambda t: t["lr_schedulers"][0].update(get_last_lr=1), "which is a method"),
        (lambda t: t.update(x=laughs()), "more parts than bytes"),
        (lambda t: t.update(x=endless()), "nested more than 64 levels"),
        (lambda t: t.update(x=deep()), "nested more than 64 levels"),
        (lambda t: t.update(x=torch.ones(1).expand(10**12)), "larger than the file"),
        (lambda t: t.update(x=torch.ones(2, device="meta")), "not simply its numbers"),
        (lambda t: t.update(x=torch.eye(2).to_sparse()), "not simply its numbers"),
        (hide, "OrderedDict has an attribute 'get'"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_lightnings_part_is_checked(refuses, change, words):
    refuses(change, words)


def test_progress_of_another_version_of_lightning_is_completed(federation):
    tree = federation.checkpoint()
    del epochs(tree)["total"]["completed"], tree["optimizer_states"][0]["param_groups"][0]["fused"]
    epochs(tree)["current"]["increment_ready"] = 3  # would be in the place of a method
    tree["lr_schedulers"][0]["more"] = 1
    federation.resume(tree)
    assert epochs(tree) == {"total": COUNTS, "current": COUNTS}
    assert tree["optimizer_states"][0]["param_groups"][0]["fused"] is None
    assert tree["lr_schedulers"][0]["more"] == 1


def test_a_round_begins_without_a_state_of_the_optimizer(federation):
    tree = federation.checkpoint()
    tree["optimizer_states"][0]["state"] = {0: torch.ones(3)}
    federation.resume(tree)
    assert tree["optimizer_states"][0]["state"] == {}


def callback(kind, change):
    def find(tree):
        change(next(v for k, v in tree["callbacks"].items() if k.startswith(kind)))

    return find


@pytest.mark.parametrize("kind", ["best", "last", "kth_best", None])
@pytest.mark.parametrize("path", ["/runs/../precious.ckpt", "/runs/config.yaml", "s3://x/y.ckpt"])
def test_a_checkpoint_cannot_have_files_removed(refuses, kind, path):
    def change(state):
        if kind:
            state[f"{kind}_model_path"] = path
        else:
            state["best_k_models"] = {path: torch.tensor(1.0)}

    refuses(callback("ModelCheckpoint", change), "is not where a checkpoint of this run may be")


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("EarlyStopping", lambda s: s.pop("wait_count"), "'wait_count' is missing"),
        ("EarlyStopping", lambda s: s.update(wait_count=-1), "'wait_count' must be an integer"),
        ("EarlyStopping", lambda s: s.update(best_score=torch.ones(2)), "'best_score' must be a"),
        ("EarlyStopping", lambda s: s.update(stopping_reason=99), "'stopping_reason' must be"),
        ("ModelCheckpoint", lambda s: s.update(kth_value=1), "'kth_value' must be a tensor"),
        ("ModelCheckpoint", lambda s: s.update(best_k_models={"a": 1}), "'a'. must be a tensor"),
        ("ModelCheckpoint", lambda s: s.update(best_model_score="\n"), "'best_model_score' must"),
        ("ModelCheckpoint", lambda s: s.pop("last_model_path"), "'last_model_path' is missing"),
    ],
)
def test_callbacks_of_lightning_are_checked(refuses, kind, change, words):
    refuses(callback(kind, change), words)


def test_the_best_of_before_are_removed_as_ever(federation):
    best = {"/runs/a.ckpt": torch.tensor(1.0)}
    tree = federation.checkpoint()
    callback("ModelCheckpoint", lambda s: s.update(best_k_models=best, best_model_score=best))
    federation.resume(tree)


# --- the loop's part ------------------------------------------------------------------------------


def keep(*args, **kwargs):
    return lambda s: s.update(store=[kept(*args, **kwargs)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("rows"), "'rows' is missing"),
        (lambda s: s.update(round=-1), "'round' must be an integer from 0"),
        (lambda s: s.update(round=10**30), "'round' must be an integer"),
        (lambda s: s.update(round=True), "'round' must be an integer .* got True"),
        (lambda s: s.update(round=2), "'rows' are of the rounds .1., and 'round' is 2"),
        (lambda s: s.update(rows=[]), "'rows' are of the rounds"),
        (lambda s: s.update(rows=[3]), r"'rows'\[0\] must be of type dict, got 3"),
        (lambda s: s["rows"][0].update(lr=[1]), r"\['lr'\] must be of type int"),
        (lambda s: s["rows"][0].update(dropped_clients="\x1b[2J"), "must be of type"),
        (lambda s: s.update(val_loss="1"), r"'val_loss' must be of type float \| None, got '1'"),
        (lambda s: s.update(monitored=[]), "'monitored' must be of type dict"),
        (lambda s: s.update(monitored={"a": "b"}), "'a'. must be of type float"),
        (
            lambda s: s.update(base_lr=torch.ones(2)),
            "'base_lr' must be of type float, got a tensor",
        ),
        (lambda s: s.update(base_lr=1e308), "'base_lr' is 1e.308, which is no learning rate"),
        (lambda s: s.update(base_lr=float("nan")), "'base_lr' is nan"),
        (lambda s: s.update(trained=[1]), "'trained'.0. must be of type bool"),
        (lambda s: s.update(options={"x": laughs()}), "more parts than bytes"),
        (lambda s: s.update(options={"x": {}}), "'options'"),
        (lambda s: s.update(seed=-1), "'seed' must be an integer from 0"),
        (lambda s: s.update(checksum=3), "'checksum' must be of type str, got 3"),
        (lambda s: s.update(policy=[]), "'policy' must be of type dict"),
        (lambda s: s.update(aggregator={3: 4}), "each name in 'aggregator' must be of type str"),
        (lambda s: s.update(server=[torch.ones(3)]), "'server' must be of type dict"),
        (
            lambda s: s.update(server={3: torch.ones(3)}),
            "each name in 'server' must be of type str",
        ),
        (lambda s: s["unsaved buffers"]["seen"].requires_grad_(), "requires a gradient"),
        (lambda s: s["unsaved buffers"].update(x=torch.ones(3)), "no non-persistent buffer 'x'"),
        (lambda s: s["unsaved buffers"].update(seen=torch.ones(3)), "'seen'. must be a tensor of"),
        (lambda s: s["unsaved buffers"].pop("seen"), "'seen'. is missing"),
        (lambda s: s["unsaved buffers"].update(late=3), "'late'. must be of type Tensor, got 3"),
        (lambda s: s.update(store={}), "'store' must be of type list"),
        (lambda s: s.update(store=[{"name": "x"}]), "'clients'. is missing"),
        (keep("x", torch.ones(2)), "client 1 keeps: 'x' is not known here"),
        (keep(3, torch.ones(2)), r"\['name'\] must be of type str, got 3"),
        (keep("x", torch.ones(1), [4]), "must be .* from 0 to 3, got 4"),
        (keep("x", torch.ones(1), [-1]), "a client of 'store' must be"),
        (keep("x", torch.ones(1), [0, 1]), "zip.* argument 2 is shorter"),
        (keep("x", torch.ones(()), [0]), "tensor has no dimensions"),
        (keep("x", torch.ones(1), [0.5]), "must be an integer from 0 to 3, got 0.5"),
        (keep("x", torch.ones(1), [[0]]), "unhashable"),
        (keep("x", torch.ones(2), [1, 1]), "client 1 has two rows 'x'"),
        (lambda s: s["store"].append(s["store"][0]), "client 1 has two rows 'buffer.net"),
        (keep("optimizer.0.x", torch.ones(2, 9, 9)), "0.x does not fit its parameter"),
        (keep("optimizer.7.x", torch.ones(2)), "'optimizer.7.x' is not known here"),
        (keep("buffer.net.1.running_mean", torch.ones(2, 9)), "running_mean must be a tensor of"),
        (keep("buffer.net.1.seen", torch.ones(2, 9)), "'buffer.net.1.seen' is not known"),
        (keep("transform.0.error", torch.ones(2, 5)), "keeps: TopK.* cannot use it"),
    ],
)
def test_the_loops_part_is_checked(refuses, change, words):
    refuses(lambda tree: change(tree["callbacks"]["FederatedLoop"]), words)


#: In the place of anything.
WILD = [
    *(None, True, 0, -1, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e308, float("nan")),
    *("", "0", "\x1b[2J", "../../etc", "s3://a/b.ckpt", "x" * 5000, b"bytes", 1j, {1, 2}),
    *([], {}, [[]], {"": None}, {"0": 0}, {0: 0}, laughs(), endless(), deep(), torch.float16),
    *(torch.zeros(()), torch.ones(3), torch.ones(2, 5), torch.zeros(0), torch.full((2,), -1)),
    *(torch.full((2, 3), torch.nan), torch.ones(1).expand(10**9), torch.ones(3, device="meta")),
    *(nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64), torch.Size([1])),
]


@settings(quick, max_examples=150)
@given(st.data())
@pytest.mark.filterwarnings("ignore:resuming None with other options")
def test_no_change_is_more_than_refused(data):
    tree = (federation := Federation()).checkpoint()
    for _ in range(data.draw(st.integers(1, 2))):
        depth, spot = data.draw(st.integers(0, 6)), tree
        path = []
        while isinstance(spot, dict | list) and spot and len(path) <= depth:
            key = data.draw(st.sampled_from(list(spot) if isinstance(spot, dict) else [0, -1]))
            path.append((spot, key))
            spot = spot[key]
        owner, key = path[-1]
        wild = data.draw(st.sampled_from(WILD))
        owner[key] = {} if wild == {} and isinstance(wild, dict) else wild  # names may be added
    message = refused(federation.resume, tree)
    assert message.isprintable()
    assert len(message) < 2000
    if message:
        return
    for owner, state in zip(
        (federation.optimizer, federation.scheduler),
        (tree["optimizer_states"][0], tree["lr_schedulers"][0]),
        strict=True,
    ):
        before = copy.deepcopy(owner.state_dict())
        owner.load_state_dict(state)
        owner.load_state_dict(before)
    federation.trainer.fit_loop.load_state_dict(copy.deepcopy(tree["loops"]["fit_loop"]))


# --- rules and callbacks --------------------------------------------------------------------------


def clustered():
    rule = ClusteredFL(warmup=0)
    rule.start(torch.zeros(6))
    return rule


def fedadam():
    rule = FedAdam()
    rule.start(torch.zeros(6))
    return rule


def reinforce():
    return DiscreteGaussianReinforce({"lr": [0.1, 0.2]})


def personalized():
    return PersonalizedPolicyGradient([{"lr": 0.1}, {"lr": 0.2}], "reward", monitor="val_loss")


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (
            clustered,
            lambda s: s.update(cluster_of=torch.full((3,), 5)),
            "inconsistent: it has models of 1 clusters, and its",
        ),
        (clustered, lambda s: s.update(models=3), "models must be a tensor of .*, got 3"),
        (clustered, lambda s: s.update(models=torch.zeros(6)), "models must be a tensor of"),
        (clustered, lambda s: s.update(tree=s["tree"].double()), "tree must be a tensor of int64"),
        (
            fedadam,
            lambda s: s.update(_extra_state={"kind": "Adaptive", "state": {0: {"step": 3}}}),
            "FedAdam cannot resume from the checkpoint: Adaptive rejected",
        ),
        (fedadam, lambda s: s.update(_extra_state=[]), "_extra_state must be of type dict, got"),
        (
            reinforce,
            lambda s: s.update(mean=s["mean"] * torch.nan),
            "the policy of the checkpoint is invalid",
        ),
        (reinforce, lambda s: s.update(rewards=torch.zeros(7).double()), "scores, 7 rewards"),
        (personalized, lambda s: s.update(logits=s["logits"] * torch.nan), "has non-finite"),
    ],
)
def test_the_state_of_rules_is_checked(make, change, words):
    state = {name: copy.deepcopy(value) for name, value in make().state_dict().items()}
    check_rule(make(), state)
    make().load_state_dict(state)
    change(state)
    assert re.search(
        words, refused(check_rule, rule := make(), state) or refused(rule.load_state_dict, state)
    )


def test_tables_of_rules_may_have_another_length():
    state = clustered().state_dict()
    check_rule(
        clustered(), {**state, "models": torch.zeros(4, 6), "tree": torch.zeros(4, 2).long()}
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("happened"), "checkpoint's ClientFaults.'happened'. is missing"),
        (lambda s: s.update(happened=[(1, 2)]), "has 2 entries, here there are 3"),
        (
            lambda s: s.update(happened=[(1, -2, "nan")]),
            r"'happened'\]\[0\]\[1\] must be an integer",
        ),
        (lambda s: s.update(happened=[(1, 2, "x")]), "must list rounds, clients and faults"),
        (lambda s: s.update(virtual_time="1"), "'virtual_time'. must be of type float"),
    ],
)
def test_faults_of_before_are_checked(change, words):
    state = {"happened": [(1, 2, "nan")], "virtual_time": 0.5}
    ClientFaults().load_state_dict(state)
    change(state)
    with pytest.raises(FederationError, match=words):
        ClientFaults().load_state_dict(state)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "last.ckpt"
    tree = {"pytorch-lightning_version": "2.6", "state_dict": {"a": torch.ones(999)}, "epoch": 3}
    AtomicCheckpointIO().save_checkpoint(tree, path)
    return path.read_bytes()


@settings(quick, max_examples=60)
@given(at=st.floats(0, 0.9999), piece=st.binary(max_size=4), cut=st.sampled_from([0, 1, 4, 10**6]))
def test_no_damage_to_the_file_is_more_than_refused(content, tmp_path_factory, at, piece, cut):
    at = int(at * len(content))
    path = tmp_path_factory.getbasetemp() / "damaged.ckpt"
    path.write_bytes(content[:at] + piece + content[at + cut :])
    found = {}
    if message := refused(lambda: found.update(AtomicCheckpointIO().load_checkpoint(path))):
        assert message.isprintable()
    else:  # some bytes of an archive mean nothing
        assert found["epoch"] == 3
        assert found["state_dict"]["a"].tolist() == [1] * 999


@pytest.mark.parametrize(("method", "times"), [(zipfile.ZIP_DEFLATED, 1), (zipfile.ZIP_STORED, 9)])
def test_an_archive_that_unpacks_to_more_is_refused(content, tmp_path, method, times):
    (tmp_path / "last.ckpt").write_bytes(content)
    with (
        zipfile.ZipFile(tmp_path / "last.ckpt") as old,
        zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", method) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.filelist *= times  # the same bytes in many places
    with pytest.raises(FederationError, match=r"it is compressed .*, which"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "bomb.ckpt")


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}q\x00.", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(FederationError, match=r"a.ckpt is damaged, or not a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(FederationError, match=r"cannot be read \(No such file"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for tree in ([1], {"state_dict": {}}):
        torch.save(tree, tmp_path / "a.ckpt")
        with pytest.raises(FederationError, match="not a checkpoint of Lightning"):
            AtomicCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


def test_pickles_by_hand_are_read_with_the_same_care(content, tmp_path):
    """torch.save itself could not write so deep a tree."""
    (tmp_path / "last.ckpt").write_bytes(content)
    path, levels = tmp_path / "deep.ckpt", 10**4
    with zipfile.ZipFile(tmp_path / "last.ckpt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            inside = old.read(name)
            if name.endswith("data.pkl"):
                more = b"(X\x01\x00\x00\x00x" + b"]" * levels + b"a" * (levels - 1) + b"u."
                inside = inside[:-1] + more
            new.writestr(name, inside)
    with pytest.raises(FederationError, match="nested more than 64 levels deep"):
        AtomicCheckpointIO().load_checkpoint(path)
