"""Cache in front of a store, which keeps recently used blocks ready for later answers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

from blockattn_rag.errors import StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import Found, KVStore, StoreStats
from blockattn_rag.store.memory import MemoryStore

logger = logging.getLogger("blockattn_rag")

_TOUCH_EVERY_S = 60.0
_MOST_TIMES = 1 << 16


def with_device_cache(store: KVStore, resident_bytes: int) -> KVStore:
    """Put a ``DeviceCache`` of ``resident_bytes`` in front of a store.

    Returns:
        The cache; or the store itself if it is in memory or ``resident_bytes`` is 0.

    Raises:
        ValueError: ``resident_bytes`` is negative.
    """
    if resident_bytes < 0:
        raise ValueError(f"resident_bytes must be 0 or more, found {resident_bytes}")
    if resident_bytes == 0 or store.is_resident:
        return store
    return DeviceCache(store, resident_bytes)


class DeviceCache(KVStore):
    """Cache in memory of the most recently used blocks of another store.

    A block stays as it was read until ``keep`` replaces it with its copy on the model's device. A
    cached block is not read again, so its file is verified once.

    Args:
        store: The store to read from and to write to.
        max_bytes: Size limit of the cached keys and values. Larger blocks are not cached.
    """

    is_resident = True

    def __init__(self, store: KVStore, max_bytes: int) -> None:
        self._store = store
        self._kept = MemoryStore(max_bytes)
        self._used_s: dict[str, float] = {}  # last use of each block that the store recorded
        self._failed_s = -math.inf  # last failure to report a use

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """Read several entries. One call to the store reads the ones that are not cached."""
        found: dict[str, Found] = {key: self._resident(key) for key in keys}
        if absent := [key for key, kv in found.items() if kv is None]:
            found.update(zip(absent, self._read(absent), strict=True))
        return [found[key] for key in keys]

    def _resident(self, key: str) -> BlockKV | None:
        kv = self._kept.get(key)
        if kv is not None:
            self._report_use(key)
        return kv

    def _read(self, keys: Sequence[str]) -> list[Found]:
        """Read entries from the store, and cache them."""
        answers = self._store.get_many(keys)
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, BlockKV):
                with suppress(ValueError):  # a wrong block, which the caller rejects
                    self.keep(key, answer)
                    self._note_use(key)
        return answers

    def put(self, key: str, kv: BlockKV) -> None:
        """Cache a block and store it. If the store rejects the block, it stays cached."""
        self.keep(key, kv)
        self._note_use(key)
        self._store.put(key, kv)

    def keep(self, key: str, kv: BlockKV) -> None:
        """Cache a block without storing it, replacing any cached copy."""
        if kv.nbytes <= self._kept.max_bytes:
            self._kept.put(key, kv)

    def touch(self, key: str) -> bool:
        return self._store.touch(key)

    def claim(self, key: str, handles: Collection[str]) -> bool:
        return self._store.claim(key, handles)

    def __contains__(self, key: object) -> bool:
        return key in self._store

    def delete(self, key: str) -> bool:
        self._kept.delete(key)
        return self._store.delete(key)

    def keys(self) -> Iterator[str]:
        return self._store.keys()

    def stats(self) -> StoreStats:
        """Stats of the store, without the cache."""
        return self._store.stats()

    def _note_use(self, key: str) -> None:
        if len(self._used_s) >= _MOST_TIMES:
            self._used_s.clear()
        self._used_s[key] = time.monotonic()

    def _report_use(self, key: str) -> None:
        """Report a use to the store, at most once a minute per block. Without reports, a store that
        evicts the least recently used blocks would evict cached ones, which it never has to read.

        After a failure, nothing is reported for a minute, so that an answer from cached blocks does
        not wait for a store that hangs.
        """
        now_s = time.monotonic()
        last_s = max(self._used_s.get(key, -math.inf), self._failed_s)
        if now_s - last_s < _TOUCH_EVERY_S:
            return
        self._note_use(key)
        try:
            self._store.mark_used(key)
        except StoreUnavailableError:  # logged and counted when the store failed
            self._failed_s = now_s
        except StoreError as error:
            self._failed_s = now_s
            logger.warning("%s. The answer is not affected.", error)
