"""The store of a repair, which reads blocks of a database and writes to another folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, StoreStats
from blockattn_rag.store.base import Found


class ReadThroughStore(KVStore):
    """Store that writes to its own folder, and reads missing blocks from a lender.

    A repair can thus use the blocks of a database without adding any. Blocks in int8 are not read
    from the lender, because an adapter must not be fitted to rounded blocks.

    Args:
        path: Folder of the store.
        max_bytes: Maximum size of the folder in bytes.
        lender: Store to read missing blocks from, if any.
    """

    def __init__(self, path: Path, max_bytes: int, lender: KVStore | None) -> None:
        # Not flushed to disk, because blocks lost in a power failure are computed again.
        self._own = DirectoryStore(path, max_bytes=max_bytes, fsync=False)
        self._lender = lender

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """Get the block of each key, like ``get``."""
        found = self._own.get_many(keys)
        missing = [key for key, kv in zip(keys, found, strict=True) if kv is None]
        if missing and self._lender is not None:
            lent = dict(zip(missing, self._lender.get_many(missing), strict=True))
            pairs = zip(keys, found, strict=True)
            found = [_unrounded(lent.get(key)) if kv is None else kv for key, kv in pairs]
        return found

    def put(self, key: str, kv: BlockKV) -> None:
        self._own.put(key, kv)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def delete(self, key: str) -> bool:
        return self._own.delete(key)

    def keys(self) -> Iterator[str]:
        return self._own.keys()

    def stats(self) -> StoreStats:
        return self._own.stats()


def _unrounded(found: Found) -> Found:
    """Replace a block in int8 with None."""
    is_rounded = isinstance(found, BlockKV) and found.scales is not None
    return None if is_rounded else found
