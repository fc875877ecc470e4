"""A checkpoint describes a boundary between two rounds, whenever it is written."""

import hashlib
import inspect
import io
import sys
from collections import Counter
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from growing import Resizing
from lightning_fl import VectorizedClients
from lightning_fl.aggregators import FedAdam
from lightning_fl.callbacks import FederatedLoop
from lightning_fl.hooks import GRADIENT_HOOKS
from tutorial import trainer

#: Those that are themselves part of writing or reading a checkpoint.
OF_CHECKPOINTS = {"on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict"}
HOOKS = sorted(
    name
    for name, _ in inspect.getmembers(Callback, inspect.isfunction)
    if not name.startswith("_") and name not in OF_CHECKPOINTS
)
ROUNDS = 3


class Module(L.LightningModule):
    """Parameters, statistics, a queue that its own state leaves out, a part that stays local."""

    def __init__(self, adam):
        super().__init__()
        self.adam = adam
        self.body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(4, 3)
        self.register_buffer("queue", torch.zeros(4), persistent=False)
        self.federated_local_parameters = ["head.bias"]

    def forward(self, x):
        return self.head(self.body(x) + self.queue)

    def on_train_epoch_start(self):
        with torch.no_grad():  # once, also when the round is resumed
            self.head.weight.mul_(0.9)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.queue.mul_(0.9).add_(0.1 * x.detach().mean(0)[:4])
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        kind, options = torch.optim.SGD, {"momentum": 0.9}
        if self.adam:
            kind, options = torch.optim.Adam, {}
        optimizer = kind(self.parameters(), lr=0.02, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Learning(Resizing):
    """One local step more where the last round was worse, and a memory of all losses."""

    def sample(self, round, clients):
        worse = len(self.losses) > 1 and self.losses[-1] > self.losses[-2]
        return {"num_steps": 2 + int(worse) + clients % 2}


class Diary(Callback):
    """State of another callback, written at both ends of a round and in between."""

    def __init__(self):
        self.pages = []

    def on_train_epoch_start(self, trainer, module):
        self.pages.append(f"{trainer.current_epoch} begins")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.pages.append(f"{trainer.current_epoch}.{batch_idx}")

    def on_validation_end(self, trainer, module):
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.pages.append(f"{trainer.current_epoch} is validated")

    def on_train_epoch_end(self, trainer, module):
        self.pages.append(f"{trainer.current_epoch} ends")

    def state_dict(self):
        return {"pages": self.pages}

    def load_state_dict(self, state_dict):
        self.pages = state_dict["pages"]


class Run:
    """One fit, and all that is left of it."""

    def __init__(self, data, folder, group_size, *callbacks, rounds=ROUNDS, last=(), **options):
        torch.manual_seed(0)
        self.module = Module(adam=not group_size).double()  # vectorized cannot keep Adam
        self.policy = Learning()
        kept = {"optimizer_state": "keep", "buffers": "local"}
        self.loop = FederatedLoop(FedAdam(lr=0.1), self.policy, client_fraction=0.5, seed=0, **kept)
        self.loop.store.most = 0  # rows are in a file, which is written to in place
        self.diary, self.stop = Diary(), EarlyStopping("val_loss", patience=9)
        self.trainer = trainer(
            *(folder, *callbacks, self.loop, self.diary, self.stop, *last),
            rounds=rounds,
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in last),
        )
        self.whole = self.module
        if group_size:
            self.whole = VectorizedClients(self.module, group_size=2, compile=False)
        torch.manual_seed(1)
        self.data = data(num_clients=6)
        self.data.test = self.data.val
        self.trainer.fit(self.whole, datamodule=self.data, **options)

    def left(self):
        kept = set().union(*self.loop.store.rows.values())
        assert {"parameter.head.bias", "buffer.queue"} < kept, "nothing stays with the clients"
        return {
            "model": self.module.state_dict(),
            "queue": self.module.queue,
            "rows": self.loop.rows,
            "policy": self.policy.state_dict(),
            "rule": self.loop.aggregator.state_dict(),
            "clients": {c: dict(rows) for c, rows in self.loop.store.rows.items()},
            "diary": self.diary.pages,
            "stop": self.stop.state_dict(),
            "schedules": [c.scheduler.state_dict() for c in self.trainer.lr_scheduler_configs],
        }


