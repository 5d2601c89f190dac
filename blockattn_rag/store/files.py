"""File operations for stores: private files, and deletion of files that are not in use.

The modification time of a file records its last use. To delete a file by age, a process first
renames it to a temporary name, and checks its last use again. If another process has used the file
in the meantime, it is renamed back. This needs no lock. A crash leaves at most a temporary file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    try:
        yield
    except OSError as error:
        raise StoreError(f"Cannot {doing} {path}: {error.strerror or error}") from error


def names_in(folder: Path) -> list[str]:
    with explained("list", folder), contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create a folder that only its owner can access, with ``parents`` also missing parents."""
    if parents and not path.parent.exists():
        make_folder(path.parent, parents=True)
    path.mkdir(_FOLDER_MODE, exist_ok=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[FileIO | None]:
    """Open a regular file for reading. Yields None if it does not exist."""

    def open_at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # Opening a named pipe would block.

    with explained("read", path):
        try:
            file = open(path, "rb", buffering=0, opener=open_at_once)  # noqa: SIM115
        except FileNotFoundError:
            yield None
            return
        with file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise CorruptEntryError(
                    f"{path} is damaged: expected a regular file, found file mode "
                    f"{stat.filemode(mode)!r}; delete it"
                )
            with damage_reported(path):
                yield file


def read_ranges(file: FileIO, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Read and concatenate byte ranges (start, stop) of a file into a new uint8 tensor.

    The file is not memory-mapped: truncating a mapped file kills the process that reads it
    (SIGBUS), and the number of mappings is limited (65,530 by default on Linux).
    """
    size = sum(stop - start for start, stop in ranges)
    try:
        raw = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # Torch raises this if an allocation fails.
        raise OSError(errno.ENOMEM, f"not enough memory for {size} bytes") from error
    view, at = raw.numpy().data, 0
    for start, stop in ranges:
        file.seek(start)
        while start < stop:
            if not (count := file.readinto(view[at : at + stop - start])):
                raise FormatError(f"it ends at byte {start}, before byte {stop}")
            start, at = start + count, at + count
    return raw


def mark_used(descriptor: int, at_most_every_s: float = 0.0) -> None:
    """Record a use of an open file, at most once per ``at_most_every_s`` seconds. Does nothing in a
    read-only store."""
    if at_most_every_s and age_s(os.fstat(descriptor).st_mtime_ns) < at_most_every_s:
        return
    now = time.time_ns()  # More precise than the timestamps set by the kernel.
    try:
        os.utime(descriptor, ns=(now, now))
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def remove_unused(path: Path, used_ns: int) -> bool | None:
    """Delete a file if its modification time is still ``used_ns``. Returns True if it was deleted,
    False if it was used or replaced, None if it no longer existed."""
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
                # A file written to `path` in the meantime has the same block, so replace it.
                os.replace(aside, path)
    except FileNotFoundError:
        return None
    return is_deleted


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file, or of a broken link itself. None if the path does not exist."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path)
    return None


@dataclass(eq=False)
class FolderSidecar(Sidecar):
    """Sidecar files in a folder of a ``DirectoryStore``."""

    _root: Path
    _fsync: bool

    def names(self, folder: str) -> list[str]:
        top = self._root / folder
        return [str(path.relative_to(top)) for path in self._files(top, temporary=False)]

    def leftovers(self) -> Iterator[Path]:
        return self._files(self._root, temporary=True)

    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        contents: list[bytes | None] = []
        for path in paths:
            with opened(self._root / path) as file:
                contents.append(None if file is None else file.read())
        return contents

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

    def _files(self, top: Path, *, temporary: bool) -> Iterator[Path]:
        def raise_unless_missing(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        with explained("list", top):
            for folder, _, names in os.walk(top, onerror=raise_unless_missing):
                for name in sorted(names):
                    if is_temporary(name) == temporary:
                        yield Path(folder) / name
