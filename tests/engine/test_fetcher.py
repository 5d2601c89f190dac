"""Looking up and encoding blocks: counts, damaged entries, and which blocks may be stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from blockattn_rag.engine.fetcher import BlockFetcher
from blockattn_rag.errors import MissError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockTemplate, Origin, Span
from blockattn_rag.store import DirectoryStore
from tests.engine.ingestion import FaultyStore, fetch, ingest
from tests.models import shared_tiny_llama, tiny_tokenizer

A, B, C = Block("first passage"), Block("second"), Block("third", BlockTemplate("- ", "\n"))
D = Block("what stands first")


@pytest.fixture(scope="module")
def model_without_bos() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer(bos=False))


def test_missing_blocks_are_computed_and_hits_the_next_time(fetcher: BlockFetcher) -> None:
    first = fetch(fetcher, [A, B, C])
    assert (first.hits, first.misses) == (0, 3)
    assert first.reused_tokens == 0
    again = fetch(fetcher, [A, B, C])
    assert (again.hits, again.misses) == (3, 0)
    assert again.reused_tokens == len("first passage") + 1 + len("second") + len("- third\n")
    assert [kv.handle for kv in again.blocks] == [block.handle for block in (A, B, C)]


def test_a_repeated_block_is_computed_once(fetcher: BlockFetcher) -> None:
    found = fetch(fetcher, [C, A, A, A])
    assert (found.hits, found.misses) == (2, 2)
    assert found.blocks[1] is found.blocks[2] is found.blocks[3]


def test_the_block_after_bos_is_a_separate_entry(fetcher: BlockFetcher, model: BlockModel) -> None:
    found = fetch(fetcher, [A, A])
    assert found.misses == 2
    assert found.blocks[0].num_tokens == found.blocks[1].num_tokens + 1
    assert fetcher.contains(A, first=True)
    assert fetcher.contains(A)
    assert not fetcher.contains(B)


def test_without_bos_the_first_block_is_no_separate_entry(
    model_without_bos: BlockModel, store: FaultyStore
) -> None:
    fetcher = BlockFetcher(model_without_bos, store)
    ingest(fetcher, [A, B])
    assert fetcher.contains(A, first=True)
    found = fetch(fetcher, [A, B, A])
    assert (found.hits, found.misses) == (3, 0)


def test_on_miss_error_names_missing_blocks(model: BlockModel, store: FaultyStore) -> None:
    fetcher = BlockFetcher(model, store, on_miss="error")
    ingest(fetcher, [B])
    with pytest.raises(MissError, match=r"1 of 2 blocks .*first is 'first passage'"):
        fetch(fetcher, [A, B])
    assert store.stats().entries == 1


def test_a_text_without_tokens_is_neither_counted_nor_stored(
    model: BlockModel, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = BlockFetcher(model, store)
    ingest(fetcher, [B])
    right = model.tokenizer.block_ids
    monkeypatch.setattr(
        model.tokenizer,
        "block_ids",
        lambda block, *, first: [] if block == C else right(block, first=first),
    )
    fetch(fetcher, [A])
    found = fetch(fetcher, [A, C, B])
    assert (found.hits, found.misses, len(found.blocks)) == (2, 0, 2)
    assert ingest(fetcher, [C, B]).computed == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda kv: replace(kv, digest="0" * 64),
        lambda kv: replace(kv, fingerprint="0" * 64),
        lambda kv: replace(kv, token_ids=kv.token_ids.flip(0)),
        lambda kv: replace(kv, keys=kv.keys[1:], values=kv.values[1:]),
        None,
    ],
    ids=["another block", "another model", "other tokens", "fewer layers", "damaged"],
)
def test_a_bad_entry_is_a_miss_with_a_warning_and_is_overwritten(
    fetcher: BlockFetcher,
    store: FaultyStore,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[BlockKV], BlockKV] | None,
) -> None:
    (good,) = fetch(fetcher, [A]).blocks
    if change is None:
        store.corrupt.update(store.keys())
    else:
        store.swapped = change(good)
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        found = fetch(fetcher, [A])
    assert (found.hits, found.misses) == (0, 1)
    assert found.blocks[0].token_ids.tolist() == good.token_ids.tolist()
    assert "recomputed and the entry is overwritten" in caplog.text
    assert store.puts == 2


def test_blocks_are_computed_if_the_store_cannot_keep_them(
    fetcher: BlockFetcher, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.full_after = 0
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        found = fetch(fetcher, [A, B])
    assert found.misses == len(found.blocks) == 2
    assert "no space left" in caplog.text


# -- what may be stored ----------------------------------------------------------------------------


def of(origin: Origin, text: str = "some text before the passages") -> Block:
    return Block.of([Span(text, origin)])


@pytest.fixture
def on_disk(model: BlockModel, tmp_path: Path) -> BlockFetcher:
    return BlockFetcher(model, DirectoryStore(tmp_path / "kv"), 1 << 26)


@pytest.mark.parametrize("origin", ["conversation", "prompt", "altered"])
def test_private_blocks_of_a_prompt_stay_in_memory(on_disk: BlockFetcher, origin: Origin) -> None:
    private = of(origin)
    for misses in (1, 0, 0):
        found = fetch(on_disk, [private])
        assert found.misses == misses
    assert not on_disk.contains(private, first=True)


def test_passages_are_stored_at_once_and_system_messages_later(on_disk: BlockFetcher) -> None:
    system = of("system")
    fetch(on_disk, [system, A])
    assert on_disk.contains(A)
    assert not on_disk.contains(system, first=True)
    assert fetch(on_disk, [system, A]).misses == 0
    assert on_disk.contains(system, first=True)


def test_explicitly_encoded_blocks_are_always_stored(on_disk: BlockFetcher) -> None:
    ingest(on_disk, [of("conversation"), A], as_prompt=True)
    found = fetch(on_disk, [of("conversation"), A])
    assert (found.hits, found.misses) == (2, 0)


@pytest.mark.parametrize("origin", ["system", "conversation"])
def test_damaged_entries_are_replaced(model: BlockModel, tmp_path: Path, origin: Origin) -> None:
    def fresh() -> BlockFetcher:
        return BlockFetcher(model, DirectoryStore(tmp_path / "kv"), 1 << 26)

    ingest(fresh(), [of(origin)], as_prompt=True)
    (entry,) = (tmp_path / "kv").rglob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:500])
    assert fetch(fresh(), [of(origin)]).misses == 1
    assert fetch(fresh(), [of(origin)]).misses == 0


@pytest.mark.parametrize("origin", ["system", "conversation"])
def test_private_blocks_are_not_stored_after_a_failed_read(
    on_disk: BlockFetcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    origin: Origin,
) -> None:
    error = StoreError("cannot read: the server is down")
    monkeypatch.setattr(DirectoryStore, "get", Mock(side_effect=error))
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        assert fetch(on_disk, [of(origin), A]).misses == 2
    assert "recomputed and the store is tried again next time" in caplog.text
    assert on_disk.contains(A)
    assert not on_disk.contains(of(origin), first=True)
