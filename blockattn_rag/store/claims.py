"""Entries that several texts share: an ingestion claims what it finds, so that ``gc`` keeps it.

An entry is stored under a key of its tokens, and names the text that these were made of. Texts of
equal tokens share it: a passage with and without a template around it, or in two Unicode forms. The
entry is live as long as one of them is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol, runtime_checkable

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError
from blockattn_rag.kv.block_kv import BlockKV, joined_handles, split_handles
from blockattn_rag.store.base import KVStore, MaintainedStore, touch
from blockattn_rag.store.objects import ObjectStore


@runtime_checkable
class ClaimableStore(KVStore, Protocol):
    """A ``KVStore`` made of others, one of which ``gc`` judges."""

    def claim(self, key: str, handles: Collection[str]) -> bool:
        """As the function ``claim``."""


def claim(store: KVStore, key: str, handles: Collection[str]) -> bool:
    """Mark an entry as used now and, where ``gc`` can judge the store, as used by these texts.

    Two processes that claim one entry at the same moment may lose one of the claims: the entry may
    then be deleted, which costs one computation.

    Args:
        handles: of texts whose tokens the entry holds.

    Returns:
        Whether there is an entry that looks sound.

    Raises:
        StoreError: the entry cannot be written, or the store does not answer.
    """
    if isinstance(store, ClaimableStore):
        return store.claim(key, handles)
    if not isinstance(store, MaintainedStore):
        return touch(store, key)
    # An object store does not record use: touching it would be a second look at the header.
    if not isinstance(store, ObjectStore) and not touch(store, key):
        return False
    try:
        info = store.describe(key)
        if info is None or not info.handles or set(handles) <= set(info.handles):
            return info is not None
        kv = store.peek(key)
    except (CorruptEntryError, FingerprintMismatchError):
        return False
    if kv is None:
        return False
    store.put(key, claimed(kv, handles))
    return True


def claimed(kv: BlockKV, handles: Collection[str]) -> BlockKV:
    """An entry that serves these texts too."""
    if not kv.handle:  # it serves texts that nobody knows
        return kv
    return replace(kv, handle=joined_handles([*split_handles(kv.handle), *handles]))
