"""Interface of all stores, and the types that stores accept and return."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV, joined_handles, split_handles
from blockattn_rag.store.header import Header

ReadResult: TypeAlias = BlockKV | StoreError | None
"""Result of reading one of several entries: the entry, None if it does not exist, or the StoreError
that ``get`` would raise. Errors are returned, so that one bad entry does not hide the others."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of one tier since its ``TieredStore`` was created.

    Args:
        name: ``repr`` of the tier's store.
        hits: Entries read.
        read_tokens, read_bytes: Tokens and bytes (keys, values, scales) of the entries read.
        misses: Lookups of absent or damaged entries.
        written: Entries written, including copies of hits in slower tiers.
        failures: Failed reads and writes. A read of many entries counts once.
        skipped: Entries not looked up or written because the breaker was open.
        dropped: Entries not written because the queue was full or the write failed.
        is_open: Whether the breaker is open now.
    """

    name: str
    hits: int = 0
    read_tokens: int = 0
    read_bytes: int = 0
    misses: int = 0
    written: int = 0
    failures: int = 0
    skipped: int = 0
    dropped: int = 0
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size and counters of a store.

    Args:
        entries: Number of blocks.
        total_bytes: Total size: of keys and values in a store in memory, of complete entries
            elsewhere.
        evictions: Entries evicted since the store object was created.
        refused: Entries not stored because they are larger than the size limit.
        tiers: Stats of each tier of a ``TieredStore``, fastest first.
    """

    entries: int
    total_bytes: int
    evictions: int = 0
    refused: int = 0
    tiers: tuple[TierStats, ...] = ()


SIDECAR = "sidecar"
"""Folder of the files in a store."""


class Sidecar(ABC):
    """Small immutable files alongside the entries of a store, such as the index of passages.

    A file has a path of several parts, ``"folder/name"``. It is written atomically and never
    changed, so readers need no lock: a file is complete or absent. All methods raise StoreError if
    the store fails.
    """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Paths of all files below a folder, relative to it. Empty if there is no such folder."""

    @abstractmethod
    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Contents of files, in order. None: there is no such file."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file atomically, replacing any older one."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""


class KVStore(ABC):
    """Base class of stores: a thread-safe map from store keys (``kv.store_key``) to ``BlockKV``.

    A new backend implements ``get`` (or ``get_many``, if reading several entries at once is
    faster), ``put``, ``__contains__``, ``delete``, ``keys`` and ``stats``. The other methods have
    defaults. Override ``touch`` if the store evicts entries, ``mark_used`` if marking a use is
    cheaper than ``touch``, and ``sidecar`` to support recognition. A store that ``blockattn-rag
    store`` maintains derives from ``MaintainedStore``.
    """

    records_use: ClassVar[bool] = True
    """Whether ``touch`` changes the time of use of an entry."""

    def get(self, key: str) -> BlockKV | None:
        """Return the entry of a key, or None. Counts as a use of the entry.

        The returned tensors do not change if the entry is later replaced, deleted or damaged.

        Raises:
            CorruptEntryError: The entry is damaged, truncated, or of another format version.
            FingerprintMismatchError: The entry belongs to another text, model or tenant.
            StoreError: The entry cannot be read, or the deadline passed.
        """
        (entry,) = self.get_many([key])
        if isinstance(entry, StoreError):
            raise entry
        return entry

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        """Read several entries, in the order of the keys. Errors are returned, not raised."""
        return [self._get_or_error(key) for key in keys]

    def _get_or_error(self, key: str) -> ReadResult:
        try:
            return self.get(key)
        except StoreError as error:
            return error

    @abstractmethod
    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry atomically, replacing any older entry of this key.

        Raises:
            ValueError: ``key`` is not the ``store_key`` of ``kv``, or ``kv`` is malformed.
            StoreError: The entry cannot be written. Or it contains NaN or infinity, and the store
                is not in the memory of this process.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the key has an entry. Its content is checked only by ``get``."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry. Returns whether there was one."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Iterate over all keys. Entries that change during the iteration may be missing."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Size and counters."""

    def touch(self, key: str) -> bool:
        """Mark an entry as used now. Returns whether it exists and appears intact.

        An entry that appears damaged counts as absent, so that its block is computed again.
        """
        return key in self

    def mark_used(self, key: str) -> None:
        """Mark an entry as used now, if it exists and the store records uses."""
        if self.records_use:
            self.touch(key)

    def claim(self, key: str, handles: Collection[str]) -> bool:
        """Mark an entry as used now, and add the handles of texts that share it.

        Texts with the same tokens share an entry, which ``gc`` keeps while one of its handles is
        live. Of two concurrent claims, one may be lost; its block may then be computed again.

        Returns:
            Whether the entry exists and appears intact.
        """
        return self.touch(key)

    @property
    def sidecar(self) -> Sidecar | None:
        """Small files alongside the entries, such as the index of passages. None: not supported."""
        return None


