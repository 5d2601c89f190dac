"""Store on disk: one safetensors file per block (``docs/format.md``)."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from blockattn_rag.errors import StoreError
from blockattn_rag.files import is_temporary, replacing, sync
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import files
from blockattn_rag.store.base import (
    SIDECAR,
    ChooseHeads,
    EntryInfo,
    MaintainedStore,
    ReadResult,
    StoredEntry,
    StoreStats,
)
from blockattn_rag.store.checks import check_key, is_key
from blockattn_rag.store.concurrency import Readers
from blockattn_rag.store.eviction import SizeBound
from blockattn_rag.store.format import check_entry_key, decode_part, decoded, encoded, ranges
from blockattn_rag.store.header import FORMAT, VERSION, Header, read_header

T = TypeVar("T")

RECIPE_FOLDER = "recipe"
"""Name of the folder with an engine's recipe, which the store ignores."""

_MARK = "format.json"
_MARKED = {"format": FORMAT, "version": VERSION}
_OBJECTS = "objects"
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"[0-9a-f]{2}")

# Minimum seconds between two recorded uses of an entry, for reads and for `touch`. Recording every
# hit would slow down a store that is mostly read.
_MARK_READ_S = 60.0
_MARK_TOUCHED_S = 1.0

_READS_AT_ONCE = 8


