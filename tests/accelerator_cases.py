"""Federations on an accelerator, compared with those on the CPU: on a GPU, or on a pretended one.

``test_accelerator.py`` runs them in a process of their own, as the pretended device stays in it. By
hand: ``pytest tests/accelerator_cases.py``.
"""

import inspect
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pretend
from adapted import Adapted
from frozen import frozen_once
from grids import others_slow
from layouts import cifar_layout, mnist_layout, speech_commands_layout, spoken_digits_layout
from lightning_fl import (
    ClientModule,
    VectorizedClients,
    aggregators,
    callbacks,
    datamodules,
    models,
    objectives,
    optimizers,
    policies,
    samplers,
    transforms,
)
from lightning_fl.aggregators import (
    AFL,
    PFNM,
    ClusteredFL,
    CoordinateMedian,
    Downpour,
    DPFedAvg,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedControl,
    FedCostWAvg,
    FedDyn,
    FedMA,
    FedNova,
    FedOpt,
    FedPIDAvg,
    FedYogi,
    FlexLoRA,
    GeometricMedian,
    Gossip,
    Krum,
    NormClipping,
    QFedAvg,
    Scaffold,
    Staged,
    StreamingPFNM,
    TrimmedMean,
    ZeroPadding,
)
from lightning_fl.callbacks import (
    Backdoor,
    ClientAttack,
    ClientFaults,
    FederatedLoop,
    LabelFlip,
    LayerSummary,
    PersonalizedEvaluation,
    RoundCheckpoint,
    RoundProgress,
    RunReport,
)
from lightning_fl.datamodules import (
    CIFAR10,
    MNIST,
    Augment,
    Digits,
    FashionMNIST,
    FederatedDataModule,
    FromClients,
    FromDataModule,
    FromHDF5,
    FromHuggingFace,
    SpeechCommands,
    SpokenDigits,
    TopicText,
)
from lightning_fl.models import (
    CifarCNN,
    FashionCNN,
    FemnistCNN,
    KeywordCNN,
    LeNet,
    LoRA,
    MLPClassifier,
    TextTransformer,
)
from lightning_fl.objectives import (
    APFL,
    MOON,
    Ditto,
    EntropyRegularizer,
    FedEM,
    PerFedAvg,
    Proximal,
    RepresentationMatching,
    WeightDivergence,
)
from lightning_fl.optimizers import Adaptive, Combined, PFedMe
from lightning_fl.partition import Dirichlet
from lightning_fl.policies import (
    AdaptiveMu,
    DiscreteGaussianReinforce,
    HyperparameterPolicy,
    PersonalizedPolicyGradient,
    RandomPolicy,
    Schedule,
    StagedPolicy,
    Stragglers,
)
from lightning_fl.runners import Phase
from lightning_fl.samplers import (
    AFLSampler,
    AsynchronousSampler,
    PoissonSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
)
from lightning_fl.transforms import Quantize, TopK
from lightning_fl.types import FederationError
from processes import Foreign, Uneven

FEATURES, CLASSES, CLIENTS = 6, 3, 5
ON_A_GPU = torch.cuda.is_available()
NAME = "cuda" if ON_A_GPU else pretend.NAME


@pytest.fixture(scope="session", autouse=True)
def device():
    return torch.device(NAME, 0) if ON_A_GPU else pretend.install()


# --- how cases are run ----------------------------------------------------------------------------


def blobs(count=80, seed=0):
    random = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % CLASSES
    x = torch.randn(count, FEATURES, generator=random, dtype=torch.float64)
    return TensorDataset(x + y[:, None], y)


def samples(**options):
    options = {"partition": Dirichlet(0.5, min_size=8), "batch_size": 4} | options
    return FederatedDataModule(
        blobs(), blobs(21, seed=1), num_clients=CLIENTS, eval_batch_size=30, seed=1, **options
    )


SGD = partial(torch.optim.SGD, lr=0.1)


def module(*terms, optimizer=SGD):
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    return ClientModule(net, terms, optimizer)


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


#: Why clients that should train at once may train one after another: two cases of their own, and
#: batches that lie on the pretended device before they are stacked.
ONE_BY_ONE = "RuntimeError: vmap: |its batches contain a PretendTensor|training_step updates the m"


