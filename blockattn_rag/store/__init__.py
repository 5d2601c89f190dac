"""Stores of block KV: in memory, on disk, in object stores, in Redis, and several in tiers.

Names are imported when they are first used.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.store.base import (
        BatchStore,
        EntryInfo,
        EntryPart,
        KVStore,
        MaintainedStore,
        RangeStore,
        StoredEntry,
        StoreStats,
        TouchableStore,
    )
    from blockattn_rag.store.directory import DirectoryStore
    from blockattn_rag.store.live import LiveHandles
    from blockattn_rag.store.maintenance import describe_all, gc, shrink, verify
    from blockattn_rag.store.memory import MemoryStore
    from blockattn_rag.store.objects import ObjectStore
    from blockattn_rag.store.redis import RedisStore
    from blockattn_rag.store.reports import GcReport, ShrinkReport, Tally, VerifyReport
    from blockattn_rag.store.tier import TierStats
    from blockattn_rag.store.tiered import TieredStats, TieredStore

DEFAULT_MEMORY_BYTES = 1 << 30
"""Size of the store that an engine makes when none is given: 1 GiB."""

DEFAULT_RESIDENT_BYTES = 1 << 30
"""What an engine keeps ready on the model's device of the blocks that it read: 1 GiB."""

_HOMES = {
    "base": (
        "BatchStore EntryInfo EntryPart KVStore MaintainedStore RangeStore StoreStats StoredEntry "
        "TouchableStore"
    ),
    "directory": "DirectoryStore",
    "live": "LiveHandles",
    "maintenance": "describe_all gc shrink verify",
    "memory": "MemoryStore",
    "objects": "ObjectStore",
    "redis": "RedisStore",
    "reports": "GcReport ShrinkReport Tally VerifyReport",
    "tier": "TierStats",
    "tiered": "TieredStats TieredStore",
}

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "DEFAULT_RESIDENT_BYTES",
    "BatchStore",
    "DirectoryStore",
    "EntryInfo",
    "EntryPart",
    "GcReport",
    "KVStore",
    "LiveHandles",
    "MaintainedStore",
    "MemoryStore",
    "ObjectStore",
    "RangeStore",
    "RedisStore",
    "ShrinkReport",
    "StoreStats",
    "StoredEntry",
    "Tally",
    "TierStats",
    "TieredStats",
    "TieredStore",
    "TouchableStore",
    "VerifyReport",
    "describe_all",
    "gc",
    "open_store",
    "shrink",
    "verify",
]


def open_store(spec: KVStore | str | Path | None) -> KVStore:
    """The store that ``spec`` means.

    Args:
        spec: a store, which is returned; None, for a new ``MemoryStore`` of 1 GiB; or one of

            - a path or ``file:///path``: a ``DirectoryStore`` without limit there (pass
              ``DirectoryStore(path, max_bytes=...)`` for one with a limit)
            - ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``: an
              ``ObjectStore`` (extra ``s3``)
            - ``redis://host:port/database``, or ``rediss://``: a ``RedisStore`` (extra ``redis``),
              which is a cache: see ``TieredStore``
            - ``memory:`` or ``memory:2GiB``: a new ``MemoryStore``

    Raises:
        ImportError: the store needs an extra that is not installed; says which.
        StoreError: the path cannot be used as a store.
        TypeError: ``spec`` is none of these.
        ValueError: it is an address of no known kind, or holds credentials.
    """
    from blockattn_rag.store.base import KVStore
    from blockattn_rag.store.memory import MemoryStore
    from blockattn_rag.store.specs import is_cache, open_spec

    if spec is None:
        return MemoryStore(DEFAULT_MEMORY_BYTES)
    if isinstance(spec, (str, Path)):
        opened = open_spec(spec)
        if is_cache(spec):
            logging.getLogger("blockattn_rag").warning(
                "%r is a cache, which forgets: what it forgot is computed anew. Give it a home for "
                "its entries: TieredStore(%r, 's3://bucket/kv'), or a folder in its place",
                opened,
                str(spec),
            )
        return opened
    if isinstance(spec, KVStore):
        return spec
    raise TypeError(
        f"store must be a KVStore, a path, an address or None, found {type(spec).__name__}"
    )


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
