"""Lookup of blocks that may be stored under one of several keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from blockattn_rag.errors import FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import ReadResult
from blockattn_rag.store.checks import Outline, check_block


class BlockQuery(Protocol):
    """A block to look up: its keys, one for each namespace to search, and its token ids."""

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def ids(self) -> Sequence[int]: ...


class LookupResult(NamedTuple):
    """Result of ``find_blocks``.

    Args:
        errors: Errors of damaged or foreign entries, and of failed reads, by key.
    """

    blocks: list[BlockKV | None]
    errors: dict[str, StoreError]


def find_blocks(
    queries: Sequence[BlockQuery],
    get_many: Callable[[Sequence[str]], Sequence[ReadResult]],
    outline: Outline,
) -> LookupResult:
    """Look blocks up, with one read for the first keys of all blocks, one read for the second keys
    of the blocks that are still missing, and so on.

    A damaged entry is a miss, and so is an entry with another block.
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
