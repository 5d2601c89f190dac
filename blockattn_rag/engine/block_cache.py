"""In-memory cache of recently used blocks, in front of a store."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

from blockattn_rag.errors import StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import KVStore, ReadResult
from blockattn_rag.store.memory import MemoryStore

logger = logging.getLogger("blockattn_rag")

_REPORT_EVERY_S = 60.0
_MOST_TIMES = 1 << 16


class BlockCache:
    """Reads and writes a store's blocks, and keeps the most recently used blocks in memory.

    A cached block is not read again, so its file is only verified once. ``keep`` replaces a cached
    block with a copy on the model's device. Blocks of a ``MemoryStore`` are not cached, because
    they are already in memory, unless ``read_only`` requires leaving this store unchanged.
    """

    def __init__(self, store: KVStore, max_bytes: int, *, read_only: bool = False) -> None:
        if max_bytes < 0:
            raise ValueError(f"Invalid resident_bytes {max_bytes}: expected 0 or more")
        self._store = store
        is_in_memory = isinstance(store, MemoryStore) and not read_only
        self._cached = None if is_in_memory else MemoryStore(max(1, max_bytes))
        self._reported_s: dict[str, float] = {}  # Time of each block's last reported use.
        self._failed_s = -math.inf  # Time of the last failed report.

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        if self._cached is None:
            return self._store.get_many(keys)
        entries: dict[str, ReadResult] = {key: self._cached.get(key) for key in keys}
        for key, kv in entries.items():
            if kv is not None:
                self._report_use(key)
        if absent := [key for key, kv in entries.items() if kv is None]:
            entries.update(zip(absent, self._store.get_many(absent), strict=True))
            for key in absent:
                if isinstance(kv := entries[key], BlockKV):
                    with suppress(ValueError):  # The caller rejects invalid blocks.
                        self.keep(key, kv)
                        self._note_use(key)
        return [entries[key] for key in keys]

    def put(self, key: str, kv: BlockKV) -> None:
        """Cache and store a block. It stays cached even if the store rejects it."""
        if self._cached is not None:
            self.keep(key, kv)
            self._note_use(key)
        self._store.put(key, kv)

    def keep(self, key: str, kv: BlockKV) -> None:
        """Cache a block without storing it. A block in a ``MemoryStore`` is not replaced."""
        if self._cached is None:
            if key not in self._store:
                self._store.put(key, kv)
        elif kv.nbytes <= self._cached.max_bytes:
            self._cached.put(key, kv)

    def _note_use(self, key: str) -> None:
        if len(self._reported_s) >= _MOST_TIMES:
            self._reported_s.clear()
        self._reported_s[key] = time.monotonic()

    def _report_use(self, key: str) -> None:
        """Report a block's use at most once a minute, because stores with LRU eviction would evict
        blocks that are only read from this cache. After a failure, nothing is reported for a
        minute, so that answers do not wait for a store that hangs."""
        now_s = time.monotonic()
        last_s = max(self._reported_s.get(key, -math.inf), self._failed_s)
        if now_s - last_s < _REPORT_EVERY_S:
            return
        self._note_use(key)
        try:
            self._store.mark_used(key)
        except StoreUnavailableError:  # The store has already logged and counted the failure.
            self._failed_s = now_s
        except StoreError as error:
            self._failed_s = now_s
            logger.warning("%s. The answer is not affected.", error)
