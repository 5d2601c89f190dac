"""What the engine asks of a KV store."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, TypeGuard, runtime_checkable

from torch import Tensor

from blockattn_rag.errors import FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV, split_handles
from blockattn_rag.store.files import age_s
from blockattn_rag.store.header import Header
from blockattn_rag.store.layout import ByteRange

logger = logging.getLogger("blockattn_rag")

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store. ``evictions`` and ``refused`` count since the store object was made.

    Args:
        entries: blocks held.
        total_bytes: what they take: keys and values in memory, whole files on disk.
        evictions: entries dropped to make room.
        refused: entries not kept because they alone are larger than the store.
    """

    entries: int
    total_bytes: int
    evictions: int = 0
    refused: int = 0


@runtime_checkable
class KVStore(Protocol):
    """A map from store keys (``kv.store_key``) to ``BlockKV``. Safe to use from many threads.

    A store that forgets or collects entries should also have ``touch``: see ``TouchableStore``;
    one that is far away ``get_many``: see ``BatchStore``.
    """

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if there is none.

        Its tensors must not change when the stored entry is replaced, deleted or damaged: they
        lie in memory of their own, or in memory that is never written.

        Raises:
            StoreError: there is an entry and it cannot be used; the message says why.
        """

    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry, whole or not at all; an older one under this key is replaced.

        Raises:
            ValueError: ``key`` is not the ``store_key`` of ``kv``, or ``kv`` is no block's KV.
            StoreError: it cannot be written; the message says where and why.
        """

    def __contains__(self, key: object) -> bool: ...

    def delete(self, key: str) -> bool:
        """Remove an entry; True if there was one."""

    def keys(self) -> Iterator[str]: ...

    def stats(self) -> StoreStats: ...


@runtime_checkable
class TouchableStore(KVStore, Protocol):
    """A ``KVStore`` that can be told that an entry is needed although it is not read now."""

    def touch(self, key: str) -> bool:
        """Mark an entry as used now. True if there is one that looks sound, without reading all
        of it; one that does not look sound counts as absent, so that it is computed anew.
        """


Found: TypeAlias = BlockKV | StoreError | None
"""What a store says to one of many keys: the entry; None where there is none; the StoreError that
``get`` would raise, so that one bad entry does not hide the others."""


@runtime_checkable
class BatchStore(KVStore, Protocol):
    """A ``KVStore`` that answers for many keys faster than for one after the other."""

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key, in order."""


class StoredEntry(NamedTuple):
    """What a listing says of an entry. ``nbytes``: as it is stored; ``used_ns``: when it was last
    used, nanoseconds since 1970, as far as the store knows (see its ``entries``)."""

    key: str
    nbytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What an entry says of itself in its header, and its listing.

    Args:
        nbytes: size of the stored entry.
        used_ns: as ``StoredEntry``.
        age_s: seconds since then.
    """

    key: str
    handle: str
    digest: str
    fingerprint: str
    namespace: str
    kv_dtype: str
    num_tokens: int
    nbytes: int
    used_ns: int
    age_s: float

    @classmethod
    def of(cls, header: Header, nbytes: int, used_ns: int) -> EntryInfo:
        """Of an entry with this header, which takes so many bytes and was last used then."""
        return cls(
            key=header.key,
            handle=header.handle,
            digest=header.digest,
            fingerprint=header.fingerprint,
            namespace=header.namespace,
            kv_dtype=header.kv_dtype,
            num_tokens=header.num_tokens,
            nbytes=nbytes,
            used_ns=used_ns,
            age_s=age_s(used_ns),
        )

    @property
    def handles(self) -> tuple[str, ...]:
        """Handles of the texts that share the entry; none if they are unknown."""
        return split_handles(self.handle)


class EntryPart(NamedTuple):
    """Some bytes of an entry, of which its header alone has been checked.

    Args:
        header: of the entry, found under the key that was asked for.
        places: where the bytes stand in the entry.
        data: the bytes of one place after the other, uint8, in memory of their own.
        source: what they were read from, for messages.
    """

    header: Header
    places: Sequence[ByteRange]
    data: Tensor
    source: str


