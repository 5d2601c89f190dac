"""The store of a repair, which reads a database's blocks and writes its own elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, StoreStats
from blockattn_rag.store.base import Found


class ReadThroughStore(KVStore):
    """Store that reads missing blocks from a lender and writes only to a folder of its own.

    So a repair uses a database's blocks and adds none to it. Blocks in int8 are not read, because
    an adapter is not fitted to rounded ones.

    Args:
        path: The folder.
        max_bytes: Most bytes in it.
        lender: The store to read from, if any.
    """

    def __init__(self, path: Path, max_bytes: int, lender: KVStore | None) -> None:
        # Not flushed to the disk: what a power failure loses is computed again.
        self._own = DirectoryStore(path, max_bytes=max_bytes, fsync=False)
        self._lender = lender

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key."""
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
    """What a store returned, with None in place of a block in int8."""
    is_rounded = isinstance(found, BlockKV) and found.scales is not None
    return None if is_rounded else found
