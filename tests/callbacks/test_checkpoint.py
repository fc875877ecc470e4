"""Checkpoints that a kill cannot spoil."""

import os

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.serialization import get_crc32_options, set_crc32_options

from keeping import keep
from lightning_fl.callbacks import AtomicCheckpointIO, RoundCheckpoint
from lightning_fl.files import write_atomically
from lightning_fl.types import FederationError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_written_with_its_folders_and_replaced(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, "first")
    write_atomically(str(path), lambda file: file.write(b"2nd"))
    assert path.read_text() == "2nd"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, where, error
):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(*_):
        raise error

    def half(file):
        file.write(b"ne")
        if where == "write":
            raise error

    if where != "write":
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(type(error)):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_what_is_put_in_place_is_on_the_disk_and_whole(tmp_path, monkeypatch):
    """The order matters: a crash of the machine after replace must not find an empty file."""
    path, done = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle):
        done.append(("fsync", os.fstat(handle).st_size))
        fsync(handle)

    def watched_replace(source, target):
        assert os.path.dirname(source) == str(tmp_path)  # the same file system
        done.append(("replace", os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_atomically(path, b"twelve bytes")
    assert done == [("fsync", 12), ("replace", 12)]


def test_a_remote_store_is_lightnings_own_affair(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        TorchCheckpointIO, "save_checkpoint", lambda self, *args: given.append(args)
    )
    AtomicCheckpointIO().save_checkpoint({"a": 1}, "s3://bucket/last.ckpt", None)
    assert given == [({"a": 1}, "s3://bucket/last.ckpt", None)]


# --- in a run -------------------------------------------------------------------------------------


class Own(TorchCheckpointIO):
    """A user's own."""


def test_the_loop_makes_lightnings_checkpoints_atomic(trainer, foreign, data):
    runner = trainer(rounds=1)
    runner.fit(foreign(), datamodule=data())
    assert type(runner.strategy.checkpoint_io) is AtomicCheckpointIO


@pytest.mark.parametrize("make", [Own, lambda: AsyncCheckpointIO(Own())])
def test_a_users_own_way_of_writing_checkpoints_is_left_alone(trainer, foreign, data, make):
    own = make()
    runner = trainer(rounds=1, plugins=[own])
    runner.fit(foreign(), datamodule=data())
    assert runner.strategy.checkpoint_io is own


def test_one_file_holds_the_last_round_and_a_second_run_is_quiet(fit, foreign, tmp_path):
    folder = tmp_path / "checkpoints"
    for rounds in (2, 3):  # warnings are errors here
        fit(foreign(), rounds=rounds, **keep(folder))
        assert names(folder) == ["last.ckpt"]
        saved = torch.load(folder / "last.ckpt", weights_only=True)
        assert saved["epoch"] == rounds - 1
        assert saved["callbacks"]["FederatedLoop"]["round"] == rounds


@pytest.mark.parametrize(("every", "saved"), [(1, [1, 2, 3]), (2, [2, 3]), (9, [3])])
def test_the_file_may_have_another_name_and_be_written_less_often(
    fit, foreign, tmp_path, monkeypatch, every, saved
):
    save, rounds = torch.save, []

    def watched(checkpoint, file):
        rounds.append(checkpoint["callbacks"]["FederatedLoop"]["round"])
        save(checkpoint, file)

    monkeypatch.setattr(torch, "save", watched)
    often = RoundCheckpoint(str(tmp_path / "c"), "often", every_n_rounds=every)
    fit(foreign(), rounds=3, callbacks=[often], enable_checkpointing=True)
    assert names(tmp_path / "c") == ["often.ckpt"]
    assert rounds == saved


class Stop(Callback):
    """Stop at a batch of a round, as max_time does, or at the end of one, as EarlyStopping does."""

    def __init__(self, round, batch=None):
        self.round, self.batch = round, batch

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= (trainer.current_epoch, batch_idx) == (self.round, self.batch)

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop |= trainer.current_epoch == self.round and self.batch is None


@pytest.fixture
def small(data, blobs):
    """A federation of four clients with two local steps."""
    return lambda: data(blobs(64), val=blobs(12, seed=1))


@pytest.mark.parametrize(
    ("every", "stop", "rounds"),
    [(9, [], 4), (9, [Stop(3, 5)], 3), (3, [Stop(4, 0)], 4), (9, [Stop(0, 2)], 0)],
    ids=["end", "amid", "third", "first"],
)
def test_a_run_that_stops_leaves_a_checkpoint_that_resumes(
    fit, foreign, small, tmp_path, every, stop, rounds
):
    whole, again = foreign(), foreign(seed=9)
    rows = fit(whole, datamodule=small(), rounds=6).rows
    options = {"datamodule": small(), "enable_checkpointing": True}
    one, other = (RoundCheckpoint(str(tmp_path), every_n_rounds=every) for _ in "ab")
    fit(foreign(), rounds=6 if stop else rounds, callbacks=[one, *stop], **options)
    path = tmp_path / "last.ckpt"
    saved = torch.load(path, weights_only=True)["callbacks"]["FederatedLoop"]
    assert saved["round"] == rounds
    loop = fit(again, rounds=6, callbacks=[other], ckpt_path=path, **options)
    assert loop.rows == rows
    assert all(torch.equal(a, again.state_dict()[k]) for k, a in whole.state_dict().items())


# --- damage ---------------------------------------------------------------------------------------


def flipped(path, value):
    """The file with one bit of a tensor turned round."""
    content = bytearray(path.read_bytes())
    place = content.index(torch.full((8,), value).numpy().tobytes())
    content[place + 5] ^= 4
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_flipped_bit_is_noticed(tmp_path, weights_only):
    path, tree = tmp_path / "last.ckpt", {"a": torch.full((8,), 1.5)}
    before = get_crc32_options()
    set_crc32_options(False)  # a user's choice, which must not hide it
    try:
        AtomicCheckpointIO().save_checkpoint(
            {"pytorch-lightning_version": "2.6", "state_dict": tree}, path
        )
        assert not get_crc32_options()
    finally:
        set_crc32_options(before)
    AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    with pytest.raises(FederationError, match=r"last.ckpt is damaged: the checksum of"):
        AtomicCheckpointIO().load_checkpoint(flipped(path, 1.5), weights_only=weights_only)


class FromItsOwnStart(Callback):
    """State that exists from its ``on_fit_start`` on, as the moving average of schnetpack."""

    def on_fit_start(self, trainer, module):
        self.mean = torch.zeros(2)

    def state_dict(self):
        return {"mean": self.mean}


@pytest.mark.parametrize("where", ["before", "in a round"])
def test_state_of_a_callback_that_exists_from_its_own_start_is_saved(fit, foreign, tmp_path, where):
    path = tmp_path / "saved.ckpt"

    class Save(Callback):
        """Saves a checkpoint before the first round, or in it."""

        def on_sanity_check_start(self, trainer, module):
            if where == "before":
                trainer.save_checkpoint(path)

        def on_validation_start(self, trainer, module):
            if where == "in a round" and not trainer.sanity_checking:
                trainer.save_checkpoint(path)

    options = {"rounds": 2, "num_sanity_val_steps": 1}
    whole = foreign()
    fit(whole, callbacks=[FromItsOwnStart(), Save()], **options)
    saved = torch.load(path, weights_only=True)["callbacks"]
    assert ("FromItsOwnStart" in saved) == (where == "in a round")
    resumed = foreign()
    fit(resumed, callbacks=[FromItsOwnStart()], ckpt_path=path, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


# --- two runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["run", "checkpoints"])
def test_two_runs_do_not_share_a_folder(fit, foreign, tmp_path, where):
    class Second(Callback):
        """Starts another fit in the middle of the first one."""

        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                root = tmp_path / ("first" if where == "run" else "second")
                options = keep(tmp_path / ("c" if where == "checkpoints" else "d"))
                with pytest.raises(FederationError, match="is in use by another run"):
                    fit(foreign(), default_root_dir=root, **options)

    first = {"default_root_dir": tmp_path / "first"}
    loop = fit(foreign(), **keep(tmp_path / "c", Second()), **first)
    assert len(loop.rows) == 3
    assert names(tmp_path / "first") == ["rounds.csv"]
    assert names(tmp_path / "c") == ["last.ckpt"]
    fit(foreign(), **keep(tmp_path / "c"), **first)  # now it is free