class StoredEntry(NamedTuple):
    """Entry in a listing of a store.

    Args:
        nbytes: Size of the entry in the store. 0 if its path is not a regular file.
        used_ns: Time of the last use that the store recorded, in nanoseconds since 1970.
    """

    key: str
    nbytes: int
    used_ns: int


class EntryInfo(NamedTuple):
    """Header and listing of an entry. ``nbytes`` and ``used_ns`` as in ``StoredEntry``."""

    header: Header
    nbytes: int
    used_ns: int

    @property
    def age_s(self) -> float:
        """Seconds since the last use."""
        return age_s(self.used_ns)

    @property
    def handles(self) -> tuple[str, ...]:
        """Handles of the texts that share the entry. Empty if they are unknown."""
        return split_handles(self.header.handle)


class MaintainedStore(KVStore):
    """Base class of stores whose entries can be listed, described, swept, and read in part."""

    @abstractmethod
    def entries(self) -> Iterator[StoredEntry]:
        """Iterate over all entries. Entries that change during the iteration may be missing."""

    @abstractmethod
    def describe(self, key: str) -> EntryInfo | None:
        """Return the header and listing of an entry, or None. Verifies the header's checksum.

        Raises:
            StoreError: See ``get``.
        """

    def peek(self, key: str) -> BlockKV | None:
        """Read an entry like ``get``, without counting as a use.

        Override it in stores that record reads.
        """
        return self.get(key)

    @abstractmethod
    def discard(self, key: str, used_ns: int) -> bool | None:
        """Delete an entry unless it was used or replaced since ``used_ns``.

        Returns:
            True if it was deleted, False if it was used, None if it was gone.
        """

    @abstractmethod
    def read_parts(
        self,
        keys: Sequence[str],
        choose: Callable[[Header], Mapping[int, range]],
        head_bytes: int,
    ) -> list[ReadResult]:
        """Read some heads of some layers of entries, verified like complete entries.

        The read counts as a use. A remote store first reads the headers of all entries
        concurrently, and then the selected heads.

        Args:
            choose: Function that returns the heads of each layer to read, given the header. If it
                raises a StoreError, that error is returned.
            head_bytes: Number of bytes to read first, which are not read again. A remote store
                rejects entries with a longer header.

        Returns:
            For each key: the part as a block with the key of the entry, None if there is no entry,
            or the StoreError that ``get`` would raise.
        """

    def leftovers(self) -> Iterator[Path]:
        """Temporary files of running and of killed writers."""
        return iter(())

    def claim(self, key: str, handles: Collection[str]) -> bool:
        if self.records_use and not self.touch(key):
            return False
        try:
            info = self.describe(key)
            if info is None:
                return False
            if not info.handles or set(handles) <= set(info.handles):
                return True
            kv = self.peek(key)
        except (CorruptEntryError, FingerprintMismatchError):
            return False
        if kv is None:
            return False
        self.put(key, with_handles(kv, handles))
        return True


def with_handles(kv: BlockKV, handles: Collection[str]) -> BlockKV:
    """Add handles to a block, as a copy. A block without handles is returned unchanged."""
    if not kv.handle:
        return kv
    return replace(kv, handle=joined_handles([*split_handles(kv.handle), *handles]))


def is_damage(answer: object) -> bool:
    """Whether a result is an error of a single bad entry, not of the complete store."""
    return isinstance(answer, (CorruptEntryError, FingerprintMismatchError))


def age_s(used_ns: int, now_ns: int | None = None) -> float:
    """Seconds between a time (nanoseconds since 1970) and now.

    A time in the future comes from a wrong clock, so its absolute distance counts: a file that is a
    few seconds ahead is new, but a file that is a year ahead must not be kept forever.
    """
    return abs((time.time_ns() if now_ns is None else now_ns) - used_ns) / 1e9
