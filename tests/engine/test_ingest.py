"""Ingestion: its figures, and what an interruption leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from blockattn_rag.engine.fetcher import BlockFetcher, Wanted
from blockattn_rag.engine.ingest import precompute
from blockattn_rag.errors import ContextOverflowError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockTemplate
from tests.engine.ingestion import FaultyStore, ingest
from tests.models import shared_tiny_llama, tiny_tokenizer

A, B, C = Block("first passage"), Block("second"), Block("third", BlockTemplate("- ", "\n"))

Batch = list[tuple[Wanted, BlockKV]]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer())


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def fetcher(model: BlockModel, store: FaultyStore) -> BlockFetcher:
    return BlockFetcher(model, store)


def test_precompute_says_what_it_did(fetcher: BlockFetcher, store: FaultyStore) -> None:
    progress: list[tuple[int, int]] = []
    stats = ingest(fetcher, [A, B, A], on_progress=lambda *at: progress.append(at))
    assert (stats.computed, stats.reused) == (2, 0)
    assert stats.computed_tokens == len("first passage") + len("second")
    assert stats.stored_bytes == store.stats().total_bytes
    assert progress == [(1, 2), (2, 2)]
    again = ingest(fetcher, [A, B, C])
    assert (again.computed, again.reused) == (1, 2)


def test_precompute_raises_where_it_cannot_store_and_goes_on_from_there(
    fetcher: BlockFetcher, store: FaultyStore
) -> None:
    blocks = [Block(f"passage {i}") for i in range(10)]
    store.full_after = 4
    with pytest.raises(StoreError, match="no space left"):
        ingest(fetcher, blocks, batch_tokens=20)
    store.full_after = None
    stats = ingest(fetcher, blocks, batch_tokens=20)
    assert (stats.reused, stats.computed) == (4, 6)


def test_precompute_survives_an_interruption(
    model: BlockModel, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = BlockFetcher(model, store)
    right = model.encode

    def interrupted(*args: object, **kwargs: object) -> Iterator[list[BlockKV]]:
        batches = right(*args, **kwargs)  # type: ignore[arg-type]
        yield next(batches)
        raise KeyboardInterrupt

    blocks = [Block(f"passage {i}") for i in range(6)]
    monkeypatch.setattr(model, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ingest(fetcher, blocks, batch_tokens=20)
    monkeypatch.undo()
    kept = store.stats().entries
    assert 0 < kept < 6
    stats = ingest(fetcher, blocks)
    assert (stats.reused, stats.computed) == (kept, 6 - kept)


def test_the_model_runs_one_batch_at_a_time_and_stores_in_between(
    fetcher: BlockFetcher, store: FaultyStore
) -> None:
    entries: list[int] = []

    def run(work: Callable[[], Batch | None]) -> Batch | None:
        entries.append(store.stats().entries)
        computed = work()
        assert store.stats().entries == entries[-1]
        return computed

    blocks = [Block(f"passage {i}") for i in range(4)]
    precompute(fetcher, blocks, run=run, batch_tokens=1)
    assert entries == [0, 1, 2, 3, 4]  # the last piece of work finds nothing left


def test_a_block_too_long_for_the_model_is_an_error_that_says_what_to_do(
    fetcher: BlockFetcher,
) -> None:
    with pytest.raises(ContextOverflowError, match="split the passage into smaller chunks"):
        ingest(fetcher, [Block("x" * 5000)])
