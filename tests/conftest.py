import functools
import inspect
import logging
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

# Before torch: otherwise Lightning gives a process two threads or more as soon as a test has a
# distributed strategy, and later tests of the same process take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import registry
from torch import nn
from torch.utils.data import TensorDataset, _utils

import tutorial
from lightning_fl import ClientModule, VectorizedClients
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.datamodules import FederatedDataModule
from lightning_fl.policies import Schedule
from linear import Foreign

torch.set_num_threads(1)  # as fast for small models, and ten times faster on a busy machine
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
# Each Trainer asks all packages that are installed for callbacks, which takes 12 ms.
registry.entry_points = functools.cache(registry.entry_points)
# Loader processes of a fit that failed would be ended after five seconds.
_utils.MP_STATUS_CHECK_INTERVAL = 0.2
if not torch.cuda.is_available():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else each step of an optimizer looks for a driver


#: Files that take longest, in the order in which workers begin them: none is left for the end.
LONGEST = (
    "test_examples",
    "test_strategies",
    "test_federations",
    "test_accelerator",
    "test_cli",
    "test_module",
    "test_docs",
)


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


class Linear(L.LightningModule):
    """Least squares on one linear map, with plain SGD: easy to do by hand."""

    def __init__(self, features=3, lr=0.1):
        super().__init__()
        self.net, self.lr = nn.Linear(features, 1, bias=False), lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x)[:, 0] - y).square().mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self.net(x)[:, 0] - y).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture(autouse=True)
def _environment_as_outside(monkeypatch):
    """Hide a seed and what Lightning tells processes of one another; remove what the test leaves.

    With LOCAL_RANK a command that is to start processes takes itself for one of them, and waits.
    """
    left = ("PL_GLOBAL_SEED", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
    for name in left:
        monkeypatch.setenv(name, "")  # remembered, to be as before in the end
        monkeypatch.delenv(name)


@pytest.fixture
def foreign():
    def make(seed=0, **options):
        torch.manual_seed(seed)
        return Foreign(**options).double()

    return make


@pytest.fixture
def linear():
    def make(seed=0, **options):
        torch.manual_seed(seed)
        return Linear(**options).double()

    return make


@pytest.fixture
def blobs():
    """Samples of three classes in six dimensions, as a TensorDataset in float64."""

    def make(n=120, seed=0, classes=3, features=6):
        generator = torch.Generator().manual_seed(100)
        y = torch.arange(n) % classes
        centers = torch.randn(classes, features, generator=generator, dtype=torch.float64)
        generator.manual_seed(seed)
        noise = torch.randn(n, features, generator=generator, dtype=torch.float64)
        return TensorDataset(centers[y] + 0.3 * noise, y)

    return make


@pytest.fixture
def data(blobs):
    """A federation of blobs."""

    def make(train=None, num_clients=4, batch_size=8, val=None, **options):
        return FederatedDataModule(
            blobs() if train is None else train,
            blobs(60, seed=1) if val is None else val,
            num_clients=num_clients,
            batch_size=batch_size,
            **options,
        )

    return make


@pytest.fixture
def trainer(tmp_path):
    """A quiet Trainer on the CPU with a federation."""

    def make(loop=None, rounds=3, callbacks=(), **options):
        loop = FederatedLoop(buffers="average") if loop is None else loop
        if loop is False:  # on purpose
            warnings.filterwarnings("ignore", "The Trainer has no FederatedLoop")
        folder = options.pop("default_root_dir", str(tmp_path))
        loops = [] if loop is False else [loop]
        options = {"num_sanity_val_steps": 0} | options
        return tutorial.trainer(folder, *callbacks, *loops, rounds=rounds, **options)

    return make


@pytest.fixture
def fit(trainer, data):
    """Fit a module in a federation of blobs, or groups of clients of it; returns the loop."""

    def run(module, loop=None, datamodule=None, ckpt_path=None, group_size=None, **options):
        loop = FederatedLoop(buffers="average") if loop is None else loop
        if group_size is not None:
            module = VectorizedClients(module, group_size, compile=False)
        trainer(loop, **options).fit(
            module, datamodule=data() if datamodule is None else datamodule, ckpt_path=ckpt_path
        )
        return loop

    return run


@pytest.fixture
def simulate(fit, data):
    """Train a linear classifier of blobs with callbacks; returns it and the loop."""

    def run(*callbacks, rounds=3, wrap=lambda m: m, clients=4, quiet=True, **options):
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 3)
        made = ClientModule(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).double()
        of_loop = inspect.signature(FederatedLoop).parameters.keys() & options.keys()
        given = {"policy": Schedule(num_steps=2), "seed": 3}
        loop = FederatedLoop(**given | {name: options.pop(name) for name in of_loop})
        samples = options.pop("datamodule", None) or data(num_clients=clients)
        with warnings.catch_warnings():  # of clients that are dropped
            if quiet:
                warnings.simplefilter("ignore")
            fit(wrap(made), loop, samples, rounds=rounds, callbacks=callbacks, **options)
        return made, loop

    return run


@pytest.fixture
def data_root():
    """Where real data lie, in torchvision's layout."""
    root = os.environ.get("LIGHTNING_FL_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("real data: set LIGHTNING_FL_DATA to a folder in torchvision's layout")
    return root


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Where the rows of ``federations.py`` find small data sets."""
    from federations import write_data  # imports all rules, terms and data modules

    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


@pytest.fixture
def flat():
    """All of a module's parameters and buffers as one vector."""

    def read(module):
        tensors = (t.detach() for t in module.state_dict().values())
        real = (torch.view_as_real(t) if t.is_complex() else t for t in tensors)
        return torch.cat([t.double().reshape(-1) for t in real])

    return read


@pytest.fixture
def pictures():
    """Request pictures in a test whose module uses ``quick_pictures``."""


@pytest.fixture
def quick_pictures(request):
    """Draw no pictures, unless the test requests them."""
    from quick_cli import no_pictures  # imports the command line, which few tests need

    with nullcontext() if "pictures" in request.fixturenames else no_pictures():
        yield


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Run the command line in this process; returns what it printed."""
    import quick_cli  # imports the command line, which few tests need

    monkeypatch.chdir(tmp_path)

    def run(*args, expect=0):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        try:
            quick_cli.call(*args)
            code = 0
        except SystemExit as error:
            code = error.code or 0
        out = capsys.readouterr()
        assert code == expect, out.err
        return out.out + out.err

    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in; pages write modules of their own there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])  # the command line reads it
    from quick_cli import no_pictures

    known = set(sys.modules)
    with no_pictures():
        yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
