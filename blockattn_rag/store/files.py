"""Files of a store: read by their owner alone, and deleted when nobody uses them.

A file's modification time is the time of its last use. Whoever deletes a file for its age renames
it to a temporary name first, and looks at its time of use again: a process that has used the file
meanwhile finds the file back in its place, or learns that the file is gone. No lock is needed, and
nothing depends on a process that may die.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.files import temporary_name
from blockattn_rag.store.header import FormatError

FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """What the operating system refuses becomes a StoreError that names the path."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {doing} {path}: {error.strerror or error}") from error


def names_in(folder: Path) -> list[str]:
    """Names in a folder, in order; none if there is no such folder.

    Raises:
        StoreError: it cannot be listed.
    """
    with explained("list", folder), contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a folder that is closed to others; one that is there keeps its mode."""
    path.mkdir(_FOLDER_MODE, parents=parents, exist_ok=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[FileIO | None]:
    """A regular file, open for reading; None if there is none.

    Raises:
        CorruptEntryError: there is something else of that name, for example a pipe; or the caller
            met a FormatError in what it read.
        StoreError: it cannot be opened, or reading it fails.
    """
    with explained("read", path):
        try:
            file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115
        except FileNotFoundError:
            yield None
            return
        with file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise CorruptEntryError(
                    f"{path} is damaged: expected a regular file, found {stat.filemode(mode)!r} "
                    "(as ls shows it); delete it"
                )
            try:
                yield file
            except FormatError as error:
                raise CorruptEntryError(
                    f"{path} is damaged: {error}; delete it, or put the block anew"
                ) from error


def read_whole(file: FileIO) -> Tensor:
    """The file's bytes, uint8 ``[size]``, in memory of their own.

    Not mapped: a file that is cut short while it is mapped kills the process that looks at it
    (SIGBUS), and each mapping counts against a limit of the system (65,530 on Linux). What is
    missing by the time it is read is missing in the tensor, where a checksum finds it.
    """
    raw = _memory(os.fstat(file.fileno()).st_size)
    return raw[: _fill(raw.numpy().data, file)]


def read_places(file: FileIO, places: Sequence[tuple[int, int]]) -> Tensor:
    """The file's bytes from each place's start to its stop, one after the other; as ``read_whole``.

    Raises:
        FormatError: it has fewer bytes.
    """
    raw = _memory(sum(stop - start for start, stop in places))
    view, at = raw.numpy().data, 0
    for start, stop in places:
        file.seek(start)
        filled = _fill(view[at : at + stop - start], file)
        if filled < stop - start:
            raise FormatError(f"it ends at byte {start + filled}, before byte {stop}")
        at += filled
    return raw


def _memory(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # torch's way to say that there is no memory
        raise OSError(errno.ENOMEM, f"no memory for its {size} bytes") from error


def _fill(view: memoryview, file: FileIO) -> int:
    """Read into memory until it is full or the file ends; how many bytes were read."""
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled


def age_s(used_ns: int, now_ns: int | None = None) -> float:
    """Seconds since a time (nanoseconds since 1970), or until it.

    A time in the future comes from a clock that is wrong, by as much as it is away: seconds
    between two machines mean that the file is new, a year means nothing, and must not keep it.
    """
    return abs((time.time_ns() if now_ns is None else now_ns) - used_ns) / 1e9


def mark_used(descriptor: int, at_most_every_s: float = 0.0) -> None:
    """Record that an open file is used now, unless it was marked less than so long ago.

    Where the store may only be read, nothing is recorded: whoever may write it decides by what it
    recorded itself.
    """
    if at_most_every_s and age_s(os.fstat(descriptor).st_mtime_ns) < at_most_every_s:
        return
    now = time.time_ns()  # finer than the system's own stamp, which moves every few milliseconds
    try:
        os.utime(descriptor, ns=(now, now))
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def remove_unused(path: Path, used_ns: int) -> bool | None:
    """Delete a file unless it was used, or replaced, since its modification time was ``used_ns``.

    Returns:
        True if it was deleted, False if it was used, None if it was gone.
    """
    aside = temporary_name(path)
    try:
        os.rename(path, aside)
        if os.stat(aside).st_mtime_ns == used_ns:
            os.unlink(aside)
            return True
        # One that was put here meanwhile is the same block: either may stay.
        os.replace(aside, path)
    except FileNotFoundError:
        return None
    return False


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would not let us go on
