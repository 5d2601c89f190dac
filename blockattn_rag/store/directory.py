"""A store on disk: one checked safetensors file per block (``docs/format.md``)."""

from __future__ import annotations

import errno
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
    EntryInfo,
    EntryPart,
    Found,
    StoredEntry,
    StoreStats,
    check_found_under,
    check_key_of,
    get_or_error,
    is_key,
    warn_of_refused,
)
from blockattn_rag.store.checks import check_finite, check_storable
from blockattn_rag.store.deadlines import Readers
from blockattn_rag.store.eviction import SizeBound, StoredFile
from blockattn_rag.store.format import decode, encode
from blockattn_rag.store.header import FORMAT, VERSION, Header, read_header
from blockattn_rag.store.layout import ByteRange

T = TypeVar("T")

MARK = "format.json"
MARKED = {"format": FORMAT, "version": VERSION}
OBJECTS = "objects"
RECIPE_FOLDER = "recipe"
"""Folder of an engine's recipe; no entry, and nothing here reads it."""
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"[0-9a-f]{2}")

# A block that is read again and again is marked as used so often, and when it is only asked for
# (``touch``) so often: a store that is mostly read must not be written for every hit.
_MARK_READ_S = 60.0
_MARK_TOUCHED_S = 1.0

_READS_AT_ONCE = 8


