"""Stores for the keys and values of blocks: memory, disk, object storage, Redis, and tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.store.base import (
        EntryInfo,
        KVStore,
        MaintainedStore,
        StoredEntry,
        StoreStats,
        TierStats,
    )
    from blockattn_rag.store.directory import DirectoryStore
    from blockattn_rag.store.eviction import ShrinkReport, shrink
    from blockattn_rag.store.maintenance import (
        GcReport,
        Tally,
        VerifyReport,
        describe_all,
        gc,
        verify,
    )
    from blockattn_rag.store.memory import MemoryStore
    from blockattn_rag.store.objects import ObjectStore
    from blockattn_rag.store.opening import DEFAULT_MEMORY_BYTES, open_store
    from blockattn_rag.store.redis import RedisStore
    from blockattn_rag.store.tiered import TieredStore

DEFAULT_RESIDENT_BYTES = 1 << 30
"""Default size of an engine's block cache on the model's device: 1 GiB."""

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "DEFAULT_RESIDENT_BYTES",
    "DirectoryStore",
    "EntryInfo",
    "GcReport",
    "KVStore",
    "MaintainedStore",
    "MemoryStore",
    "ObjectStore",
    "RedisStore",
    "ShrinkReport",
    "StoreStats",
    "StoredEntry",
    "Tally",
    "TierStats",
    "TieredStore",
    "VerifyReport",
    "describe_all",
    "gc",
    "open_store",
    "shrink",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__)
