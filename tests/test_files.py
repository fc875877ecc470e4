"""Files that a kill or another run cannot spoil."""

import csv
import os
import resource
import signal
import time
from functools import partial

import pytest
import torch

from lightning_fl import files
from lightning_fl.files import FolderLock, csv_text, write_atomically
from lightning_fl.partition import IID, Manifest
from lightning_fl.types import FederationError


class Other:
    """Another process, which acts, says so and then waits. A fork, as imports are slow."""

    def __init__(self, act):
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            act(lambda: os.write(writer, b"."))
            time.sleep(60)
            os._exit(0)
        os.close(writer)
        assert os.read(reader, 1) == b"."
        os.close(reader)

    def kill(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


@pytest.fixture
def other():
    started = []

    def start(act):
        started.append(Other(act))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_large_files_are_not_read(tmp_path, monkeypatch):
    """A manifest from a stranger is refused in clear words."""
    path, parts = tmp_path / "split.json", [torch.arange(3), torch.arange(3, 6)]
    Manifest.of(IID(), parts, torch.arange(6) % 2, seed=0).write(path)
    monkeypatch.setattr(files, "MOST_BYTES", path.stat().st_size)
    Manifest.read(path)
    path.write_text(path.read_text() + " ")
    for large in (path, "/dev/zero"):
        with pytest.raises(FederationError, match=r"more than the \d+ bytes that .*MOST_BYTES"):
            Manifest.read(large)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_one_run(tmp_path, other):
    kept = []
    process = other(lambda ready: (kept.append(FolderLock(tmp_path)), ready()))
    with pytest.raises(FederationError, match=f"{tmp_path} is in use by another run"):
        FolderLock(tmp_path)
    process.kill()
    lock = FolderLock(tmp_path)  # at once
    with pytest.raises(FederationError, match="is in use"):
        FolderLock(tmp_path)
    lock.release()
    assert names(tmp_path) == []
    FolderLock(tmp_path / "a").release()
    assert names(tmp_path) == []  # no empty folder


COMPUTED = ["=1+1", "+1+1", "-1+1", "@a", "\t=1", "-cmd|x", "=A1"]


@pytest.mark.parametrize("text", [*COMPUTED, "a=1", "-", "-0.5", "north-east", "", "1, 2"])
def test_a_text_that_a_spreadsheet_would_compute_is_written_as_text(text):
    (_, row) = csv.reader(csv_text(["name", "mean"], [[text, -0.5]]).splitlines())
    assert row == [f"'{text}" if text in COMPUTED else text, "-0.5"]


def test_without_locks_a_run_goes_on(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", fail)
    with pytest.warns(UserWarning, match="has no locks: make sure that no other run writes to it"):
        FolderLock(tmp_path).release()


@pytest.mark.parametrize("is_next", [True, False])
def test_a_lock_that_its_owner_removes_meanwhile_is_refused(tmp_path, monkeypatch, is_next):
    """Otherwise the next run would lock another file of this name, and both would write."""
    path = tmp_path / ".lock"

    def late(*_):
        path.unlink()
        if is_next:
            path.touch()

    monkeypatch.setattr(files.fcntl, "flock", late)
    with pytest.raises(FederationError, match="is in use by another run"):
        FolderLock(tmp_path)


def test_what_another_process_is_writing_is_left_alone_until_it_is_dead(tmp_path, other):
    kept = ["file.tmp", ".hidden"]  # of the user
    for name in kept:
        (tmp_path / name).touch()

    def write_half(ready):
        def write(file):
            file.write(b"half")
            file.flush()
            ready()
            time.sleep(60)

        write_atomically(tmp_path / "file", write)

    process = other(write_half)
    (being_written,) = set(names(tmp_path)) - {*kept}
    write_atomically(tmp_path / "file", lambda file: file.write(b"whole"))
    assert names(tmp_path) == sorted([being_written, "file", *kept])
    process.kill()
    FolderLock(tmp_path).release()  # a fit begins with this
    assert names(tmp_path) == sorted(["file", *kept])
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_an_error_of_the_disk_is_not_hidden_by_torch_save(tmp_path):
    """torch.save reports a position in its archive."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*server\.pt'"):
            write_atomically(tmp_path / "server.pt", partial(torch.save, torch.zeros(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_a_lock_is_gone_with_its_process_although_a_forked_one_lives_on(tmp_path, other):
    """As workers of a data loader do, for some seconds."""

    def hold_and_fork(ready):
        lock = FolderLock(tmp_path)
        reader, writer = os.pipe()
        if not os.fork():
            os.write(writer, b".")  # the hooks of the fork have run
            time.sleep(2)
            os._exit(0)
        os.read(reader, 1)
        ready()
        time.sleep(60)
        lock.release()

    other(hold_and_fork).kill()
    FolderLock(tmp_path).release()
