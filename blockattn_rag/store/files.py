"""File operations for stores: private files, and deletion of files that are not in use.

The modification time of a file records its last use. To delete a file by age, it is first renamed
to a temporary name, and its last use is checked again. If another process has used it in the
meantime, it is renamed back. This needs no lock and survives crashes.
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
from blockattn_rag.files import is_temporary, replacing, temporary_name
from blockattn_rag.store.base import Sidecar, age_s
from blockattn_rag.store.format import damage_reported
from blockattn_rag.store.header import FormatError

FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Convert an OSError to a StoreError that names the path."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"Cannot {doing} {path}: {error.strerror or error}") from error


def names_in(folder: Path) -> list[str]:
    with explained("list", folder), contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create a folder that only its owner can access. An existing folder keeps its mode."""
    path.mkdir(_FOLDER_MODE, parents=parents, exist_ok=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[FileIO | None]:
    """Open a regular file for reading. Yields None if it does not exist."""
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
                    f"{path} is damaged: expected a regular file, found one of mode "
                    f"{stat.filemode(mode)!r}; delete it"
                )
            with damage_reported(path):
                yield file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # A named pipe would block.


def read_whole(file: FileIO) -> Tensor:
    """Read a file into newly allocated memory, uint8 ``[size]``.

    The file is not memory-mapped: truncating a mapped file kills the process that reads it
    (SIGBUS), and the number of mappings is limited (65,530 on Linux). If a file is truncated during
    the read, the returned tensor is shorter and fails its checksum.
    """
    raw = _memory(os.fstat(file.fileno()).st_size)
    return raw[: _fill(raw.numpy().data, file)]


def read_places(file: FileIO, places: Sequence[tuple[int, int]]) -> Tensor:
    """Read and concatenate byte ranges (start, stop) of a file; see ``read_whole``."""
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
    except RuntimeError as error:  # Torch raises this if an allocation fails.
        raise OSError(errno.ENOMEM, f"not enough memory for {size} bytes") from error


def _fill(view: memoryview, file: FileIO) -> int:
    filled = 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled


def mark_used(descriptor: int, at_most_every_s: float = 0.0) -> None:
    """Record a use of an open file, unless one was recorded in the last ``at_most_every_s``
    seconds.

    Does nothing in a read-only store.
    """
    if at_most_every_s and age_s(os.fstat(descriptor).st_mtime_ns) < at_most_every_s:
        return
    now = time.time_ns()  # More precise than the timestamps set by the kernel.
    try:
        os.utime(descriptor, ns=(now, now))
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def remove_unused(path: Path, used_ns: int) -> bool | None:
    """Delete a file unless it was used or replaced since its modification time was ``used_ns``.

    Returns:
        True if it was deleted, False if it was used, None if it no longer existed.
    """
    aside, is_deleted = temporary_name(path), False
    try:
        os.rename(path, aside)
        try:
            status = status_of(aside)
            if status is not None and status.st_mtime_ns == used_ns:
                os.unlink(aside)
                is_deleted = True
        finally:
            if not is_deleted:
                # A file written here in the meantime contains the same block, so it may be
                # replaced.
                os.replace(aside, path)
    except FileNotFoundError:
        return None
    return is_deleted


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or of a broken link, or None if the path does not exist."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path)
    return None


class FolderSidecar(Sidecar):
    """Sidecar files in a folder of a ``DirectoryStore``."""

    def __init__(self, root: Path, fsync: bool) -> None:
        self._root = root
        self._fsync = fsync

    def names(self, folder: str) -> list[str]:
        top = self._root / folder
        return [str(path.relative_to(top)) for path in self._files(top, temporary=False)]

    def leftovers(self) -> Iterator[Path]:
        """Iterate over the temporary files of running or killed writers."""
        return self._files(self._root, temporary=True)

    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        return [self._read(self._root / path) for path in paths]

    def write(self, path: str, content: bytes) -> None:
        target = self._root / path
        with explained("write", target):
            make_folder(target.parent, parents=True)
            with replacing(target, mode=FILE_MODE, fsync=self._fsync) as file:
                file.write(content)

    def delete(self, path: str) -> None:
        target = self._root / path
        with explained("delete", target):
            target.unlink(missing_ok=True)

    def _read(self, path: Path) -> bytes | None:
        with opened(path) as file:
            return None if file is None else file.read()

    def _files(self, top: Path, *, temporary: bool) -> Iterator[Path]:
        with explained("list", top):
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing):
                for name in sorted(names):
                    if is_temporary(name) == temporary:
                        yield Path(folder) / name


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
