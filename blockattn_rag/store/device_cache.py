"""A cache in front of a store: blocks that were read stay ready for the next answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from blockattn_rag.errors import StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import Found, KVStore, ResidentStore, StoreStats, get_many, touch
from blockattn_rag.store.memory import MemoryStore
from blockattn_rag.store.single_flight import SingleFlight
from blockattn_rag.store.tiered import mark_used

logger = logging.getLogger("blockattn_rag")

MOST_READ_S = 60.0
"""How long one thread waits for another's read of the same block."""

_TOUCH_EVERY_S = 60.0
_MOST_TIMES = 1 << 16


def with_device_cache(store: KVStore, resident_bytes: int) -> KVStore:
    """The store behind a ``DeviceCache`` of ``resident_bytes``.

    The store itself where it needs no cache, because it holds blocks where they were computed, and
    for 0 bytes.

    Raises:
        ValueError: ``resident_bytes`` is negative.
    """
    if resident_bytes < 0:
        raise ValueError(f"resident_bytes must be 0 or more, found {resident_bytes}")
    needs_none = resident_bytes == 0 or isinstance(store, ResidentStore)
    return store if needs_none else DeviceCache(store, resident_bytes)


class DeviceCache:
    """``KVStore`` that keeps blocks of another store in memory, the most recently used ones.

    A block that was read from the store stays as it was read, until ``keep`` replaces it by its
    copy on the model's device. A block that is kept is not read again, and so its file is checked
    once. A block larger than the cache is not kept. Threads that need a block at once, such as an
    answer and the prefetch before it, read it once.

    Args:
        store: the store to read from and to write to.
        max_bytes: keys and values kept at most.
    """

    def __init__(self, store: KVStore, max_bytes: int) -> None:
        self._store = store
        self._kept = MemoryStore(max_bytes)
        self._flights = SingleFlight()
        self._used_s: dict[str, float] = {}  # when the store last learned of a block's use
        self._failed_s = -math.inf  # when it could not be told

    def get(self, key: str) -> BlockKV | None:
        """The block, from memory or else from the store."""
        (found,) = self.get_many([key])
        if isinstance(found, StoreError):
            raise found
        return found

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key; the store is asked once, for all that are not in memory and
        that no other thread is reading."""
        found: dict[str, Found] = {key: self._resident(key) for key in keys}
        absent = [key for key, kv in found.items() if kv is None]
        found.update(zip(absent, self._flights.read(absent, self._read, MOST_READ_S), strict=True))
        return [found[key] for key in keys]

    def _resident(self, key: str) -> BlockKV | None:
        kv = self._kept.get(key)
        if kv is not None:
            self._tell_of_use(key)
        return kv

    def _read(self, keys: Sequence[str]) -> list[Found]:
        """What the store says; blocks are kept."""
        answers = get_many(self._store, keys)
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, BlockKV):
                with suppress(ValueError):  # not the block of this key: the caller's to judge
                    self.keep(key, answer)
                    self._note_use(key)
        return answers

    def put(self, key: str, kv: BlockKV) -> None:
        """Keep a block and store it.

        Raises:
            StoreError: as the store's own ``put``; the block is kept all the same.
        """
        self._flights.forget(key)
        self.keep(key, kv)
        self._note_use(key)
        self._store.put(key, kv)

    def keep(self, key: str, kv: BlockKV) -> None:
        """Keep a block without storing it; a copy that is kept already is replaced."""
        if kv.nbytes <= self._kept.max_bytes:
            self._kept.put(key, kv)

    def touch(self, key: str) -> bool:
        return touch(self._store, key)

    def __contains__(self, key: object) -> bool:
        return key in self._store

    def delete(self, key: str) -> bool:
        self._flights.forget(key)
        self._kept.delete(key)
        return self._store.delete(key)

    def keys(self) -> Iterator[str]:
        return self._store.keys()

    def stats(self) -> StoreStats:
        """Figures of the store alone."""
        return self._store.stats()

    def _note_use(self, key: str) -> None:
        if len(self._used_s) >= _MOST_TIMES:
            self._used_s.clear()
        self._used_s[key] = time.monotonic()

    def _tell_of_use(self, key: str) -> None:
        """Tell the store once in a while, because a store that forgets what was not used for the
        longest time would forget the blocks that are used most, and so never read.

        After a failure it is told of nothing for a while: an answer that has its blocks in memory
        must not wait for a store that hangs, once for each of them.
        """
        now_s = time.monotonic()
        last_s = max(self._used_s.get(key, -math.inf), self._failed_s)
        if now_s - last_s < _TOUCH_EVERY_S:
            return
        self._note_use(key)
        try:
            mark_used(self._store, key)
        except StoreUnavailableError:  # told when the store failed, and counted there
            self._failed_s = now_s
        except StoreError as error:
            self._failed_s = now_s
            logger.warning("%s. The answer is not affected.", error)
