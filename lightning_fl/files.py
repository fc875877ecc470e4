"""Files: those that may come from anyone, and those that a kill or another run cannot spoil."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import reprlib
import socket
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from zipfile import ZIP_STORED, ZipFile

from lightning_fl.types import FederationError

#: Bytes of a manifest or a trace that is read: a split of some 8 million samples, or 4 million
#: faults. Python's objects take up to 25 times as much, so this is about 2 GB of memory.
MOST_BYTES = 2**26

#: Where data sets are if no folder is given; if it is not set, in the folder "data".
DATA_VARIABLE = "LIGHTNING_FL_DATA"

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # the standard six levels are up to 400,000 characters


def short_repr(value: Any) -> str:
    """Return a value as it can be part of a message: short, and without control characters.

    Example:
        >>> short_repr("x" * 1000)
        "'xxxxxxxxxxxx...xxxxxxxxxxxxx'"
    """
    return _SHORT.repr(value)


def data_root(root: str | Path | None = None) -> str:
    """Return the folder of data sets: the given one, else that of ``LIGHTNING_FL_DATA``, else data.

    Example:
        >>> data_root("/datasets")
        '/datasets'
    """
    return str(root if root is not None else os.environ.get(DATA_VARIABLE) or "data")


def read_text(path: str | Path) -> str:
    """Read a text in UTF-8 that has no more than `MOST_BYTES`.

    Raises:
        OSError: If it cannot be read, or is larger.
        UnicodeDecodeError: If it is no UTF-8.

    Example:
        >>> "split" in read_text(__file__)
        True
    """
    with open(path, "rb") as file:  # its size may be a lie, as that of a device
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(
            errno.EFBIG,
            f"more than the {MOST_BYTES} bytes that lightning_fl.files.MOST_BYTES allows",
        )
    return content.decode("utf-8")


def archive_size(path: str | os.PathLike[str]) -> int:
    """Return the size of an archive that ``torch.save`` may have written.

    ``torch.save`` neither compresses nor stores anything twice. Otherwise some kilobytes could
    become as many gigabytes in memory.

    Args:
        path: The file.

    Raises:
        FederationError: If it cannot be read, or if its content is larger than the file.
        zipfile.BadZipFile: If it is no archive.
    """
    try:
        size = os.path.getsize(path)
        with ZipFile(path) as archive:
            entries = archive.infolist()
    except OSError as error:
        raise FederationError(f"it cannot be read ({error.strerror})") from error
    content = sum(entry.file_size for entry in entries)
    if content > size or any(entry.compress_type != ZIP_STORED for entry in entries):
        raise FederationError(
            f"it is compressed, which torch.save does not do: {size} bytes become {content}"
        )
    return size


def check_sums(path: str | os.PathLike[str]) -> None:
    """Compare the content of an archive with the checksums in it, which ``torch.load`` does not.

    It takes about a second for each GB.

    Args:
        path: The file.

    Raises:
        FederationError: If they differ.
    """
    damaged: str | None = "its list of files"
    with suppress(Exception), ZipFile(path) as archive:  # of many kinds, where that is damaged
        damaged = archive.testzip()
    if damaged is not None:
        raise FederationError(
            f"{path} is damaged: {short_repr(damaged)} in it does not have the checksum that it was"
            " written with. Resume from another checkpoint"
        )


def write_atomically(
    path: str | os.PathLike[str],
    content: str | bytes | Callable[[BinaryIO], Any],
    *,
    durable: bool = True,
) -> None:
    """Write a temporary file in the same folder, then replace the file by it.

    A reader, or a run that resumes after a kill, finds the whole old file or the whole new one.
    The temporary files of killed writers are removed, those of running ones are not.

    Args:
        path: The file. Missing folders are created.
        content: Text, bytes, or a function that writes to an open file.
        durable: Whether to wait for the disk. If not, the file survives a killed process, but not
            a loss of power.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    handle, name = _locked_file(path)
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left in a folder while they wrote a file.

    Args:
        folder: Where to look.
        name: Of the file that they wrote; None is any.
    """
    # mkstemp puts eight characters between: no pattern of one file fits another's.
    pattern = "*" if name is None else glob.escape(name)
    for leftover in folder.glob(f".{pattern}.{'?' * 8}.tmp"):
        with suppress(OSError), open(leftover, "r+b") as file:
            if _lock(file.fileno()):  # its writer is gone
                leftover.unlink()


def _locked_file(path: Path) -> tuple[int, str]:
    """Make a temporary file beside a place; it is locked for as long as it is open."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        # Another writer may take it for a leftover before it is locked.
        if _lock(handle) is not False and os.path.exists(name):
            return handle, name
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Lock an open file and say whether it could be; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class FolderLock:
    """A folder that one run writes to: no other run may, while it lasts.

    The lock is gone with the process, however that ends.

    Args:
        folder: The folder, which is made where it is missing.

    Raises:
        FederationError: If another run has it.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = FolderLock(folder)
        ...     lock.release()
        ...     os.listdir(folder)
        []
    """

    NAME = ".lock"
    _held: ClassVar[set[int]] = set()

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._is_new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path, self._handle = self.folder / self.NAME, -1
        while self._handle < 0:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            is_ours = _lock(handle)
            if is_ours is False:
                owner = os.read(handle, 200).decode(errors="replace") or "another process"
                os.close(handle)
                raise FederationError(
                    f"{self.folder} is in use by another run ({short_repr(owner)}): wait until it"
                    " ends, or give this run a folder of its own (Trainer(default_root_dir=...),"
                    " RoundCheckpoint(dirpath=...))"
                )
            # The owner of before may have removed the file since it was opened.
            if self._path.exists() and os.path.samestat(os.fstat(handle), self._path.stat()):
                self._handle = handle
            else:
                os.close(handle)
        FolderLock._held.add(self._handle)
        if is_ours is None:
            warnings.warn(
                f"the file system of {self.folder} has no locks: see to it that no other run"
                " writes to the folder",
                stacklevel=2,
            )
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        remove_leftovers(self.folder)

    def release(self) -> None:
        """Let others have the folder; an empty one that was made for the lock is removed."""
        self._path.unlink(missing_ok=True)
        FolderLock._held.discard(self._handle)
        os.close(self._handle)
        if self._is_new:
            with suppress(OSError):  # it is not empty
                self.folder.rmdir()


def _leave_locks_to_parent() -> None:
    """Close locks in a forked process, which may live on where its parent is killed."""
    for handle in FolderLock._held:
        os.close(handle)
    FolderLock._held.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)
