"""Lookup of blocks under several candidate keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

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


class LookupResult(NamedTuple):
    """Result of ``find_blocks``.

    Args:
        errors: Errors by key: damaged entries, entries of another block, and failed reads.
    """

    blocks: list[BlockKV | None]
    errors: dict[str, StoreError]


def find_blocks(
    queries: Sequence[BlockQuery],
    get_many: Callable[[Sequence[str]], Sequence[ReadResult]],
    outline: Outline,
) -> LookupResult:
    """Look up blocks with one batch read of all first keys, then one of the second keys of the
    blocks that are still missing, and so on.

    Damaged entries, and entries that contain another block, count as misses.
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
    return LookupResult(blocks, errors)