class DirectoryStore:
    """``KVStore`` in a directory. Threads and processes may read and write it at once.

    An entry is written to a temporary name, flushed to the disk and renamed, so that a name in
    the store always stands for a whole entry, whatever dies in between. Each ``get`` reads the
    whole file into memory of its own and checks it there: what it returns changes no more,
    whatever becomes of the file. What the store makes may be read by its owner alone (files 0600,
    folders 0700); what is there already keeps its mode.

    Args:
        path: the directory; made if it does not exist.
        create: False to refuse to make a new store.
        fsync: False to let the system choose when to write to the disk. Faster; after a power
            failure, entries may be missing or damaged, which is detected and costs a computation.
        max_bytes: what all entries' files may take; before it is exceeded, those go that were not
            used for the longest time, whoever wrote them. None for no limit. It is a limit of this
            object: give it to everyone who writes to the directory. Several processes may exceed
            it for a moment (``eviction.SizeBound``). A block that is larger alone is not kept, as
            in a ``MemoryStore``.

    Raises:
        StoreError: ``path`` is something else, of another format version, or cannot be made.
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
        self._mark, self._objects = self.path / MARK, self.path / OBJECTS
        self.max_bytes = max_bytes
        self._bound = None if max_bytes is None else SizeBound(max_bytes)
        self._readers = Readers(_READS_AT_ONCE, "blockattn-rag-directory")
        try:
            with files.explained("open a store at", self.path):
                if not self._mark.exists():
                    self._make(create)
                _check_mark(self._mark)
        except ValueError as error:  # a path with a NUL, or with half a surrogate pair
            raise StoreError(f"no folder can have the name {str(path)!r}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Threads cannot be pickled, and another process has its own."""
        return partial(DirectoryStore, self.path, fsync=self.fsync, max_bytes=self.max_bytes), ()

    def __repr__(self) -> str:
        bound = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"DirectoryStore({str(self.path)!r}{bound})"

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if there is none. Counts as a use of it.

        Raises:
            CorruptEntryError: the file is damaged, truncated, or of another format version.
            FingerprintMismatchError: the file holds the entry of another text or model.
            StoreError: the file cannot be read.
        """
        return self._load(key, use=True)

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key, several at once."""
        return self._at_once(partial(get_or_error, self), keys)

    def peek(self, key: str) -> BlockKV | None:
        """As ``get``, but looking at an entry is no use of it."""
        return self._load(key, use=False)

    def read_ranges(
        self,
        keys: Sequence[str],
        wanted: Callable[[Header], Sequence[ByteRange]],
        head_bytes: int,
    ) -> list[EntryPart | StoreError | None]:
        """As ``RangeStore.read_ranges``; a header of any length is read as it is."""
        return self._at_once(partial(self._part, wanted), keys)

    def touch(self, key: str) -> bool:
        """Mark an entry as used now; True if there is one that looks sound.

        The header is checked, and that the file has the size that the header says, not the rest:
        that would take as long as reading it. One that is damaged or cannot be read counts as
        absent; putting the block anew mends it, or tells why it cannot be written either.
        """
        path = self.entry_path(key)
        try:
            with files.opened(path) as file:
                if file is None:
                    return False
                _read_header(path, file)
                files.mark_used(file.fileno(), _MARK_TOUCHED_S)
                # Whoever deletes it puts it aside before he looks whether it is in use.
                return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        except StoreError:
            return False

    def put(self, key: str, kv: BlockKV) -> None:
        """As ``KVStore.put``; raises StoreError as well if the block holds NaN or infinity."""
        check_key_of(key, kv)
        check_storable(kv)
        path = self.entry_path(key)
        check_finite(kv, path)
        buffers = encode(kv)
        with files.explained("write", path):
            if self._bound is None:
                self._write(path, buffers)
            else:
                self._write_within(self._bound, path, buffers)

    def __contains__(self, key: object) -> bool:
        """Whether there is a file of that name. Its content is checked by ``get``."""
        if not is_key(key):
            return False
        path = self.entry_path(key)
        with files.explained("look for", path):
            return path.exists()

    def delete(self, key: str) -> bool:
        path = self.entry_path(key)
        with files.explained("delete", path), suppress(FileNotFoundError):
            path.unlink()
            return True
        return False

    def discard(self, key: str, used_ns: int) -> bool:
        """Delete an entry unless it was used or replaced since ``used_ns``; True if deleted."""
        path = self.entry_path(key)
        with files.explained("delete", path):
            return bool(files.remove_unused(path, used_ns))

    def keys(self) -> Iterator[str]:
        return (path.stem for path in self._names() if _is_entry(path))

    def files(self) -> Iterator[StoredFile]:
        """The entries' files: one ``stat`` each. What is no regular file is left out."""
        for shard in self._shards():
            yield from entry_files(shard)

    def entries(self) -> Iterator[StoredEntry]:
        """The entries: one ``stat`` each. ``used_ns`` is the file's modification time: written,
        read (known to a minute) or touched."""
        return (StoredEntry(file.path.stem, file.nbytes, file.used_ns) for file in self.files())

    def stats(self) -> StoreStats:
        """Counts the files: one ``stat`` each."""
        sizes = [file.nbytes for file in self.files()]
        bound = self._bound
        evictions, refused = (bound.evictions, bound.refused) if bound else (0, 0)
        return StoreStats(len(sizes), sum(sizes), evictions, refused)

    def entry_path(self, key: str) -> Path:
        """Where the entry of this key is, or would be."""
        if not is_key(key):
            raise ValueError(f"a store key is 64 hex digits (kv.store_key), found {key!r}")
        return self._objects / key[:2] / f"{key}{_SUFFIX}"

    def describe(self, key: str) -> EntryInfo | None:
        """What the entry's header says, without reading its tensors; None if there is no entry.

        The header is checked by its own checksum, the rest of the file not.

        Raises:
            StoreError: as ``get``.
        """
        path = self.entry_path(key)
        with files.opened(path) as file:
            if file is None:
                return None
            header = _read_header(path, file)
            status = os.fstat(file.fileno())
        return EntryInfo.of(header, status.st_size, status.st_mtime_ns)

    def used_ns(self, key: str) -> int | None:
        """When the entry was last used, as ``EntryInfo.used_ns``, sound or not; None if absent."""
        status = _status(self.entry_path(key))
        return None if status is None else status.st_mtime_ns

    def leftovers(self) -> Iterator[Path]:
        """Temporary files: of writers at work, or of writers that were killed."""
        own = (self.path / name for name in files.names_in(self.path))
        return (path for path in itertools.chain(own, self._names()) if is_temporary(path.name))

    def _load(self, key: str, *, use: bool) -> BlockKV | None:
        path = self.entry_path(key)
        with files.opened(path) as file:
            if file is None:
                return None
            kv = decode(files.read_whole(file))
            check_found_under(key, kv, path)
            if use:
                files.mark_used(file.fileno(), _MARK_READ_S)
        return kv

    def _at_once(self, read: Callable[[str], T], keys: Sequence[str]) -> list[T]:
        """Several reads at once: a share on a network answers each after a while, and checksums of
        large entries are computed beside each other."""
        if len(keys) < 2:
            return [read(key) for key in keys]
        started = [self._readers.start(read, key) for key in keys]
        return [one.result() for one in started]

    def _part(
        self, wanted: Callable[[Header], Sequence[ByteRange]], key: str
    ) -> EntryPart | StoreError | None:
        path = self.entry_path(key)
        try:
            with files.opened(path) as file:
                if file is None:
                    return None
                header = _read_header(path, file)
                places = wanted(header)
                data = files.read_places(file, places)
                files.mark_used(file.fileno(), _MARK_READ_S)
        except StoreError as error:
            return error
        return EntryPart(header, places, data, str(path))

    def _write(self, path: Path, buffers: list[memoryview]) -> None:
        if not self._mark.exists():  # the folder was deleted since it was opened
            self._make(create=True)
        if not path.parent.exists():
            files.make_folder(self._objects)
            files.make_folder(path.parent)
            if self.fsync:
                sync(self._objects)
                sync(self.path)
        with replacing(path, mode=files.FILE_MODE, fsync=self.fsync) as file:
            file.writelines(buffers)
            file.flush()
            files.mark_used(file.fileno())

    def _write_within(self, bound: SizeBound, path: Path, buffers: list[memoryview]) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        with bound.lock:
            if nbytes > bound.max_bytes:
                path.unlink(missing_ok=True)
                bound.refused += 1
                if bound.refused == 1:
                    warn_of_refused(self, nbytes)
                return
            bound.make_room(nbytes, lambda: (f for f in self.files() if f.path != path))
            self._write(path, buffers)

    def _make(self, create: bool) -> None:
        """Make this directory a store, unless another process has just done so.

        One that holds nothing but entries is a store whose mark was deleted, for example while
        others wrote to it. Each entry tells its format version itself.
        """
        if not create:
            raise StoreError(f"there is no store at {self.path}: it has no {MARK}")
        files.make_folder(self.path, parents=True)
        foreign = next(self._foreign(), None)
        if self._mark.exists():
            return
        if foreign is not None:
            raise StoreError(
                f"{self.path} is not a store: it has no {MARK}, and holds {foreign!r}; "
                "choose an empty or new directory"
            )
        with replacing(self._mark, mode=files.FILE_MODE, fsync=self.fsync) as file:
            file.write(json.dumps(MARKED).encode() + b"\n")

    def _foreign(self) -> Iterator[str]:
        """Names that no store has."""
        own = files.names_in(self.path)
        known = (OBJECTS, RECIPE_FOLDER)
        yield from (name for name in own if name not in known and not is_temporary(name))
        shards = files.names_in(self._objects)
        yield from (f"{OBJECTS}/{name}" for name in shards if not _SHARD.fullmatch(name))

    def _names(self) -> Iterator[Path]:
        """Everything in the folders where entries lie."""
        for folder in self._shards():
            yield from (folder / name for name in files.names_in(folder))

    def _shards(self) -> Iterator[Path]:
        names = files.names_in(self._objects)
        return (self._objects / name for name in names if _SHARD.fullmatch(name))