@runtime_checkable
class RangeStore(KVStore, Protocol):
    """A ``KVStore`` that can read some bytes of an entry, without reading it whole."""

    def read_ranges(
        self,
        keys: Sequence[str],
        wanted: Callable[[Header], Sequence[ByteRange]],
        head_bytes: int,
    ) -> list[EntryPart | StoreError | None]:
        """Bytes of entries: in two requests one after the other, for all keys at once where the
        store is far away. Counts as a use of each.

        Args:
            wanted: which bytes, told by the header. A StoreError that it raises is the answer.
            head_bytes: what is read first. A longer header may be answered by a StoreError;
                wanted bytes that are among the first ones are not read again.

        Returns:
            In the order of the keys: the bytes; None where there is no entry; the StoreError that
            ``get`` would raise because of the header.
        """


@runtime_checkable
class MaintainedStore(KVStore, Protocol):
    """A ``KVStore`` that can be looked after: listed, checked and swept, without holding the names
    of all its entries in memory."""

    def entries(self) -> Iterator[StoredEntry]:
        """All entries, as they are listed. One that goes meanwhile may be missing."""

    def describe(self, key: str) -> EntryInfo | None:
        """What the entry's header says, without reading its tensors; None if there is none.

        Raises:
            StoreError: as ``get``.
        """

    def peek(self, key: str) -> BlockKV | None:
        """As ``get``, but looking at an entry is no use of it."""

    def discard(self, key: str, used_ns: int) -> bool:
        """Delete an entry unless it was used or replaced since ``used_ns``; True if deleted."""


@runtime_checkable
class ResidentStore(KVStore, Protocol):
    """A ``KVStore`` that holds blocks in the memory of this process, ready for a model."""

    def keep(self, key: str, kv: BlockKV) -> None:
        """Hold an entry in memory and nowhere else, if it is not there yet."""


def touch(store: KVStore, key: str) -> bool:
    """Whether a store has an entry to be reused, which is marked as used now if the store can."""
    return store.touch(key) if isinstance(store, TouchableStore) else key in store


def get_or_error(store: KVStore, key: str) -> Found:
    """As ``get``, but a StoreError is returned."""
    try:
        return store.get(key)
    except StoreError as error:
        return error


def get_many(store: KVStore, keys: Sequence[str]) -> list[Found]:
    """What a store says to each of many keys: one call where it has one, else one by one."""
    if isinstance(store, BatchStore):
        return store.get_many(keys)
    return [get_or_error(store, key) for key in keys]


def keep(store: KVStore, key: str, kv: BlockKV) -> None:
    """Hold an entry in memory and nowhere else, if the store holds blocks there."""
    if isinstance(store, ResidentStore):
        store.keep(key, kv)


def check_max_bytes(max_bytes: int) -> None:
    """Refuse a store of no size."""
    if not isinstance(max_bytes, int):
        raise TypeError(f"max_bytes must be a number of bytes, found {max_bytes!r}")
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, found {max_bytes}")


def warn_of_refused(store: KVStore, nbytes: int, limit: str = "max_bytes") -> None:
    """Say, for the first time, that an entry alone is larger than its store's ``limit``."""
    logger.warning(
        "a block of %d bytes does not fit in %r and is not kept, so it is computed anew each "
        "time; raise %s. Further ones are only counted (stats().refused)",
        nbytes,
        store,
        limit,
    )


def is_key(key: object) -> TypeGuard[str]:
    """Whether ``key`` is spelled as a store key: 64 hex digits, lower case."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key_of(key: str, kv: BlockKV) -> None:
    """Refuse to store an entry where it could never be found, or would be taken for another."""
    if key != kv.key:
        raise ValueError(
            f"found the key {key!r}, expected {kv.key!r}: put a block under "
            "store_key(kv.fingerprint, kv.digest)"
        )


def check_found_under(key: str, entry: BlockKV | Header, place: object) -> None:
    """Refuse what lies at ``place``, under ``key``, and is another entry.

    Raises:
        FingerprintMismatchError: its own key is another one.
    """
    if entry.key != key:
        raise FingerprintMismatchError(
            f"{place} holds the entry of another text, model or tenant, whose key is {entry.key} "
            f"(fingerprint {entry.fingerprint!r}); delete it, or put the block anew"
        )