def bits(tree):
    """A digest of all that a tree holds, whatever shares its memory."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tuple(tree.shape), hashlib.sha256(tree.numpy()).hexdigest())
    if isinstance(tree, dict):
        return tuple((str(k), bits(v)) for k, v in sorted(tree.items(), key=lambda x: str(x[0])))
    if isinstance(tree, list | tuple):
        return tuple(bits(item) for item in tree)
    return repr(tree)


class Saver(Callback):
    """Asks for a checkpoint at every call of its hooks, and of each that is new keeps the bytes."""

    def __init__(self, hooks=HOOKS):
        self.hooks = hooks
        self.calls, self.files, self.held = {}, {}, []
        for name in set(hooks) & set(HOOKS):  # of this object: clients train alone beside some
            setattr(self, name, partial(self._save, name))

    def _save(self, name, trainer, *args, **kwargs):
        self.save(trainer, name)

    def save(self, trainer, where):
        if where not in self.hooks:
            return
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()
        self.calls[where] = self.calls.get(where, 0) + 1
        digest = bits(checkpoint)
        if where not in ("setup", "teardown"):  # before and after, they are Lightning's own
            self.held.append((checkpoint, digest))
        if digest not in self.files:
            file = io.BytesIO()
            torch.save(checkpoint, file)
            self.files[digest] = where, file.getvalue()


class LastSaver(Saver, ModelCheckpoint):
    """The same behind all others, where Lightning calls those that write files."""

    def __init__(self, hooks):
        Saver.__init__(self, hooks)
        ModelCheckpoint.__init__(self, save_top_k=0)


def assert_resumed(data, folder, group_size, files, undisturbed):
    """Resume each checkpoint."""
    for where, content in files.values():
        path = folder / "resumed.ckpt"
        path.write_bytes(content)
        left = Run(data, folder / "resumed", group_size, ckpt_path=path).left()
        assert bits(left) == undisturbed, where


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "vectorized"])
def group_size(request):
    return request.param


vectorized_is_slow = pytest.mark.parametrize(
    "group_size",
    [pytest.param(False, id="plain"), pytest.param(True, id="vectorized", marks=pytest.mark.slow)],
)


@vectorized_is_slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_any_hook_resumes_bit_for_bit_and_changes_nothing(
    data, tmp_path, group_size
):
    undisturbed = bits(Run(data, tmp_path / "whole", group_size).left())
    hooks = [h for h in HOOKS if not (group_size and h in GRADIENT_HOOKS)]
    first, last = Saver(hooks), LastSaver(hooks)
    assert bits(Run(data, tmp_path / "saved", group_size, first, last=[last]).left()) == undisturbed
    of_fit = {h for h in hooks if not h.startswith(("on_test", "on_predict", "on_exception"))}
    assert first.calls.keys() == of_fit
    assert group_size or first.calls["on_before_backward"] >= 6
    for checkpoint, digest in [*first.held, *last.held]:
        assert bits(checkpoint) == digest, "a checkpoint changed after it was made"
    files = first.files | last.files
    assert len(files) < 25  # boundaries, not moments
    assert_resumed(data, tmp_path, group_size, files, undisturbed)


@vectorized_is_slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_any_line_of_a_rounds_end_resumes_bit_for_bit(data, tmp_path, group_size):
    """As a signal handler would write it."""
    undisturbed = bits(Run(data, tmp_path / "whole", group_size).left())
    saver, runs, visits = Saver(["line"]), [], Counter()
    watched = {"federated_loop.py", "round.py", "checkpoints.py", "validation.py"}
    watched |= {"round_boundary.py", "store.py", "schedulers.py", "table.py"}

    def trace(frame, event, arg):
        if frame.f_code.co_filename.rpartition("/")[2] not in watched:
            return None
        line = frame.f_code.co_filename, frame.f_lineno
        visits[line] += 1
        if event == "line" and visits[line] <= 2:
            saver.save(runs[0], "line")
        return trace

    class Trace(Callback):
        """From the last batch of the second round to the first of the third."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            sys.settrace(None)
            if trainer.current_epoch == 1 and batch_idx + 1 == trainer.num_training_batches:
                sys.settrace(trace)

        def setup(self, trainer, module, stage):
            runs.append(trainer)

    before = sys.gettrace()
    try:
        left = Run(data, tmp_path / "saved", group_size, Trace()).left()
    finally:
        sys.settrace(before)
    assert bits(left) == undisturbed
    assert saver.calls["line"] > 100
    assert 3 <= len(saver.files) < 10
    assert_resumed(data, tmp_path, group_size, saver.files, undisturbed)


class Crash(Callback):
    def __init__(self, round, batch):
        self.at = round, batch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_after_an_exception_resumes_bit_for_bit(data, tmp_path, group_size):
    undisturbed = bits(Run(data, tmp_path / "whole", group_size).left())
    saver = Saver(["on_exception"])
    for at in ((0, 0), (1, 1)):
        with pytest.raises(ZeroDivisionError):
            Run(data, tmp_path / "dead", group_size, Crash(*at), saver)
    assert len(saver.files) == 2
    assert_resumed(data, tmp_path, group_size, saver.files, undisturbed)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_after_a_fit_is_the_last_rounds_end_and_the_module_as_it_is(
    data, tmp_path, group_size
):
    undisturbed = bits(Run(data, tmp_path / "whole", group_size).left())
    hooks = [h for h in HOOKS if h.startswith(("on_test", "on_predict", "on_validation"))]
    saver = Saver(hooks)
    run = Run(data, tmp_path / "saved", group_size, saver, rounds=2)
    saver.calls, saver.files = {}, {}
    for stage in (run.trainer.test, run.trainer.validate, run.trainer.predict):
        stage(run.whole, datamodule=run.data)
    assert saver.calls.keys() == set(hooks)
    assert_resumed(data, tmp_path, group_size, saver.files, undisturbed)
    with torch.no_grad():
        run.module.head.weight.zero_()
    run.trainer.save_checkpoint(tmp_path / "changed.ckpt")
    saved = torch.load(tmp_path / "changed.ckpt", weights_only=True)
    assert not saved["state_dict"]["head.weight"].any()
