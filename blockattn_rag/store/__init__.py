"""Stores of block KV: in memory, and on disk. Names are imported when they are first used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

if TYPE_CHECKING:
    from blockattn_rag.store.base import (
        BatchStore,
        EntryInfo,
        KVStore,
        MaintainedStore,
        StoredEntry,
        StoreStats,
        TouchableStore,
    )
    from blockattn_rag.store.directory import DirectoryStore
    from blockattn_rag.store.maintenance import (
        GcReport,
        ShrinkReport,
        VerifyReport,
        gc,
        shrink,
        verify,
    )
    from blockattn_rag.store.memory import MemoryStore

DEFAULT_MEMORY_BYTES = 1 << 30
"""Size of the store that an engine makes when none is given: 1 GiB."""

DEFAULT_RESIDENT_BYTES = 1 << 30
"""What an engine keeps ready on the model's device of the blocks that it read: 1 GiB."""

_HOMES = {
    "base": "BatchStore EntryInfo KVStore MaintainedStore StoreStats StoredEntry TouchableStore",
    "directory": "DirectoryStore",
    "maintenance": "GcReport ShrinkReport VerifyReport gc shrink verify",
    "memory": "MemoryStore",
}

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "DEFAULT_RESIDENT_BYTES",
    "BatchStore",
    "DirectoryStore",
    "EntryInfo",
    "GcReport",
    "KVStore",
    "MaintainedStore",
    "MemoryStore",
    "ShrinkReport",
    "StoreStats",
    "StoredEntry",
    "TouchableStore",
    "VerifyReport",
    "gc",
    "open_store",
    "shrink",
    "verify",
]


def open_store(spec: KVStore | str | Path | None) -> KVStore:
    """The store that ``spec`` means.

    Args:
        spec: a store, which is returned; a path, for a ``DirectoryStore`` without limit there (pass
            ``DirectoryStore(path, max_bytes=...)`` for one with a limit); None, for a new
            ``MemoryStore`` of 1 GiB.

    Raises:
        StoreError: the path cannot be used as a store.
        TypeError: ``spec`` is none of these.
    """
    from blockattn_rag.store.base import KVStore
    from blockattn_rag.store.directory import DirectoryStore
    from blockattn_rag.store.memory import MemoryStore

    if spec is None:
        return MemoryStore(DEFAULT_MEMORY_BYTES)
    if isinstance(spec, (str, Path)):
        return DirectoryStore(spec)
    if isinstance(spec, KVStore):
        return spec
    raise TypeError(f"store must be a KVStore, a path or None, found {type(spec).__name__}")


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
