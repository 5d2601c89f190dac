"""What the engine asks of a KV store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from blockattn_rag.kv import BlockKV


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store. ``evictions`` counts since the store object was made."""

    entries: int
    total_bytes: int
    evictions: int = 0


@runtime_checkable
class KVStore(Protocol):
    """A map from store keys (``kv.store_key``) to ``BlockKV``. Safe to use from many threads."""

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if there is none.

        Raises:
            StoreError: there is an entry and it cannot be used; the message says why.
        """
        ...

    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry, whole or not at all; an older one under this key is replaced."""
        ...

    def __contains__(self, key: object) -> bool: ...

    def delete(self, key: str) -> bool:
        """Remove an entry; True if there was one."""
        ...

    def keys(self) -> Iterator[str]: ...

    def stats(self) -> StoreStats: ...
