"""Store interface, the types that stores accept and return, and lookups of blocks in any store."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV, joined_handles, split_handles
from blockattn_rag.store.checks import Outline, check_block
from blockattn_rag.store.header import Header

ReadResult: TypeAlias = BlockKV | StoreError | None
"""Result of a batch read for one key: the entry, None if it does not exist, or the StoreError that
``get`` would raise. Returning errors keeps one bad entry from failing the complete batch."""

ChooseHeads: TypeAlias = Callable[[Header], Mapping[int, range]]
"""Function that selects the heads to read, by layer, given an entry's header."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of one tier since its ``TieredStore`` was created.

    Args:
        name: ``repr`` of the tier's store.
        hits: Number of entries read.
        read_tokens, read_bytes: Tokens and bytes (keys, values, scales) of the entries read.
        misses: Reads of absent or damaged entries.
        written: Entries written, including copies of entries that a slower tier returned.
        failures: Failed calls. A batch read counts once, and damaged entries do not count.
        skipped: Entries in calls that were skipped because the breaker was open.
        dropped: Copies not written: the queue was full, or the write failed or was skipped.
        is_open: Whether the breaker is currently open.
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
        total_bytes: Total size in bytes. An in-memory store counts only keys, values and scales;
            others count complete entries.
        evictions: Entries that this store object evicted. Excludes evictions by a Redis server.
        refused: Entries that this store object did not store because each exceeds the size limit.
        tiers: Stats of each tier of a ``TieredStore``, fastest first.
    """

    entries: int
    total_bytes: int
    evictions: int = 0
    refused: int = 0
    tiers: tuple[TierStats, ...] = ()


SIDECAR = "sidecar"
"""Name of the folder that contains a store's sidecar files."""


class Sidecar(ABC):
    """Small immutable files alongside the entries of a store, such as the passage index.

    Paths have the form ``"folder/name"``; folders may be nested. A file is written atomically and
    never modified in place, so readers need no lock: a file is either complete or absent. All
    methods raise StoreError if the store fails.
    """

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """List all files under a folder, as paths relative to it. Empty if it does not exist."""

    @abstractmethod
    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """Read files, in the order of ``paths``. None stands for a missing file."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file atomically, replacing any existing one."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""


class KVStore(ABC):
    """Base class of stores: a thread-safe map from store keys (``kv.store_key``) to ``BlockKV``.

    A new backend implements ``get`` (or ``get_many``, if reading several entries at once is
    faster), ``put``, ``__contains__``, ``delete``, ``keys`` and ``stats``. CONTRIBUTING.md lists
    the optional methods. Derive from ``MaintainedStore`` to support ``blockattn-rag store``.
    """

    records_use: ClassVar[bool] = True
    """Whether ``touch`` updates the time at which an entry was last used."""

    def get(self, key: str) -> BlockKV | None:
        """Return the entry for a key, or None. Counts as a use of the entry.

        The returned tensors do not change if the entry is later replaced, deleted or damaged.

        Raises:
            CorruptEntryError: The entry is damaged, truncated, or has another format version.
            FingerprintMismatchError: The entry belongs to another text, model or tenant.
            StoreError: The entry cannot be read, or the deadline passed.
        """
        (entry,) = self.get_many([key])
        if isinstance(entry, StoreError):
            raise entry
        return entry

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        """Read several entries, in the order of the keys. StoreErrors are returned, not raised."""
        return [self._get_or_error(key) for key in keys]

    def _get_or_error(self, key: str) -> ReadResult:
        try:
            return self.get(key)
        except StoreError as error:
            return error

    @abstractmethod
    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry atomically, replacing any existing entry for this key.

        Raises:
            ValueError: ``key`` is not the ``store_key`` of ``kv``, or ``kv`` is malformed.
            StoreError: The entry cannot be written, or it contains NaN or infinity. In-memory
                stores accept these values.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether an entry exists for the key. Does not check whether it is intact."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry. Returns whether it existed."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Iterate over all keys. Entries that change meanwhile may or may not be included."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the store's size and counters."""

    def touch(self, key: str) -> bool:
        """Mark an entry as used now. Returns whether it exists and appears intact.

        An entry that appears damaged counts as absent, so that its block is encoded again.
        """
        return key in self

    def mark_used(self, key: str) -> None:
        """Mark an entry as used now, if it exists and the store records uses."""
        if self.records_use:
            self.touch(key)

    def claim(self, key: str, handles: Collection[str]) -> bool:
        """Mark an entry as used now, and add the handles of other texts with the same tokens.

        Such texts share the entry, which ``gc`` keeps as long as one of its handles is live.
        Concurrent claims may lose handles. ``KVStore.claim`` adds no handles. Returns whether the
        entry exists and appears intact.
        """
        return self.touch(key)

    @property
    def sidecar(self) -> Sidecar | None:
        """Small files alongside the entries, such as the passage index. None if not supported."""
        return None