def fit(
    place,
    folder,
    make=module,
    group_size=None,
    data=samples,
    rounds=2,
    watchers=list,
    dtype=torch.float64,
    ckpt_path=None,
    trainer=None,
    wrap=None,
    **options,
):
    """Train on the CPU or on the accelerator; return the Trainer, the user's module, the loop.

    What a case gives are functions, so that each device has objects of its own.
    """
    torch.manual_seed(0)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    loop = FederatedLoop(
        **{"policy": Schedule(num_steps=2 if group_size else 1), "buffers": "average", "seed": 3}
        | options
    )
    user = make().to(dtype)
    where = {"accelerator": "cpu"}
    if place == "cuda":
        where = {"accelerator": "gpu", "devices": 1}
    elif place == pretend.NAME:
        strategy = SingleDeviceStrategy(device=torch.device(place, 0))
        where = {"accelerator": pretend.PretendAccelerator(), "strategy": strategy}
    made = L.Trainer(
        max_epochs=rounds,
        callbacks=[*watchers(), Places(), loop],
        default_root_dir=folder / place,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **QUIET | where | (trainer or {}),
    )
    trained = (
        user if group_size is None else VectorizedClients(user, **{"compile": False} | group_size)
    )
    trained = trained if wrap is None else wrap(user)
    watched = nullcontext() if ON_A_GPU or place == pretend.NAME else pretend.unwatched()
    with (
        warnings.catch_warnings(),
        watched,
        frozen_once(),
    ):  # what a case warns of is tested elsewhere
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", f".* after another, not at once: (?!{ONE_BY_ONE})")
        if ON_A_GPU:  # that warns of waits
            warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        made.fit(trained, datamodule=data(), ckpt_path=ckpt_path)
    return made, user, loop


def outcome(user, loop):
    """Return what a fit has left, on the CPU."""
    left = {
        "module": user.state_dict(),
        "rows": loop.rows,
        "rule": loop.aggregator.state_dict(),
        "policy": loop.policy.state_dict(),
        "clients": [loop.store.get(client) for client in range(CLIENTS)],
    }
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), left)


def compare(left, right):
    """Compare numbers, and all else that fits have left."""
    leaves = [torch.utils._pytree.tree_flatten(each) for each in (left, right)]
    assert leaves[0][1] == leaves[1][1]
    for one, other in zip(leaves[0][0], leaves[1][0], strict=True):
        if isinstance(one, torch.Tensor | float):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
        else:
            assert one == other