class DirectoryStore(MaintainedStore):
    """Store in a directory. Safe for concurrent use by threads and processes.

    An entry is written under a temporary name, flushed to disk and renamed, so every entry is
    complete even after a crash. ``get`` loads the complete file into memory and verifies it there.
    Entries and their folders are created with access for their owner only (0600, 0700).

    Args:
        path: Directory of the store. A leading ``~`` is expanded.
        create: Whether to create the store if it does not exist, instead of raising StoreError.
        fsync: Whether to flush each entry to disk. If False, a power failure may lose or damage
            entries. Reads detect damage, and the blocks are encoded again.
        max_bytes: Size limit of all entries in bytes. Before a write, this object evicts the least
            recently used entries to stay within it. If several objects write, they may briefly
            exceed it (``SizeBound``). A larger entry is not stored. Default: no limit.

    Raises:
        StoreError: ``path`` is not a store, has another format version, or cannot be opened or
            created.
        ValueError: ``max_bytes`` is not positive.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        create: bool = True,
        fsync: bool = True,
        max_bytes: int | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.fsync = fsync
        self._mark, self._objects = self.path / _MARK, self.path / _OBJECTS
        self.max_bytes = max_bytes
        self._bound = None if max_bytes is None else SizeBound(max_bytes)
        self._readers = Readers(_READS_AT_ONCE, "blockattn-rag-directory")
        try:
            with files.explained("open a store at", self.path):
                if not self._mark.exists():
                    self._make(create)
                _check_mark(self._mark)
        except ValueError as error:  # The path contains a NUL or a lone surrogate.
            raise StoreError(f"Invalid folder name {str(path)!r}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the threads, because another process starts its own."""
        return partial(DirectoryStore, self.path, fsync=self.fsync, max_bytes=self.max_bytes), ()

    def __repr__(self) -> str:
        bound = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"DirectoryStore({str(self.path)!r}{bound})"

    @property
    def sidecar(self) -> files.FolderSidecar:
        return files.FolderSidecar(self.path / SIDECAR, self.fsync)

    def get(self, key: str) -> BlockKV | None:
        return self._load(key, use=True)

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        return self._at_once(self._get_or_error, keys)

    def peek(self, key: str) -> BlockKV | None:
        return self._load(key, use=False)

    def read_parts(
        self, keys: Sequence[str], choose: ChooseHeads, head_bytes: int
    ) -> list[ReadResult]:
        return self._at_once(partial(self._part, choose), keys)

    def touch(self, key: str) -> bool:
        """Mark an entry as used now. Returns whether it exists and appears intact: only the header
        and the file size are checked. An unreadable entry counts as absent."""
        path = self.entry_path(key)
        try:
            with files.opened(path) as file:
                if file is None:
                    return False
                _read_header(path, file)
                files.mark_used(file.fileno(), _MARK_TOUCHED_S)
                # `discard` renames the file first, so check that the path still refers to it.
                return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except StoreError:
            return False

    def put(self, key: str, kv: BlockKV) -> None:
        path = self.entry_path(kv.key)
        content = encoded(key, kv, path)
        nbytes, bound = len(content), self._bound
        with files.explained("write", path):
            if bound is None:
                self._write(path, content)
                return
            with bound.lock:
                if nbytes > bound.max_bytes:
                    path.unlink(missing_ok=True)
                    bound.refusals.add(self, nbytes)
                else:
                    bound.make_room(self, key, nbytes)
                    self._write(path, content)

    def __contains__(self, key: object) -> bool:
        if not is_key(key):
            return False
        path = self.entry_path(key)
        with files.explained("look up", path):
            return path.exists()

    def delete(self, key: str) -> bool:
        path = self.entry_path(key)
        with files.explained("delete", path), suppress(FileNotFoundError):
            path.unlink()
            return True
        return False

    def discard(self, key: str, used_ns: int) -> bool | None:
        path = self.entry_path(key)
        with files.explained("delete", path):
            return files.remove_unused(path, used_ns)

    def keys(self) -> Iterator[str]:
        return (path.stem for path in self._paths())

    def entries(self) -> Iterator[StoredEntry]:
        """Iterate over all entries. In ``used_ns``, reads are recorded at most once a minute."""
        for path in self._paths():
            with files.explained("inspect", path):
                status = files.status_of(path)
            if status is not None:
                nbytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
                yield StoredEntry(path.stem, nbytes, status.st_mtime_ns)

    def stats(self) -> StoreStats:
        sizes = [entry.nbytes for entry in self.entries()]
        bound = self._bound
        evictions, refused = (bound.evictions, bound.refusals.count) if bound else (0, 0)
        return StoreStats(len(sizes), sum(sizes), evictions, refused)

    def entry_path(self, key: str) -> Path:
        return self._objects / check_key(key)[:2] / f"{key}{_SUFFIX}"

    def describe(self, key: str) -> EntryInfo | None:
        path = self.entry_path(key)
        with files.opened(path) as file:
            if file is None:
                return None
            header = _read_header(path, file)
            status = os.fstat(file.fileno())
        return EntryInfo(header, status.st_size, status.st_mtime_ns)

    def leftovers(self) -> Iterator[Path]:
        own = (self.path / name for name in files.names_in(self.path))
        yield from (path for path in itertools.chain(own, self._names()) if is_temporary(path.name))
        yield from self.sidecar.leftovers()

    def _load(self, key: str, *, use: bool) -> BlockKV | None:
        path = self.entry_path(key)
        with files.opened(path) as file:
            if file is None:
                return None
            size = os.fstat(file.fileno()).st_size
            kv = decoded(key, files.read_ranges(file, [(0, size)]), path)
            if use:
                files.mark_used(file.fileno(), _MARK_READ_S)
        return kv

    def _at_once(self, read: Callable[[str], T], keys: Sequence[str]) -> list[T]:
        """Read concurrently, because network shares are slow and checksums take time."""
        if len(keys) < 2:
            return [read(key) for key in keys]
        reads = [self._readers.start(read, key) for key in keys]
        return [future.result() for future in reads]

    def _part(self, choose: ChooseHeads, key: str) -> ReadResult:
        path = self.entry_path(key)
        try:
            with files.opened(path) as file:
                if file is None:
                    return None
                header = _read_header(path, file)
                part = choose(header)
                kv = decode_part(header, part, files.read_ranges(file, ranges(header, part)))
                files.mark_used(file.fileno(), _MARK_READ_S)
                return kv
        except StoreError as error:
            return error

    def _write(self, path: Path, content: bytes) -> None:
        if not self._mark.exists():  # It was deleted after the store was opened.
            self._make(create=True)
        if not path.parent.exists():
            files.make_folder(self._objects)
            files.make_folder(path.parent)
            if self.fsync:
                sync(self._objects)
                sync(self.path)
        with replacing(path, mode=files.FILE_MODE, fsync=self.fsync) as file:
            file.write(content)
            file.flush()
            files.mark_used(file.fileno())

    def _make(self, create: bool) -> None:
        """Initialize a store in this directory, unless another process has just done so. Entries
        may exist already, because ``format.json`` may have been deleted after they were written."""
        if not create:
            raise StoreError(f"No store at {self.path}: it has no {_MARK}")
        files.make_folder(self.path, parents=True)
        foreign = next(self._foreign(), None)
        if self._mark.exists():
            return
        if foreign is not None:
            raise StoreError(
                f"{self.path} is not a store: it has no {_MARK}, and contains {foreign!r}; "
                "choose an empty or new directory"
            )
        with replacing(self._mark, mode=files.FILE_MODE, fsync=self.fsync) as file:
            file.write(json.dumps(_MARKED).encode() + b"\n")

    def _foreign(self) -> Iterator[str]:
        for name in files.names_in(self.path):
            if name not in (_OBJECTS, RECIPE_FOLDER, SIDECAR) and not is_temporary(name):
                yield name
        for name in files.names_in(self._objects):
            if not _SHARD.fullmatch(name):
                yield f"{_OBJECTS}/{name}"

    def _names(self) -> Iterator[Path]:
        for shard in files.names_in(self._objects):
            if _SHARD.fullmatch(shard):
                folder = self._objects / shard
                yield from (folder / name for name in files.names_in(folder))

    def _paths(self) -> Iterator[Path]:
        for path in self._names():
            key = path.stem
            if path.suffix == _SUFFIX and is_key(key) and key[:2] == path.parent.name:
                yield path


def _read_header(path: Path, file: FileIO) -> Header:
    header = read_header(file, os.fstat(file.fileno()).st_size)
    check_entry_key(path.stem, header, path)
    return header


def _check_mark(mark: Path) -> None:
    with files.opened(mark) as file:
        content = file.read() if file is not None else b""
    try:
        mark_fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{mark} is not readable JSON: {error}") from error
    if mark_fields != _MARKED:
        raise StoreError(
            f"{mark.parent} is a store in another format: found {mark_fields}, expected {_MARKED}; "
            "ingest into another directory"
        )
