"""Ingestion: statistics, interruptions, and entries shared by several texts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from blockattn_rag.engine.fetcher import BlockFetcher, BlockSpec
from blockattn_rag.engine.ingest import precompute
from blockattn_rag.errors import ContextOverflowError, StoreError
from blockattn_rag.kv.block_kv import MOST_HANDLES, BlockKV
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockTemplate
from blockattn_rag.store import DirectoryStore, KVStore, ObjectStore, TieredStore, gc
from tests.engine.ingestion import FaultyStore, ingest
from tests.store.conftest import objects_in_memory

A, B, C = Block("first passage"), Block("second"), Block("third", BlockTemplate("- ", "\n"))

Batch = list[tuple[BlockSpec, BlockKV]]


def test_precompute_reports_statistics(fetcher: BlockFetcher, store: FaultyStore) -> None:
    progress: list[tuple[int, int]] = []
    stats = ingest(fetcher, [A, B, A], on_progress=lambda *at: progress.append(at))
    assert (stats.computed, stats.reused) == (2, 0)
    assert stats.computed_tokens == len("first passage") + len("second")
    assert stats.stored_bytes == store.stats().total_bytes
    short, long = len("second"), len("first passage")
    total = short + long
    assert [progress[0], progress[-1]] == [(0, total), (total, total)]
    assert progress[1] in ((short, total), (long, total))
    progress.clear()
    again = ingest(fetcher, [A, B, C], on_progress=lambda *at: progress.append(at))
    assert progress[0][0] == total
    assert progress[-1][0] == progress[-1][1] > total
    assert (again.computed, again.reused) == (1, 2)


def test_precompute_continues_after_an_error(fetcher: BlockFetcher, store: FaultyStore) -> None:
    blocks = [Block(f"passage {i}") for i in range(10)]
    store.full_after = 4
    with pytest.raises(StoreError, match="no space left"):
        ingest(fetcher, blocks, batch_tokens=20)
    store.full_after = None
    stats = ingest(fetcher, blocks, batch_tokens=20)
    assert (stats.reused, stats.computed) == (4, 6)


def test_encodes_and_stores_batch_by_batch(fetcher: BlockFetcher, store: FaultyStore) -> None:
    entries: list[int] = []

    def run(work: Callable[[], Batch | None]) -> Batch | None:
        entries.append(store.stats().entries)
        computed = work()
        assert store.stats().entries == entries[-1]
        return computed

    blocks = [Block(f"passage {i}") for i in range(4)]
    precompute(fetcher, blocks, run=run, batch_tokens=1)
    assert entries == [0, 1, 2, 3, 4]  # the last step has nothing left to do


def test_the_error_for_a_too_long_block_gives_advice(fetcher: BlockFetcher) -> None:
    with pytest.raises(ContextOverflowError, match="split the passage into smaller chunks"):
        ingest(fetcher, [Block("x" * 5000)])


# Three blocks with equal tokens: text alone, and text with two different templates.
SHARED = [
    Block("- third"),
    Block("third", BlockTemplate("- ")),
    Block(" third", BlockTemplate("-")),
]


def collected(store: DirectoryStore | ObjectStore, live: Sequence[Block]) -> list[str]:
    """Age all entries and run ``gc`` with these live blocks. Returns the remaining keys."""
    if isinstance(store, DirectoryStore):
        for entry in store.entries():
            os.utime(store.entry_path(entry.key), (0, time.time() - 86400))
    else:
        time.sleep(1.1)  # timestamps have a resolution of one second
    gc(store, {block.handle for block in live}, grace_s=0)
    return list(store.keys())


def opened(kind: str, path: Path) -> tuple[KVStore, DirectoryStore | ObjectStore]:
    """Open a store. Returns the store, and the one to run ``gc`` on."""
    if kind == "objects":
        home = objects_in_memory()
        return home, home
    directory = DirectoryStore(path)
    if kind == "directory":
        return directory, directory
    return TieredStore("memory:1MB", directory), directory


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", ["directory", "tiers", "objects"])
def test_a_shared_entry_is_kept_while_any_text_is_live(
    model: BlockModel, tmp_path: Path, kind: str, together: bool
) -> None:
    store, home = opened(kind, tmp_path / "kv")
    fetcher = BlockFetcher(model, store)
    for blocks in [SHARED] if together else [[block] for block in SHARED]:
        ingest(fetcher, blocks)
    (key,) = home.keys()
    for block in SHARED:
        assert collected(home, [block]) == [key]
    assert collected(home, [A]) == []


def test_entries_of_many_texts_are_only_deleted_by_age(model: BlockModel, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "kv")
    text = "a text of many letters"
    blocks = [Block(text[cut:], BlockTemplate(text[:cut])) for cut in range(MOST_HANDLES + 1)]
    ingest(BlockFetcher(model, store), blocks)
    assert len(collected(store, [A])) == 1
    gc(store, set(), grace_s=0, ttl_s=60, force=True)
    assert list(store.keys()) == []


def test_damaged_shared_entry_is_recomputed(model: BlockModel, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "kv")
    fetcher = BlockFetcher(model, store)
    ingest(fetcher, SHARED[:1])
    (key,) = store.keys()
    path = store.entry_path(key)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert ingest(fetcher, SHARED[1:2]).computed == 1
    assert ingest(fetcher, SHARED).reused == 1