class Places(L.Callback):
    """Every tensor of the module and of the rule is on the module's device, after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        loop = next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))
        check_places(trainer.strategy.root_device, pl_module, loop)


def check_places(device, user, loop):
    for name, tensor in [*user.named_parameters(), *user.named_buffers()]:
        assert tensor.device == device, name
    for rule in loop.aggregator.modules():
        tensors = {**rule._buffers, **getattr(rule, "_defaults", {})}
        tensors |= {name: getattr(rule, name) for name in getattr(rule, "_defaults", {})}
        for name, value in tensors.items():
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    assert tensor.device == device, f"{type(rule).__name__}.{name}"


@pytest.fixture
def same(device, tmp_path):
    """Train on both devices, and compare all that is left."""

    def check(**options):
        _, user, loop = fit("cpu", tmp_path, **options)
        _, other, found = fit(NAME, tmp_path, **options)
        compare(outcome(other, found), outcome(user, loop))
        return other, found

    return check


VECTORIZED = {"group_size": 3, "steps_per_batch": 2}


def in_both_modes(test):
    cases = [pytest.param(None, id="plain", marks=pytest.mark.slow)]
    cases += [pytest.param(VECTORIZED, id="vectorized")]
    return pytest.mark.parametrize("group_size", cases)(test)


def every_vectorized(rows, plain, slow=""):
    """Run all rows vectorized, and some of them plain, too, of which the first is quick.

    What these rows are of gets the same from clients that train one by one; the names in ``plain``
    are those that do something with each client, or get more than its update. Those in ``slow``
    share what touches tensors with others.
    """
    alone = plain.split(", ")
    cases = [
        pytest.param(
            row,
            group_size,
            id=f"{name}-{'vectorized' if group_size else 'plain'}",
            marks=[pytest.mark.slow]
            * (name in slow.split(", ") or (not group_size and name != alone[0])),
        )
        for name, row in rows.items()
        for group_size in ([None, VECTORIZED] if name in alone else [VECTORIZED])
    ]
    return pytest.mark.parametrize(("row", "group_size"), cases)


def concrete(package, *others):
    """Return the public classes of a package that can be made, but for those of other kinds."""
    names = getattr(package, "__all__", None) or [
        name for name, value in vars(package).items() if inspect.isclass(value)
    ]
    kinds = {
        value
        for name in names
        if inspect.isclass(value := getattr(package, name))
        and value.__module__.startswith("lightning_fl.")
    }
    return {kind for kind in kinds if not inspect.isabstract(kind)} - set(others)


def every(rows, slow=""):
    cases = [
        pytest.param(row, id=name, marks=[pytest.mark.slow] * (name in slow.split(", ")))
        for name, row in rows.items()
    ]
    return pytest.mark.parametrize("row", cases)


# --- rules ----------------------------------------------------------------------------------------

MATCHED = {"gamma": 1.0, "client_variance": 0.5, "prior_variance": 5.0}
RULES = {
    "FedAvg": lambda: FedAvg("uniform"),
    "FedOpt": FedOpt,
    "Downpour": Downpour,
    "FedAvgM": FedAvgM,
    "FedNova": FedNova,
    "Scaffold": lambda: Scaffold("I"),
    "FedDyn": lambda: FedDyn(0.1),
    "QFedAvg": lambda: QFedAvg(2.0),
    "AFL": lambda: AFL(0.1, output="average"),
    "FedAdagrad": FedAdagrad,
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
    "FedControl": FedControl,
    "FedCostWAvg": FedCostWAvg,
    "FedPIDAvg": FedPIDAvg,
    "ClusteredFL": lambda: ClusteredFL(eps1=99.0, eps2=0.0, warmup=0, min_size=2),
    "Gossip": lambda: Gossip("ring"),
    "CoordinateMedian": CoordinateMedian,
    "TrimmedMean": TrimmedMean,
    "Krum": Krum,
    "GeometricMedian": GeometricMedian,
    "NormClipping": lambda: NormClipping(0.1),
    "DPFedAvg": lambda: DPFedAvg(quantile=0.5, count_noise=2.0, clip_norm=0.1),
    "Staged": lambda: Staged([1], [FedAvgM(), FedControl()]),
    "PFNM": lambda: PFNM(**MATCHED),
    "FedMA": lambda: FedMA(**MATCHED),
    "StreamingPFNM": lambda: StreamingPFNM(**MATCHED),
    "FedBuff": FedBuff,
    "FedAsync": FedAsync,
}
#: Options of the run for rules that need some.
UNEVEN_CLOCK = {
    "sampler": lambda: AsynchronousSampler(4),
    "watchers": lambda: [ClientFaults(speed_sigma=1.0)],
    "rounds": 4,
}
OPTIONS = {
    "FedBuff": {"clients_per_round": 2} | UNEVEN_CLOCK,
    "FedAsync": {"clients_per_round": 1} | UNEVEN_CLOCK,
}


#: Rules for modules with adapters.
ADAPTERS = {
    "FlexLoRA": lambda: FlexLoRA({1: 0.5, 2: 0.5}),
    "ZeroPadding": lambda: ZeroPadding({1: 0.5, 2: 0.5}, "norm"),
}


def test_every_rule_has_a_row():
    rows = [*RULES.values(), *ADAPTERS.values()]
    assert {type(make()) for make in rows} == concrete(aggregators)


@every_vectorized(ADAPTERS, plain="FlexLoRA", slow="ZeroPadding")
def test_a_rule_for_adapters(same, row, group_size):
    same(make=partial(Adapted, 2), aggregator=row, group_size=group_size)


@every_vectorized(
    RULES,
    plain="FedAvg, FedControl, Gossip, PFNM, DPFedAvg, FedDyn",
    slow="FedOpt, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedCostWAvg, FedPIDAvg, Krum,"
    " GeometricMedian, CoordinateMedian, TrimmedMean, NormClipping, Downpour, Staged, QFedAvg,"
    " FedMA, StreamingPFNM, FedAsync",
)
def test_a_rule(same, row, group_size):
    name = next(name for name, make in RULES.items() if make is row)
    same(aggregator=row, group_size=group_size, **OPTIONS.get(name, {}))


@every(
    {name: RULES[name] for name in ("FedControl", "ClusteredFL", "CoordinateMedian")},
    slow="ClusteredFL, CoordinateMedian",
)
def test_a_rule_with_a_round_of_few_clients(same, row):
    same(aggregator=row, min_clients=3, sampler=PoissonSampler, clients_per_round=3, rounds=3)


# --- policies and samplers ------------------------------------------------------------------------

CANDIDATES = [{"num_steps": 1}, {"num_steps": 3}]
GRID = {"lr": [0.05, 0.1], "num_steps": [1, 2, 3]}
POLICIES = {
    "Schedule": lambda: Schedule(lr=0.1, num_steps=3, decay=0.9),
    "DiscreteGaussianReinforce": lambda: DiscreteGaussianReinforce(
        GRID, optimizer="adam", learn_precision=True
    ),
    "DiscreteGaussianReinforce(clients)": lambda: DiscreteGaussianReinforce(GRID, loss="clients"),
    "PersonalizedPolicyGradient": lambda: PersonalizedPolicyGradient(CANDIDATES, floor=0.0),
    "PersonalizedPolicyGradient(reward)": lambda: PersonalizedPolicyGradient(
        CANDIDATES, method="reward"
    ),
    "StagedPolicy": lambda: StagedPolicy([1], [Schedule(lr=0.1), DiscreteGaussianReinforce(GRID)]),
    "Stragglers": lambda: Stragglers(0.9, Schedule(num_steps=4)),
    "AdaptiveMu": lambda: AdaptiveMu(0.5, policy=Schedule(num_steps=2), patience=1),
}
SAMPLERS = {
    "UniformSampler": UniformSampler,
    "PoissonSampler": PoissonSampler,
    "WeightedSampler": WeightedSampler,
    "RoundRobinSampler": RoundRobinSampler,
    "AFLSampler": AFLSampler,
}  # and AsynchronousSampler, with its rules


def test_every_policy_has_a_row():
    abstract = {HyperparameterPolicy, RandomPolicy}
    assert {type(make()) for make in POLICIES.values()} == concrete(policies, *abstract)


def test_every_sampler_has_a_row():
    assert {*SAMPLERS.values(), AsynchronousSampler} == concrete(samplers)


@every_vectorized(
    POLICIES,
    plain="PersonalizedPolicyGradient(reward)",
    slow="Schedule, Stragglers, DiscreteGaussianReinforce(clients), StagedPolicy,"
    " PersonalizedPolicyGradient(reward)",
)
def test_a_policy(same, row, group_size):
    same(make=lambda: module(Proximal(0.1)), policy=row, group_size=group_size, rounds=3)


@every(SAMPLERS, slow="PoissonSampler, WeightedSampler, RoundRobinSampler")
def test_a_sampler(same, row):
    aggregator = (lambda: AFL(0.1, mode="sampling")) if row is AFLSampler else FedAvg
    same(sampler=row, clients_per_round=3, aggregator=aggregator)


# --- objectives, optimizers, transforms -----------------------------------------------------------

TERMS = {
    "Proximal": lambda: Proximal(0.1),
    "WeightDivergence": lambda: WeightDivergence(0.1),
    "EntropyRegularizer": lambda: EntropyRegularizer(0.9, 0.1),
    "RepresentationMatching": lambda: RepresentationMatching(
        0.1, optimizer=partial(torch.optim.Adam, eps=0.1), lr_factor=0.5
    ),
    "Ditto": lambda: Ditto(0.5, lr_factor=0.5),
    "MOON": MOON,
    "APFL": APFL,
}
MODULES = {name: lambda make=make: module(make()) for name, make in TERMS.items()} | {
    "FedEM": lambda: FedEM(nn.Linear(FEATURES, CLASSES), 2, partial(torch.optim.SGD, lr=0.1)),
    "PerFedAvg": lambda: PerFedAvg(nn.Linear(FEATURES, CLASSES), 0.1, True, SGD),
    "PFedMe": lambda: module(optimizer=partial(PFedMe, inner_steps=2)),
    "Adam": lambda: module(optimizer=partial(torch.optim.Adam, lr=0.01)),
    # A GPU draws other random numbers.
    "one after another": lambda: Foreign(dropout=0.0 if ON_A_GPU else 0.2, metric=True),
    "a scheduler": lambda: Foreign(metric=False, dropout=0.0),
    # Adam would amplify the rounding of a bias before BatchNorm, which has no gradient.
    "BatchNorm": lambda: Foreign(True, 0.0, torch.optim.SGD, metric=False),
}


def test_every_objective_has_a_row():
    terms = {type(make()) for make in TERMS.values()}
    others = {ClientModule, FedEM, PerFedAvg, objectives.Recorder, objectives.ModelView}
    others |= {objectives.LocalNetwork, objectives.ParameterGroup, objectives.Trace}
    assert terms == concrete(objectives, *others)
    # Servers have Adaptive, RepresentationMatching has Combined.
    assert concrete(optimizers, FederationError) == {Adaptive, Combined, PFedMe}


@in_both_modes
@every(
    MODULES,
    slow="Proximal, EntropyRegularizer, WeightDivergence, APFL, MOON, PerFedAvg, Adam, a scheduler",
)
def test_an_objective_or_an_optimizer(same, row, group_size):
    same(make=row, group_size=group_size, data=partial(samples, drop_last=True))


@every({"SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "Adam": torch.optim.Adam})
@in_both_modes
def test_optimizer_states_that_are_kept(same, row, group_size):
    if group_size and row is torch.optim.Adam:
        pytest.skip("vectorized training refuses to keep the state of Adam")
    options = {"optimizer_state": "keep", "clients_per_round": 3, "rounds": 3}
    same(make=lambda: module(optimizer=row), group_size=group_size, **options)


@in_both_modes
@pytest.mark.parametrize("buffers", others_slow(["average"], ["average", "server", "local"]))
def test_buffers(same, buffers, group_size):
    def make():
        return Foreign(batchnorm=True, metric=False, dropout=0.0, optimizer=SLOW)

    same(make=make, buffers=buffers, group_size=group_size, data=partial(samples, drop_last=True))


@in_both_modes
def test_local_tensors_and_phases(same, group_size):
    def make():
        return Foreign(batchnorm=True, metric=False, dropout=0.0, optimizer=SLOW)

    options = {
        "local_parameters": ["type:_BatchNorm"],
        "policy": lambda: Schedule(
            num_steps=2, phases=[Phase("local", num_steps=1), Phase("shared")]
        ),
        "buffers": "average",
        "clients_per_round": 4,
    }
    same(make=make, group_size=group_size, data=partial(samples, drop_last=True), **options)


SLOW = partial(torch.optim.SGD, momentum=0.9)
TRANSFORMS = {
    "TopK": lambda: [TopK(0.3)],
    "Quantize": lambda: [Quantize(4)],
    "both, with what is left out": lambda: [TopK(0.3), Quantize(4)],
}


def test_every_transform_has_a_row():
    kinds = {type(each) for make in TRANSFORMS.values() for each in make()}
    assert kinds == concrete(transforms, transforms.Message)


@every_vectorized(TRANSFORMS, plain="both, with what is left out", slow="TopK, Quantize")
def test_a_transform(same, row, group_size):
    same(update_transforms=row, group_size=group_size, clients_per_round=3, rounds=3)


# --- training -------------------------------------------------------------------------------------


def frozen():
    made = module(Proximal(0.1))
    made.net[0].requires_grad_(False)
    return made


TRAINING = {
    "frozen layers that are not exchanged": {"make": frozen},
    "uneven steps and rates": {"policy": Uneven},
    "uneven steps, kept": {"policy": Uneven, "optimizer_state": "keep"},
    "uneven batches, weighted": {"data": partial(samples, batch_size=None)},
    "uneven batches, in groups": {
        "data": partial(samples, batch_size=7),
        "make": lambda: Foreign(metric=False, dropout=0.0, optimizer=SLOW),
    },
    "clipped by norm": {"trainer": {"gradient_clip_val": 0.1}},
    "clipped by value": {
        "trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    },
}


@pytest.mark.parametrize(
    "is_vectorized",
    [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="vectorized")],
)
@every(TRAINING, slow="uneven steps and rates, clipped by norm, clipped by value")
def test_training(same, row, is_vectorized):
    options = {"group_size": {"group_size": 3, "steps_per_batch": 2}} | row
    same(**options | ({} if is_vectorized else {"group_size": None}))


def test_a_local_step_in_each_batch(same):
    same(group_size={"group_size": 3, "steps_per_batch": 1})


# --- data -----------------------------------------------------------------------------------------


def spoken(kind, layout, **options):
    def make(root):
        layout(root)
        return lambda: kind(str(root), num_clients=2, batch_size=4, **options)

    return make


def pictures(kind, layout, **options):
    def make(root):
        layout(root)
        return lambda: kind(str(root), num_clients=2, batch_size=4, val_size=4, **options)

    return make


def small(**options):
    return lambda: KeywordCNN(width=2, hidden=8, **options)


def text():
    """Return a text network, with an adapter where peft is installed."""
    net = TextTransformer(40, 3, 8, 1, 2, 8)
    return LoRA(net, 2, target_modules=["query"]) if find_spec("peft") else net


def per_client(root):
    random = torch.Generator().manual_seed(0)
    x = torch.rand(4, 6, 1, 28, 28, generator=random, dtype=torch.float64)
    clients = [TensorDataset(each, torch.arange(6)) for each in x]
    return lambda: FromClients(clients, val_size=4, batch_size=3)


class Loaded(LightningDataModule):
    """A user's data module."""

    def train_dataloader(self):
        x = torch.rand(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return DataLoader(TensorDataset(x, torch.arange(24) % 3), batch_size=4, shuffle=True)


def rows_of_texts(root):
    datasets = pytest.importorskip("datasets", reason='needs pip install ".[hf]"')
    texts = [[(i * j) % 7 for j in range(5)] for i in range(24)]
    columns = {"x": texts, "label": [i % 7 for i in range(24)], "role": [i % 3 for i in range(24)]}
    rows = datasets.Dataset.from_dict(columns)
    return lambda: FromHuggingFace(rows, "x", partition_by="role", val_size=4, batch_size=4)


def stored_clients(root):
    h5py = pytest.importorskip("h5py", reason='needs pip install ".[hdf5]"')
    root.mkdir()
    with h5py.File(root / "train.h5", "w") as file:
        for client in range(3):
            x = torch.rand(8, 4, generator=torch.Generator().manual_seed(client)).double()
            file[f"examples/{client}/pixels"] = x.numpy()
            file[f"examples/{client}/label"] = torch.arange(8).numpy() % 3
    return lambda: FromHDF5(str(root / "train.h5"), val_size=4, batch_size=4)


DATA = {
    "FromClients": (per_client, lambda: FemnistCNN(width=2, hidden=4)),
    "FromDataModule": (
        lambda root: lambda: FromDataModule(Loaded(), num_clients=3, val_size=4),
        lambda: MLPClassifier([4, 4, 3]),
    ),
    "FromHuggingFace": (rows_of_texts, lambda: TextTransformer(7, 7, 4, 1, 1, length=5)),
    "FromHDF5": (stored_clients, lambda: MLPClassifier([4, 4, 3])),
    "Digits": (lambda root: lambda: Digits(num_clients=2), lambda: MLPClassifier([64, 4, 10])),
    "rotated Digits": (
        lambda root: lambda: Digits(num_clients=2, client_rotations=[0, 90]),
        lambda: MLPClassifier([64, 4, 10]),
    ),
    "MNIST": (pictures(MNIST, mnist_layout), LeNet),
    "FashionMNIST": (
        pictures(FashionMNIST, partial(mnist_layout, name="FashionMNIST")),
        lambda: FashionCNN(width=2),
    ),
    "CIFAR10": (
        pictures(CIFAR10, cifar_layout, augment=True),
        lambda: CifarCNN(width=2, hidden=8),
    ),
    "SpokenDigits": (spoken(SpokenDigits, spoken_digits_layout, val_size=0), small()),
    "SpokenDigits(augment)": (
        spoken(SpokenDigits, spoken_digits_layout, val_size=0, augment=Augment()),
        small(),
    ),
    "SpokenDigits(cached)": (
        spoken(SpokenDigits, spoken_digits_layout, val_size=0, cache_features=True),
        small(),
    ),
    "TopicText": (
        lambda root: lambda: TopicText(3, 40, 8, 60, 20, num_clients=2, batch_size=4),
        text,
    ),
    "SpeechCommands": (
        spoken(SpeechCommands, speech_commands_layout, keywords=["yes", "no"]),
        small(),
    ),
}


def test_every_data_set_has_a_row():
    names = {kind.__name__ for kind in concrete(datamodules)}
    parts = {
        "ImageDataModule",
        "Augment",
        "Clip",
        "Clips",
        "Draws",
        "FederatedDataModule",
        "InMemory",
        "LogMel",
        *("Characters", "Relabel", "Resized", "Words"),
        "Newsgroups",  # in memory, as TopicText
    }
    assert names - parts == {name.partition("(")[0] for name in DATA} - {"rotated Digits"}
    used = {type(make()).__name__ for _, make in DATA.values()}
    # In LoRA; and of timm, whose layers are torch's.
    used |= {"TextTransformer", "TimmModel", "LoRA"}
    used.add(
        "CharLSTM"
    )  # torch asks a device for a kernel of its own, which the pretended one lacks
    assert used == {kind.__name__ for kind in concrete(models)}


@every_vectorized(
    DATA,
    plain="rotated Digits, MNIST, SpokenDigits(augment)",
    slow="Digits, rotated Digits, FashionMNIST, CIFAR10, SpokenDigits(cached),"
    " SpokenDigits(augment)",
)
def test_a_data_set(same, row, group_size, tmp_path):
    data, net = row
    options = {"dtype": torch.float64, "rounds": 1, "policy": lambda: Schedule(num_steps=1)}
    same(
        make=lambda: ClientModule(net()),
        data=data(tmp_path / "data"),
        group_size=group_size,
        **options,
    )


# --- callbacks ------------------------------------------------------------------------------------

TESTED = {"local_test_size": 0.3, "partition": Dirichlet(0.5, min_size=10)}
CALLBACKS = {
    "ClientFaults": ({"watchers": lambda: [ClientFaults(nan=0.2, blowup=0.3, dropout=0.2)]}),
    "ClientAttack": {"watchers": lambda: [ClientAttack([0, 2], "noise", 3.0)]},
    "LabelFlip": {"watchers": lambda: [LabelFlip([0, 2])]},
    "Backdoor": {"watchers": lambda: [Backdoor([0, 2], target=1, size=2)]},
    "PersonalizedEvaluation": {
        "watchers": lambda: [PersonalizedEvaluation(steps=2, local_steps=2)],
        "data": partial(samples, **TESTED),
    },
    "RunReport": {"watchers": lambda: [RunReport()], "data": partial(samples, **TESTED)},
    "LayerSummary": {"watchers": lambda: [LayerSummary()]},
    "RoundProgress": {
        "watchers": lambda: [RoundProgress()],
        "trainer": {"enable_progress_bar": True},
    },
}


def test_every_callback_has_a_row():
    others = {"FederatedLoop", "AtomicCheckpointIO", "RoundCheckpoint"}  # the last is below
    names = {kind.__name__ for kind in concrete(callbacks)}
    assert names - others == set(CALLBACKS)


@every_vectorized(
    CALLBACKS,
    plain="ClientFaults, ClientAttack, PersonalizedEvaluation",
    slow="Backdoor, ClientAttack, LabelFlip, RoundProgress",
)
def test_a_callback(same, row, group_size):
    same(**row, group_size=group_size)


RESUMED = {
    "states of rules": {
        "aggregator": lambda: Staged([1], [ClusteredFL(9.0, 0.0, 0), FedControl()])
    },
    "networks": {"aggregator": RULES["PFNM"]},
    "clients": {
        "optimizer_state": "keep",
        "make": lambda: module(Proximal(0.1), optimizer=partial(SGD, momentum=0.9)),
        "update_transforms": lambda: [TopK(0.3)],
        "policy": POLICIES["DiscreteGaussianReinforce"],
    },
}


@every_vectorized(RESUMED, plain="clients", slow="states of rules, networks")
def test_a_run_resumes(device, tmp_path, row, group_size):
    def run(folder, rounds, **options):
        keep = {"watchers": lambda: [RoundCheckpoint(str(tmp_path / folder))]}
        checkpoints = {"trainer": {"enable_checkpointing": True}}
        return fit(
            device.type,
            tmp_path,
            rounds=rounds,
            group_size=group_size,
            **row,
            **keep,
            **checkpoints,
            **options,
        )[1:]

    whole = outcome(*run("whole", 2))
    run("half", 1)
    compare(outcome(*run("half", 2, ckpt_path=str(tmp_path / "half" / "last.ckpt"))), whole)


# --- waits for the device -------------------------------------------------------------------------

FEW, MANY = 2, 4


def waits():
    """Count the waits for the device by cause and place, in the ``with`` block."""
    return waits_for_a_gpu() if ON_A_GPU else pretend.waits()


@contextmanager
def waits_for_a_gpu():
    """Count the waits of which torch warns: it does not see those of its own kernels."""
    found, show = Counter(), warnings.showwarning

    def note(message, category, filename, lineno, *args):
        if "synchronizing CUDA" in str(message):
            found["wait", f"{'/'.join(Path(filename).parts[-2:])}:{lineno}"] += 1
        show(message, category, filename, lineno, *args)

    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    warnings.showwarning = note
    try:
        yield found
    finally:
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode(mode)


class Watched(VectorizedClients):
    """VectorizedClients that note the waits within local steps, batch by batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.within = []

    def optimizer_step(self, *args, **kwargs):
        with waits() as found:
            super().optimizer_step(*args, **kwargs)
        self.within.append(found)


class Rounds(L.Callback):
    """Note the waits of each round, from its first client to its aggregate."""

    def __init__(self):
        self.found = []

    def on_train_epoch_start(self, trainer, pl_module):
        self._now = waits()
        self.found.append(self._now.__enter__())

    def on_validation_start(self, trainer, pl_module):
        self._now.__exit__(None, None, None)


class Chatty(ClientModule):
    """Log tensors and numbers, means and others."""

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        loss = (out["loss"] if isinstance(out, dict) else out).detach()
        self.log("mean", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", 3.0, on_step=False, on_epoch=True)
        return out


class Growing(HyperparameterPolicy):
    """Few steps in two rounds, the first of which prepares much, and many in the third."""

    def most(self, round):
        return (FEW, FEW, MANY)[round]

    def sample(self, round, clients):
        return {"num_steps": torch.full_like(clients, self.most(round))}


class Alternating(Growing):
    """Steps and rates that differ from client to client."""

    def sample(self, round, clients):
        return {"num_steps": self.most(round) - clients % 2, "lr": 0.05 + 0.01 * clients}


def deep():
    return ClientModule(MLPClassifier([FEATURES, 4, 4, 4, 4, CLASSES]), optimizer=SGD)


STEPS = {
    "frozen layers": {"make": frozen},
    "alike": {},
    "a deep network": {"make": deep},
    "uneven": {"policy": Alternating},
    "in groups": {
        "data": partial(samples, batch_size=7),
        "make": lambda: module(EntropyRegularizer(0.9, 0.1)),
    },
    "weighted": {"data": partial(samples, batch_size=7)},
    "kept": {
        "optimizer_state": "keep",
        "make": lambda: module(optimizer=partial(SGD, momentum=0.9)),
    },
    "logging": {"make": lambda: Chatty(nn.Linear(FEATURES, CLASSES), [Proximal(0.1)], SGD)},
    "clipped": {"trainer": {"gradient_clip_val": 0.1}, "make": MODULES["Adam"]},
    "PFedMe": {"make": MODULES["PFedMe"]},
    "RepresentationMatching": {"make": MODULES["RepresentationMatching"]},
    "FedEM": {"make": MODULES["FedEM"]},
    "BatchNorm": {"make": MODULES["BatchNorm"], "data": partial(samples, drop_last=True)},
}


def count(tmp_path, wrap, policy=Growing, **options):
    """Return the waits of a round with few steps and of one with many, and those within steps."""
    rounds = Rounds()
    watch = {"policy": policy, "watchers": lambda: [rounds], "wrap": wrap}
    made, *_ = fit(NAME, tmp_path, rounds=3, **watch, **options)
    within = getattr(made.lightning_module, "within", [])
    return *rounds.found[1:], sum(within[len(within) // 3 :], start=Counter())


def watched(user):
    return Watched(user, CLIENTS, FEW, compile=False)


@every(STEPS, slow="uneven, weighted, in groups, kept, clipped, PFedMe, FedEM, BatchNorm")
def test_a_vectorized_local_step_never_waits(device, tmp_path, row):
    few, many, within = count(tmp_path, watched, **row)
    assert not within
    assert many == few
    print(few.total(), sorted(few.items()))
    assert few.total() <= 12


def test_local_steps_one_by_one_add_no_wait(device, tmp_path):
    few, many, _ = count(tmp_path, lambda user: user)
    assert few == many