def entry_files(shard: Path) -> Iterator[StoredFile]:
    """The entries' files in one of the folders where entries lie: one ``stat`` each. What is no
    regular file is left out."""
    for name in files.names_in(shard):
        if _is_entry(shard / name) and (status := _status(shard / name)) is not None:
            yield StoredFile(shard / name, status.st_size, status.st_mtime_ns)


def _is_entry(path: Path) -> bool:
    return path.suffix == _SUFFIX and is_key(path.stem) and path.stem[:2] == path.parent.name


def _status(path: Path) -> os.stat_result | None:
    """Of a regular file; None if it was deleted since it was listed, or is none."""
    with files.explained("look at", path):
        try:
            status = path.stat()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # deleted; a link to itself
                return None
            raise
    return status if stat.S_ISREG(status.st_mode) else None


def _read_header(path: Path, file: FileIO) -> Header:
    header = read_header(file, os.fstat(file.fileno()).st_size)
    check_found_under(path.stem, header, path)
    return header


def _check_mark(mark: Path) -> None:
    """Refuse, by a StoreError, a folder that is no store of this format."""
    with files.opened(mark) as file:
        content = file.read() if file is not None else b""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{mark} is not readable JSON: {error}") from error
    if found != MARKED:
        raise StoreError(
            f"{mark.parent} is a store of another format: found {found}, expected {MARKED}; "
            "use another directory, or ingest anew"
        )
