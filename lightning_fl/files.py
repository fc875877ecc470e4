"""Reading of files from other people, atomic writes, and locks of folders."""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import io
import os
import re
import reprlib
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TextIO
from uuid import uuid4
from zipfile import ZIP_STORED, ZipFile

from lightning_fl.errors import FederationError

#: Maximum size of a manifest in bytes: a split of about 8 million samples. Python objects take up
#: to 25 times as much, so this is about 2 GB of memory.
MOST_BYTES = 2**26

#: Environment variable for the default folder of data sets; without it, the folder is "data".
DATA_VARIABLE = "LIGHTNING_FL_DATA"

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # the default of six levels allows 400,000 characters


def short_repr(value: Any) -> str:
    """Return a representation of a value for messages: short and without control characters.

    Example:
        >>> short_repr("x" * 1000)
        "'xxxxxxxxxxxx...xxxxxxxxxxxxx'"
    """
    return _SHORT.repr(value)


def one_line(error: object, most: int = 200) -> str:
    """Return the first characters of a message as one line of printable characters."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error).strip()
    text = text or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text[:most])


@contextmanager
def error_context(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Re-raise errors as :class:`~lightning_fl.errors.FederationError` with a prefix.

    Args:
        what: Prefix of the message.
        kinds: Further exception types to convert.
    """
    try:
        yield
    except FederationError as error:
        raise FederationError(f"{what}: {error}") from error
    except kinds as error:
        raise FederationError(f"{what}: {one_line(error)} ({type(error).__name__})") from error


def data_root(root: str | Path | None = None) -> str:
    """Return the folder of data sets: ``root``, else ``$LIGHTNING_FL_DATA``, else ``data``.

    Example:
        >>> data_root("/datasets")
        '/datasets'
    """
    return str(root if root is not None else os.environ.get(DATA_VARIABLE) or "data")


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8 of at most ``MOST_BYTES`` bytes.

    Raises:
        OSError: If the file cannot be read, or is larger.
        UnicodeDecodeError: If the file is not UTF-8.

    Example:
        >>> "split" in read_text(__file__)
        True
    """
    with open(path, "rb") as file:  # the reported size may be wrong, as for a device
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(
            errno.EFBIG,
            f"more than the {MOST_BYTES} bytes that lightning_fl.files.MOST_BYTES allows",
        )
    return content.decode("utf-8")


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    r"""Return a table as CSV, with all digits.

    A text that a spreadsheet would take for a formula has ``'`` before it.

    Example:
        >>> csv_text(["rule", "mean"], [["A,B", 0.5], ["=1+1", -0.5]])
        'rule,mean\n"A,B",0.5\n\'=1+1,-0.5\n'
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([map(_as_text, row) for row in [head, *rows]])
    return text.getvalue()


def _as_text(cell: object) -> object:
    is_formula = isinstance(cell, str) and re.match(r"[=+@\t\r-](?![\d.]*$)", cell)
    return f"'{cell}" if is_formula else cell


def check_sums(path: str | os.PathLike[str]) -> None:
    """Verify the checksums in a file of ``torch.save``, which ``torch.load`` does not do.

    This takes about one second per GB.

    Raises:
        FederationError: If a checksum does not match, or if the file is compressed, as files of
            ``torch.save`` are not: some kilobytes could become as many gigabytes in memory.
        zipfile.BadZipFile: If the file is not an archive.
    """
    with ZipFile(path) as archive:
        if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
            raise FederationError(f"{path} is compressed, which torch.save never does")
        damaged = archive.testzip()
    if damaged is not None:
        raise FederationError(
            f"{path} is damaged: the checksum of {short_repr(damaged)} does not match. Resume from"
            " another checkpoint"
        )


def write_atomically(
    path: str | os.PathLike[str],
    content: str | bytes | Callable[[BinaryIO], Any],
    *,
    durable: bool = True,
) -> None:
    """Write a file atomically, by a temporary file in the same folder that replaces it.

    A reader, or a run that resumes after an interruption, finds either the complete old file or the
    complete new one. A killed process leaves a temporary file, which the next :class:`FolderLock`
    of the folder or :func:`check_writable` of the file removes.

    Args:
        path: The file. Missing folders are created.
        content: Text, bytes, or a function that writes to an open file.
        durable: Whether to wait for the disk. Otherwise the file survives a killed process, but not
            a power failure.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        hidden = error.__context__  # torch.save ends with an error of its own if a write fails
        if isinstance(error, RuntimeError) and isinstance(hidden, OSError):
            raise OSError(hidden.errno, hidden.strerror, str(path)) from error
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that a file can be written, before the work whose result it is to hold.

    Temporary files of a killed process that has written this file are removed.

    Args:
        path: The file, which no other process writes. Missing folders are created.

    Raises:
        FederationError: If it is a folder, or its folder cannot be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}.tmp"):
            leftover.unlink(missing_ok=True)
    except OSError as error:
        raise FederationError(
            f"{path} cannot be written ({error.strerror}): choose another file"
        ) from error


#: Temporary files of :func:`write_atomically`.
LEFTOVERS = f".*.{'?' * 8}.tmp"


class FolderLock:
    """Lock a folder, so that only one run at a time writes to it.

    The lock ends with the process, even if it is killed: forked processes close its file.

    Args:
        folder: The folder. It is created if it does not exist.

    Raises:
        FederationError: If another run holds the lock.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lock = FolderLock(folder)
        ...     lock.release()
        ...     os.listdir(folder)
        []
    """

    #: Open lock files of this process.
    held: ClassVar[set[TextIO]] = set()

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._is_new = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / ".lock"
        self._file = self._path.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                raise BlockingIOError  # its owner has removed the file since it was opened
        except (BlockingIOError, FileNotFoundError):
            self._file.close()
            raise FederationError(
                f"{folder} is in use by another run. Wait until that run ends, or choose another"
                " folder (Trainer(default_root_dir=...), RoundCheckpoint(dirpath=...))"
            ) from None
        except OSError:
            text = f"the file system of {folder} has no locks"
            warnings.warn(f"{text}: make sure that no other run writes to it", stacklevel=2)
        FolderLock.held.add(self._file)
        for leftover in self._folder.glob(LEFTOVERS):  # of a killed process, as no other writes
            with suppress(OSError):
                leftover.unlink()

    def release(self) -> None:
        """Release the lock; an empty folder that was created for the lock is removed."""
        self._path.unlink(missing_ok=True)
        FolderLock.held.discard(self._file)
        self._file.close()
        if self._is_new:
            with suppress(OSError):  # it is not empty
                self._folder.rmdir()


def _leave_locks_to_parent() -> None:
    """Close the lock files in a forked process, as loader processes outlive a killed run."""
    for file in FolderLock.held:
        file.close()
    FolderLock.held.clear()


os.register_at_fork(after_in_child=_leave_locks_to_parent)
