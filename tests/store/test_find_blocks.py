"""Look-ups of blocks under several keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import ReadResult, find_blocks
from tests.store.kvs import make_kv

OWN = [replace(make_kv(f"passage {i}"), namespace="own") for i in range(3)]
SHARED = [replace(kv, namespace="shared") for kv in OWN]


@dataclass(frozen=True)
class Query:
    keys: Sequence[str]
    ids: Sequence[int]


QUERIES = [
    Query((own.key, shared.key), own.token_ids.tolist())
    for own, shared in zip(OWN, SHARED, strict=True)
]


class Entries(dict[str, ReadResult]):
    """Mapping of entries that records the keys of each read."""

    def __init__(self, *blocks: BlockKV, **others: ReadResult) -> None:
        super().__init__({kv.key: kv for kv in blocks} | others)
        self.reads: list[list[str]] = []

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        self.reads.append([*keys])
        return [self.get(key) for key in keys]


def test_each_namespace_is_read_once_for_the_missing_blocks() -> None:
    entries = Entries(OWN[0], SHARED[0], SHARED[1])
    blocks, errors = find_blocks([*QUERIES, QUERIES[0]], entries.get_many, OWN[0].token_outline)
    assert blocks == [OWN[0], SHARED[1], None, OWN[0]]
    assert errors == {}
    assert entries.reads == [[kv.key for kv in OWN], [SHARED[1].key, SHARED[2].key]]
    entries.reads.clear()
    assert find_blocks([], entries.get_many, ()) == ([], {})
    assert entries.reads == []


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (CorruptEntryError("damaged"), CorruptEntryError),
        (StoreError("no answer"), StoreError),
        (OWN[1], FingerprintMismatchError),
        (replace(OWN[0], token_ids=OWN[0].token_ids + 1), FingerprintMismatchError),
        (replace(OWN[0], keys=OWN[0].keys[1:]), FingerprintMismatchError),
    ],
)
def test_unusable_entry_is_a_miss_with_its_error(entry: ReadResult, kind: type[StoreError]) -> None:
    key = OWN[0].key
    for others, expected in (([], None), ([SHARED[0]], SHARED[0])):
        entries = Entries(*others, **{key: entry})
        blocks, errors = find_blocks(QUERIES[:1], entries.get_many, OWN[0].token_outline)
        assert blocks == [expected]
        assert [*errors] == [key]
        assert type(errors[key]) is kind
