"""A store on disk: one memory-mapped safetensors file per block (``docs/format.md``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv import BlockKV, store_key
from blockattn_rag.store.base import StoreStats, check_key_of, is_key
from blockattn_rag.store.format import (
    FORMAT,
    VERSION,
    FormatError,
    check_storable,
    decode,
    encode,
    read_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MARK = "format.json"
_OBJECTS = "objects"
_SUFFIX = ".safetensors"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What an entry says of itself in its header, and its file.

    Args:
        nbytes: size of the file.
        age_s: seconds since the entry was written. Not since it was last read: that time is kept
            at best once a day on most systems (``relatime``).
    """

    key: str
    handle: str
    digest: str
    fingerprint: str
    num_tokens: int
    nbytes: int
    age_s: float


class DirectoryStore:
    """``KVStore`` in a directory. Threads and processes may read and write it at once.

    An entry is written to a temporary name, flushed to the disk and renamed, so that a name in
    the store always stands for a whole entry, whatever dies in between. Each ``get`` checks the
    file's checksum, and returns tensors that are views of the mapped file: no copy but the page
    cache, valid for as long as they are held, also after the entry is replaced or deleted. Writing
    to such a tensor is an error of the caller; it would change the caller's view, never the file.

    Args:
        path: the directory; made if it does not exist.
        create: False to refuse to make a new store.
        fsync: False to let the system choose when to write to the disk. Faster; after a power
            failure, entries may be missing or damaged, which is detected and costs a computation.

    Raises:
        StoreError: ``path`` is something else, of another format version, or cannot be made.
    """

    def __init__(self, path: str | Path, *, create: bool = True, fsync: bool = True) -> None:
        self.path = Path(path)
        self.fsync = fsync
        self._objects = self.path / _OBJECTS
        with _explained("open a store at", self.path):
            mark = self.path / _MARK
            if not mark.exists():
                self._make(mark, create)
            _check_mark(mark)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.path)!r})"

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if there is none.

        Raises:
            CorruptEntryError: the file is damaged, truncated, or of another format version.
            FingerprintMismatchError: the file holds the entry of another text or model.
            StoreError: the file cannot be read.
        """
        path = self.entry_path(key)
        raw = self._map(path)
        if raw is None:
            return None
        try:
            kv = decode(raw)
        except FormatError as error:
            raise _corrupt(path, error) from error
        _check_name(path, kv.fingerprint, kv.digest)
        return kv

    def put(self, key: str, kv: BlockKV) -> None:
        check_key_of(key, kv)
        check_storable(kv)
        path = self.entry_path(key)
        with _explained("write", path):
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._sync(self._objects)
                self._sync(self.path)
            self._write(path, encode(kv))

    def __contains__(self, key: object) -> bool:
        """Whether there is a file of that name. Its content is checked by ``get``."""
        if not isinstance(key, str) or not is_key(key):
            return False
        path = self.entry_path(key)
        with _explained("look for", path):
            return path.exists()

    def delete(self, key: str) -> bool:
        path = self.entry_path(key)
        with _explained("delete", path):
            return _unlink(path)

    def keys(self) -> Iterator[str]:
        return (path.name.removesuffix(_SUFFIX) for path in self._files() if _is_entry(path))

    def stats(self) -> StoreStats:
        """Counts the files: one ``stat`` each."""
        sizes = [_size(path) for path in self._files() if _is_entry(path)]
        present = [size for size in sizes if size is not None]
        return StoreStats(entries=len(present), total_bytes=sum(present))

    def entry_path(self, key: str) -> Path:
        """Where the entry of this key is, or would be."""
        if not is_key(key):
            raise ValueError(f"a store key is 64 hex digits (kv.store_key), found {key!r}")
        return self._objects / key[:2] / f"{key}{_SUFFIX}"

    def describe(self, key: str) -> EntryInfo | None:
        """What the entry's header says, without reading its tensors; None if there is no entry.

        The checksum covers the whole file and is *not* checked here.

        Raises:
            StoreError: as ``get``.
        """
        path = self.entry_path(key)
        with _explained("read", path):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return None
            with file:
                status = os.fstat(file.fileno())
                try:
                    header = read_header(file, status.st_size)
                except FormatError as error:
                    raise _corrupt(path, error) from error
        _check_name(path, header.fingerprint, header.digest)
        return EntryInfo(
            key=key,
            handle=header.handle,
            digest=header.digest,
            fingerprint=header.fingerprint,
            num_tokens=header.num_tokens,
            nbytes=status.st_size,
            age_s=time.time() - status.st_mtime,
        )

    def leftovers(self) -> Iterator[Path]:
        """Temporary files: of writers at work, or of writers that were killed."""
        found = itertools.chain(self.path.glob(".*.tmp"), self._files())
        return (path for path in found if _TEMPORARY.fullmatch(path.name))

    def _make(self, mark: Path, create: bool) -> None:
        """Make this directory a store, unless another process has just done so."""
        if not create:
            raise StoreError(f"there is no store at {self.path}: it has no {_MARK}")
        self.path.mkdir(parents=True, exist_ok=True)
        found = [name for name in os.listdir(self.path) if not _TEMPORARY.fullmatch(name)]
        if mark.exists():
            return
        if found:
            raise StoreError(
                f"{self.path} is not a store: it has no {_MARK}, and holds {found[0]!r}; "
                "choose an empty or new directory"
            )
        content = json.dumps({"format": FORMAT, "version": VERSION}) + "\n"
        self._write(mark, [memoryview(content.encode())])

    def _map(self, path: Path) -> Tensor | None:
        """The file as uint8 ``[size]``: private pages, and no file descriptor kept open."""
        with _explained("read", path):
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                return None
        try:
            return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except RuntimeError as error:
            if not os.path.exists(path):  # deleted since
                return None
            raise StoreError(f"cannot read {path}: {error}") from error

    def _write(self, path: Path, buffers: Iterable[memoryview]) -> None:
        """Whole or not at all: temporary name in the same folder, flush, rename, flush folder."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                for buffer in buffers:
                    file.write(buffer)
                if self.fsync:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # gone if all went well; if not, tell that error
                temporary.unlink()
        self._sync(path.parent)

    def _sync(self, folder: Path) -> None:
        """Make the folder's own list of names durable."""
        if not self.fsync:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _files(self) -> Iterator[Path]:
        with _explained("list", self._objects):
            for shard in sorted(self._objects.glob("[0-9a-f][0-9a-f]")):
                yield from sorted(shard.iterdir())


