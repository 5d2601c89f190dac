"""Size limits of stores, and LRU eviction to stay within them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from blockattn_rag.store.base import KVStore, MaintainedStore, StoredEntry, age_s

logger = logging.getLogger("blockattn_rag")

_SHARE = 64  # Up to 1/64 of the limit is freed in advance; see SizeBound.
_LOOKS = 3  # Attempts to free space while entries are in use.


def check_max_bytes(max_bytes: int) -> None:
    if not isinstance(max_bytes, int):
        raise TypeError(f"max_bytes must be a number of bytes, found {max_bytes!r}")
    if max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, found {max_bytes}")


class Refusals:
    """Counter of entries that exceed a store's size limit. Logs the first of these entries."""

    def __init__(self, limit: str = "max_bytes") -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0

    def add(self, store: KVStore, nbytes: int) -> None:
        with self._lock:
            self.count += 1
            is_first = self.count == 1
        if is_first:
            logger.warning(
                "A block of %d bytes does not fit in %r, so it is not stored and must be encoded "
                "again for each use; raise %s. Further such blocks are not logged, but counted in "
                "stats().refused",
                nbytes,
                store,
                self._limit,
            )


def _evict(
    store: MaintainedStore, max_bytes: int, *, more_bytes: int = 0, ignored: str = ""
) -> tuple[int, tuple[StoredEntry, ...]]:
    """Delete the least recently used entries until the others take at most ``max_bytes``. If any
    must be deleted, free up to ``more_bytes`` more. Keeps entries used in the meantime. Ignores the
    entry with the key ``ignored``. Returns the remaining size, and the deleted entries."""
    known = [entry for entry in store.entries() if entry.nbytes and entry.key != ignored]
    left, spare = sum(entry.nbytes for entry in known), more_bytes
    deleted: list[StoredEntry] = []
    if left <= max_bytes:
        return left, ()
    now_ns = time.time_ns()
    known.sort(key=lambda entry: -age_s(entry.used_ns, now_ns))
    for entry in known:
        if left <= max_bytes:
            spare -= entry.nbytes
            if spare < 0:
                break
        removed = store.discard(entry.key, entry.used_ns)
        if removed:
            deleted.append(entry)
        if removed is not False:  # The entry is gone.
            left -= entry.nbytes
    return left, tuple(deleted)


class SizeBound:
    """Size limit of a store. Frees space before a write, while the caller holds ``lock``.

    Listing all files for each write would be slow in a large store. A writer lists them again only
    after it has written 1/64 of the limit or used up the free space. It then frees up to 1/64 more
    than it needs. In between, other writers may each exceed the limit by 1/64 or one entry.
    """

    def __init__(self, max_bytes: int) -> None:
        check_max_bytes(max_bytes)
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self.evictions = 0
        self.refusals = Refusals()
        self._room = 0  # Bytes to write before listing the files again.

    def make_room(self, store: MaintainedStore, key: str, nbytes: int) -> None:
        """Evict entries, if needed, to fit an entry of ``nbytes`` (at most ``max_bytes``)."""
        if nbytes > self._room:
            share, most = self.max_bytes // _SHARE, self.max_bytes - nbytes
            for _ in range(_LOOKS):
                left, deleted = _evict(store, most, more_bytes=share, ignored=key)
                self.evictions += len(deleted)
                if left <= most:
                    break
            self._room = nbytes + min(share, most - left)
        self._room -= nbytes


@dataclass(frozen=True, slots=True)
class ShrinkReport:
    """Result of ``shrink``.

    Args:
        left_bytes: Total size of the remaining entries. May exceed the limit if some were in use.
        deleted: Keys of the deleted entries, least recently used first.
        freed_bytes: Total size of the deleted entries.
    """

    left_bytes: int
    deleted: tuple[str, ...]
    freed_bytes: int


def shrink(store: MaintainedStore, max_bytes: int) -> ShrinkReport:
    """Delete the least recently used entries until the others take at most ``max_bytes``.

    To limit the size permanently, use ``DirectoryStore(path, max_bytes=...)``. Deleted blocks are
    encoded again when they are needed. Temporary files, and entries used meanwhile, are kept.

    Raises:
        StoreError: The store cannot be listed, or an entry cannot be deleted.
        TypeError, ValueError: ``max_bytes`` is not a positive integer.
    """
    check_max_bytes(max_bytes)
    left_bytes, deleted = _evict(store, max_bytes)
    freed_bytes = sum(entry.nbytes for entry in deleted)
    return ShrinkReport(left_bytes, tuple(entry.key for entry in deleted), freed_bytes)