class StoredEntry(NamedTuple):
    """Entry in a store listing."""

    key: str
    nbytes: int  # Size in the store. 0 if the entry's path is not a regular file.
    used_ns: int  # Last recorded use, in nanoseconds since 1970.


class EntryInfo(NamedTuple):
    """Header, size and last use of an entry (``nbytes`` and ``used_ns``: see ``StoredEntry``)."""

    header: Header
    nbytes: int
    used_ns: int

    @property
    def age_s(self) -> float:
        """Seconds since the last use."""
        return age_s(self.used_ns)

    @property
    def handles(self) -> tuple[str, ...]:
        """Handles of the texts that share the entry. Empty if unknown."""
        return split_handles(self.header.handle)


class MaintainedStore(KVStore):
    """Base class of stores that list and describe entries, delete unused ones, and read parts."""

    @abstractmethod
    def entries(self) -> Iterator[StoredEntry]:
        """Iterate over all entries. Those that change meanwhile may or may not be included."""

    @abstractmethod
    def describe(self, key: str) -> EntryInfo | None:
        """Return an entry's header, size and last use, or None. Verifies the header's checksum.

        Raises:
            StoreError: See ``get``.
        """

    def peek(self, key: str) -> BlockKV | None:
        """Read an entry like ``get``, but record no use. Override it if ``get`` records uses."""
        return self.get(key)

    @abstractmethod
    def discard(self, key: str, used_ns: int) -> bool | None:
        """Delete an entry unless it was used or replaced since ``used_ns``. Returns True if it was
        deleted, False if it was used or replaced, None if it no longer existed."""

    @abstractmethod
    def read_parts(
        self, keys: Sequence[str], choose: ChooseHeads, head_bytes: int
    ) -> list[ReadResult]:
        """Read selected heads and layers of entries, verified like complete entries.

        The read counts as a use. The results are as in ``get_many``; a selected part is a block
        with the entry's key.

        Args:
            choose: Function that selects the heads. If it raises a StoreError, that error is the
                result for the entry.
            head_bytes: Number of bytes that a remote store reads first of each entry. It rejects
                entries with a longer header. Ignored by a ``DirectoryStore``.
        """

    def leftovers(self) -> Iterator[Path]:
        """Iterate over the temporary files of running or killed writers."""
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
        if kv is not None and kv.handle:
            joined = joined_handles([*split_handles(kv.handle), *handles])
            self.put(key, replace(kv, handle=joined))
        return kv is not None


def is_damage(answer: object) -> bool:
    """Whether a result is an error that reports an unusable entry, not a failing store."""
    return isinstance(answer, (CorruptEntryError, FingerprintMismatchError))


def age_s(used_ns: int, now_ns: int | None = None) -> float:
    """Return the seconds between a time (nanoseconds since 1970) and now.

    A time in the future comes from a wrong clock, and counts as equally far in the past: a file
    dated a few seconds ahead is new, but a file dated a year ahead must not be kept forever.
    """
    return abs((time.time_ns() if now_ns is None else now_ns) - used_ns) / 1e9


class BlockQuery(Protocol):
    """Block to look up: its token ids, and one key per namespace to search."""

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def ids(self) -> Sequence[int]: ...


def find_blocks(
    queries: Sequence[BlockQuery],
    get_many: Callable[[Sequence[str]], Sequence[ReadResult]],
    outline: Outline,
) -> tuple[list[BlockKV | None], dict[str, StoreError]]:
    """Look up blocks with one batch read of all first keys, then a batch read of the second keys of
    blocks that are still missing, and so on. Returns the block of each query, or None if it is
    missing, and the errors by key: damaged entries, entries of another block, and failed reads."""
    blocks: list[BlockKV | None] = [None] * len(queries)
    errors: dict[str, StoreError] = {}
    for turn in range(max((len(query.keys) for query in queries), default=0)):
        missing = {
            place: query.keys[turn]
            for place, query in enumerate(queries)
            if blocks[place] is None and turn < len(query.keys)
        }
        if not (keys := [*dict.fromkeys(missing.values())]):
            break
        entries = dict(zip(keys, get_many(keys), strict=True))
        for place, key in missing.items():
            entry = entries[key]
            if isinstance(entry, BlockKV):
                try:
                    check_block(entry, key, queries[place].ids, outline)
                    blocks[place] = entry
                except FingerprintMismatchError as error:
                    errors[key] = error
            elif entry is not None:
                errors[key] = entry
    return blocks, errors