@contextlib.contextmanager
def _explained(doing: str, path: Path) -> Iterator[None]:
    """What the operating system refuses becomes a StoreError that names the path."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {doing} {path}: {error.strerror or error}") from error


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _is_entry(path: Path) -> bool:
    key = path.name.removesuffix(_SUFFIX)
    return path.name.endswith(_SUFFIX) and is_key(key) and key[:2] == path.parent.name


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted since it was listed
        return None


def _corrupt(path: Path, reason: FormatError) -> CorruptEntryError:
    return CorruptEntryError(f"{path} is damaged: {reason}; delete it, or put the block anew")


def _check_name(path: Path, fingerprint: str, digest: str) -> None:
    expected = store_key(fingerprint, digest)
    if path.name != expected + _SUFFIX:
        raise FingerprintMismatchError(
            f"{path} holds the entry of another text or model, whose key is {expected} "
            f"(fingerprint {fingerprint!r}); delete it, or put the block anew"
        )


def _check_mark(mark: Path) -> None:
    try:
        found = json.loads(mark.read_text())
    except ValueError as error:
        raise StoreError(f"{mark} is not readable JSON: {error}") from error
    expected = {"format": FORMAT, "version": VERSION}
    if found != expected:
        raise StoreError(
            f"{mark.parent} is a store of another format: found {found}, expected {expected}; "
            "use another directory, or ingest anew"
        )
