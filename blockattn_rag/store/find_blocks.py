"""Lookup of blocks under several candidate keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from blockattn_rag.errors import FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import ReadResult
from blockattn_rag.store.checks import Outline, check_block


class BlockQuery(Protocol):
    """Block to look up: its token ids, and one key per namespace to search."""

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def ids(self) -> Sequence[int]: ...


def find_blocks(
    queries: Sequence[BlockQuery],
    get_many: Callable[[Sequence[str]], Sequence[ReadResult]],
    outline: Outline,
) -> tuple[list[BlockKV | None], dict[str, StoreError]]:
    """Look up blocks with one batch read of all first keys, then one of the second keys of the
    blocks that are still missing, and so on.

    Returns:
        The blocks, and errors by key: damaged entries, entries of another block, and failed reads.
    """
    blocks: list[BlockKV | None] = [None] * len(queries)
    errors: dict[str, StoreError] = {}
    for turn in range(max((len(query.keys) for query in queries), default=0)):
        missing = {
            place: query.keys[turn]
            for place, query in enumerate(queries)
            if blocks[place] is None and turn < len(query.keys)
        }
        if not (keys := [*dict.fromkeys(missing.values())]):
            break
        entries = dict(zip(keys, get_many(keys), strict=True))
        for place, key in missing.items():
            entry = entries[key]
            if isinstance(entry, BlockKV):
                try:
                    check_block(entry, key, queries[place].ids, outline)
                    blocks[place] = entry
                except FingerprintMismatchError as error:
                    errors[key] = error
            elif entry is not None:
                errors[key] = entry
    return blocks, errors
