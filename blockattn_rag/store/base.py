"""The interface of a KV store, and the values that stores exchange with their users."""

from __future__ import annotations

import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias, TypeGuard

from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV, joined_handles, split_handles
from blockattn_rag.store.checks import check_finite, check_storable
from blockattn_rag.store.format import decode, encode
from blockattn_rag.store.header import FormatError, Header
from blockattn_rag.store.layout import ByteRange

logger = logging.getLogger("blockattn_rag")

_KEY = re.compile(r"[0-9a-f]{64}")

Found: TypeAlias = BlockKV | StoreError | None
"""Answer to one of many keys: the entry; None if there is none; the StoreError that ``get`` would
raise, so that one bad entry does not hide the others."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of one tier since its ``TieredStore`` was made.

    Args:
        name: ``repr`` of the tier's store.
        hits: Entries read.
        read_tokens, read_bytes: Tokens and bytes (keys, values, scales) of the entries read.
        misses: Lookups of absent or damaged entries.
        written: Entries written, including promoted ones.
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
        total_bytes: Bytes of keys and values in memory, or of complete entries elsewhere.
        evictions: Entries evicted since the store object was made.
        refused: Entries not stored because each alone exceeds the size limit.
        tiers: Stats of each tier of a ``TieredStore``, fastest first.
    """

    entries: int
    total_bytes: int
    evictions: int = 0
    refused: int = 0
    tiers: tuple[TierStats, ...] = ()


class KVStore(ABC):
    """Map from store keys (``kv.store_key``) to ``BlockKV``. Safe to use from many threads.

    Subclasses define the abstract methods and ``get``, or ``get_many`` if the store answers many
    keys faster than one after the other. A store that evicts entries also defines ``touch``.
    """

    is_resident: ClassVar[bool] = False
    """Whether blocks are in the memory of this process, ready for a model."""

    def get(self, key: str) -> BlockKV | None:
        """The entry of a key, or None. Counts as a use of it.

        Its tensors do not change when the entry is replaced, deleted or damaged later.

        Raises:
            CorruptEntryError: The entry is damaged, truncated, or of another format version.
            FingerprintMismatchError: The entry belongs to another text, model or tenant.
            StoreError: The entry cannot be read, or not before the deadline.
        """
        (found,) = self.get_many([key])
        if isinstance(found, StoreError):
            raise found
        return found

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key, in order. Errors are returned."""
        return [self._found(key) for key in keys]

    @abstractmethod
    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry completely or not at all, in place of an older one under this key.

        Raises:
            ValueError: ``key`` is not the ``store_key`` of ``kv``, or ``kv`` is malformed.
            StoreError: It cannot be written, or would be stored outside of this process and
                contains NaN or infinity.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether there is an entry. ``get`` checks its content."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry. Returns whether there was one."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Keys of all entries. Entries that change meanwhile may be missing."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Size and counters."""

    def touch(self, key: str) -> bool:
        """Mark an entry as used now. Returns whether there is one that looks intact.

        One that does not look intact counts as absent, so that it is computed again.
        """
        return key in self

    def mark_used(self, key: str) -> None:
        """Mark an entry as used now, without a report."""
        self.touch(key)

    def claim(self, key: str, handles: Collection[str]) -> bool:
        """Mark an entry as used now and as shared by the texts with these handles.

        Texts of equal tokens share an entry, and ``gc`` keeps it while one of its handles is
        live. Two concurrent claims may lose one of the two, which costs a computation.

        Returns:
            Whether there is an entry that looks intact.
        """
        return self.touch(key)

    def keep(self, key: str, kv: BlockKV) -> None:  # noqa: B027 - not every store is in memory
        """Hold an entry in memory only. Does nothing in stores that are not in memory."""

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Stats of each tier, fastest first, without a request. Empty for a store without tiers."""
        return ()

    def _found(self, key: str) -> Found:
        try:
            return self.get(key)
        except StoreError as error:
            return error


class StoredEntry(NamedTuple):
    """Listing of an entry.

    Args:
        nbytes: Size of the stored entry.
        used_ns: Time of the last use, nanoseconds since 1970, as far as the store records it.
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


class EntryPart(NamedTuple):
    """Some bytes of an entry. Only its header has been checked.

    Args:
        header: Header of the entry.
        places: Byte ranges of the entry.
        data: Bytes of all places, one after the other, uint8, in memory of their own.
        source: Name of the entry for messages.
    """

    header: Header
    places: Sequence[ByteRange]
    data: Tensor
    source: str


