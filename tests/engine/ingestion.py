"""A store that fails on demand, and functions that ingest and look up in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockattn_rag.engine.fetcher import BlockFetcher, Fetched
from blockattn_rag.engine.ingest import EncodeStats, precompute
from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.store import MemoryStore


class FaultyStore(MemoryStore):
    """In-memory store that fails on demand."""

    def __init__(self) -> None:
        super().__init__(1 << 26)
        self.corrupt: set[str] = set()
        self.full_after: int | None = None
        self.swapped: BlockKV | None = None
        self.puts = 0

    def get(self, key: str) -> BlockKV | None:
        if key in self.corrupt:
            raise CorruptEntryError(f"entry {key[:8]} is damaged")
        found = super().get(key)
        return self.swapped if found is not None and self.swapped is not None else found

    def put(self, key: str, kv: BlockKV) -> None:
        if self.full_after is not None and self.puts >= self.full_after:
            raise StoreError("no space left")
        self.puts += 1
        super().put(key, kv)
        self.corrupt.discard(key)


def ingest(fetcher: BlockFetcher, blocks: Sequence[Block], **options: Any) -> EncodeStats:
    """Run ``precompute`` in the calling thread."""
    return precompute(fetcher, blocks, run=lambda work: work(), **options)


def fetch(fetcher: BlockFetcher, context: Sequence[Block], **options: Any) -> Fetched:
    """Look up the blocks of the context of a prompt."""
    return fetcher.fetch(fetcher.specs(context, as_prompt=True, **options))
