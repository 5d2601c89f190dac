"""Blocks in a database's own store that none of its passages uses."""

from __future__ import annotations

from dataclasses import dataclass

from blockattn_rag.adapters.handles import handles_in
from blockattn_rag.app.rag.database import Database

_FEW = 8
"""Entries that every database may have besides its passages, such as the prompt's head."""


@dataclass(frozen=True, slots=True)
class Unused:
    """Entries that ``store gc --grace 0s`` would delete, and bytes of these and of all."""

    entries: int
    nbytes: int
    total_bytes: int


def unused_entries(database: Database) -> Unused | None:
    """Count the entries that no passage refers to; None if there are hardly any.

    A store that the database may share with others, or that a server has, is left alone.
    """
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.store import DirectoryStore, LiveHandles, gc
    from blockattn_rag.store.live import is_handle

    engine, manifest = database.engine, database.manifest
    store = engine.store if isinstance(engine, BlockAttentionEngine) else None
    if manifest.store is not None or not isinstance(store, DirectoryStore):
        return None
    collections = database.client.list_collections()
    live = LiveHandles(filter(is_handle, handles_in(collections)))
    stats = store.stats()
    if stats.entries <= len(live) + _FEW:
        return None
    found = gc(store, live, grace_s=0, namespaces={manifest.namespace}, dry_run=True)
    if found.deleted.count <= _FEW:
        return None
    return Unused(found.deleted.count, found.freed_bytes, stats.total_bytes)