class MaintainedStore(KVStore):
    """``KVStore`` of encoded entries that can be listed, described, swept, and read in part."""

    @abstractmethod
    def entries(self) -> Iterator[StoredEntry]:
        """All entries. Entries that change meanwhile may be missing."""

    @abstractmethod
    def describe(self, key: str) -> EntryInfo | None:
        """Header of an entry, checked by its own checksum, or None.

        Raises:
            StoreError: As ``get``.
        """

    @abstractmethod
    def peek(self, key: str) -> BlockKV | None:
        """As ``get``, but does not count as a use."""

    @abstractmethod
    def discard(self, key: str, used_ns: int) -> bool:
        """Delete an entry unless it was used or replaced since ``used_ns``.

        Returns:
            Whether it was deleted.
        """

    @abstractmethod
    def read_ranges(
        self,
        keys: Sequence[str],
        wanted: Callable[[Header], Sequence[ByteRange]],
        head_bytes: int,
    ) -> list[EntryPart | StoreError | None]:
        """Read byte ranges of entries. A remote store makes two requests for each, all at once.

        Counts as a use.

        Args:
            wanted: Selects the byte ranges by the header. A StoreError that it raises is returned.
            head_bytes: Bytes read with the header. Ranges within are not read again. A remote
                store refuses longer headers.

        Returns:
            In the order of the keys: the bytes; None if there is no entry; the StoreError that
            ``get`` would raise because of the header.
        """

    def listed(self) -> Iterator[tuple[str, int | None]]:
        """Keys and times of use of everything with the name of an entry. None: not a file."""
        return ((entry.key, entry.used_ns) for entry in self.entries())

    def leftovers(self) -> Iterator[Path]:
        """Temporary files of running writers and of killed ones."""
        return iter(())

    def claim(self, key: str, handles: Collection[str]) -> bool:
        try:
            info = self.describe(key)
            if info is None or not info.handles or set(handles) <= set(info.handles):
                return info is not None
            kv = self.peek(key)
        except (CorruptEntryError, FingerprintMismatchError):
            return False
        if kv is None:
            return False
        self.put(key, with_handles(kv, handles))
        return True


def with_handles(kv: BlockKV, handles: Collection[str]) -> BlockKV:
    """A block that is also shared by the texts with these handles."""
    if not kv.handle:  # its texts are unknown
        return kv
    return replace(kv, handle=joined_handles([*split_handles(kv.handle), *handles]))


def is_damage(answer: object) -> bool:
    """Whether an answer of a store is due to one bad entry rather than to the store."""
    return isinstance(answer, (CorruptEntryError, FingerprintMismatchError))


def age_s(used_ns: int, now_ns: int | None = None) -> float:
    """Seconds between a time (nanoseconds since 1970) and now.

    A time in the future comes from a wrong clock and counts by its distance: a few seconds between
    machines mean that the file is new, a year must not keep it.
    """
    return abs((time.time_ns() if now_ns is None else now_ns) - used_ns) / 1e9


def check_max_bytes(max_bytes: int) -> None:
    """Raise if a size limit is not a positive integer."""
    if not isinstance(max_bytes, int):
        raise TypeError(f"max_bytes must be a number of bytes, found {max_bytes!r}")
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, found {max_bytes}")


def warn_of_refused(store: KVStore, nbytes: int, limit: str = "max_bytes") -> None:
    """Log that an entry alone exceeds its store's ``limit``."""
    logger.warning(
        "a block of %d bytes does not fit in %r and is not stored, so it is computed again each "
        "time; raise %s. Further ones are only counted (stats().refused)",
        nbytes,
        store,
        limit,
    )


def is_key(key: object) -> TypeGuard[str]:
    """Whether ``key`` has the form of a store key: 64 lower-case hex digits."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """The key, unchanged.

    Raises:
        ValueError: It does not have the form of a store key.
    """
    if not is_key(key):
        raise ValueError(f"a store key is 64 hex digits (kv.store_key), found {key!r}")
    return key


def check_entry(key: str, kv: BlockKV) -> None:
    """Raise ValueError if ``kv`` is malformed or does not belong under ``key``."""
    if key != kv.key:
        raise ValueError(
            f"found the key {key!r}, expected {kv.key!r}: put a block under "
            "store_key(kv.fingerprint, kv.digest)"
        )
    check_storable(kv)


def check_found_under(key: str, entry: BlockKV | Header, place: object) -> None:
    """Raise FingerprintMismatchError if the entry at ``place``, under ``key``, has another key."""
    if entry.key != key:
        raise FingerprintMismatchError(
            f"{place} holds the entry of another text, model or tenant, whose key is {entry.key} "
            f"(fingerprint {entry.fingerprint!r}); delete it, or put the block again"
        )


def encoded(key: str, kv: BlockKV, place: object) -> list[memoryview]:
    """Buffers of the entry to write at ``place``.

    Raises:
        ValueError: As ``KVStore.put``.
        StoreError: The block contains NaN or infinity.
    """
    check_entry(key, kv)
    check_finite(kv, place)
    return encode(kv)


def decoded(key: str, raw: Tensor, place: object) -> BlockKV:
    """The entry of ``key`` in bytes read from ``place``, uint8 ``[size]``.

    Raises:
        CorruptEntryError: The bytes are damaged, or of another format version.
        FingerprintMismatchError: They are the entry of another key.
    """
    with damage_reported(place):
        kv = decode(raw)
    check_found_under(key, kv, place)
    return kv


@contextmanager
def damage_reported(place: object) -> Iterator[None]:
    """Turn a FormatError into a CorruptEntryError that names the place of the entry."""
    try:
        yield
    except FormatError as error:
        raise CorruptEntryError(
            f"{place} is damaged: {error}; delete it, or put the block again"
        ) from error
