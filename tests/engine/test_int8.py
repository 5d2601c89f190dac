"""Engines with int8 keys and values give the same answers for misses and hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.fetcher import BlockCache, BlockFetcher
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore
from tests.engine.ingestion import fetch
from tests.recipes import recipe_of

A, B, Q = "Halden Tower is 214 metres tall.", "It was built in 1931.", "How tall?"
MakeStore = Callable[[], KVStore]


@pytest.fixture(params=["memory", "directory"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return the same store each time, or, for a directory, a new object over it."""
    memory = MemoryStore(1 << 26)
    return lambda: memory if request.param == "memory" else DirectoryStore(tmp_path / "kv")


def stored(store: KVStore) -> list[BlockKV]:
    return [kv for key in list(store.keys()) if (kv := store.get(key)) is not None]


@pytest.mark.parametrize("assembly", ["relay", "copy"])
def test_misses_and_hits_give_the_same_answer(
    model: BlockModel, make_store: MakeStore, assembly: str
) -> None:
    settings: dict[str, Any] = {"assembly": assembly, "kv_dtype": "int8"}
    cold = BlockAttentionEngine(model, make_store(), **settings)
    assert cold.kv_dtype == "int8"
    missed = cold.generate(["first", A, B, Q], max_new_tokens=6)
    warm = BlockAttentionEngine(model, make_store(), **settings)
    hit = warm.generate(["first", A, B, Q], max_new_tokens=6)
    assert (missed.stats.misses, hit.stats.misses) == (3, 0)
    assert missed.stats.int8_blocks == hit.stats.int8_blocks == 3
    assert hit.token_ids == missed.token_ids
    assert all(kv.scales is not None for kv in stored(make_store()))
    again = BlockAttentionEngine(model, kv_dtype="int8")
    logits = [again.answer_logits(["first", A, B, Q], missed.token_ids) for _ in range(2)]
    assert torch.equal(*logits)


def test_store_may_mix_int8_and_float(model: BlockModel, make_store: MakeStore) -> None:
    plain = BlockAttentionEngine(model, make_store())
    assert plain.kv_dtype == "model"
    plain.encode([A])
    half = BlockAttentionEngine(model, make_store(), kv_dtype="int8")
    half.encode([A, B])
    kept = {kv.num_tokens: kv.scales is not None for kv in stored(make_store())}
    assert kept == {len(A): False, len(B): True}
    for engine in (plain, half):
        stats = engine.generate(["first", A, B, Q], max_new_tokens=1).stats
        assert stats.int8_blocks == 1
    assert plain.generate(["first", A, Q], mode="full", max_new_tokens=1).stats.int8_blocks == 0


def test_resident_blocks_stay_in_int8(model: BlockModel, tmp_path: Path) -> None:
    BlockAttentionEngine(model, DirectoryStore(tmp_path), kv_dtype="int8").encode([A])
    store = DirectoryStore(tmp_path)
    (kv,) = stored(store)
    cache = BlockCache(store, kv.nbytes)
    (read,) = cache.get_many([kv.key])
    assert isinstance(read, BlockKV)
    assert read.scales is not None
    assert cache.get_many([kv.key])[0] is read
    smaller = BlockCache(store, kv.nbytes - 1)
    assert smaller.get_many([kv.key])[0] is not smaller.get_many([kv.key])[0]


def test_statistics_survive_json(model: BlockModel) -> None:
    stats = BlockAttentionEngine(model, kv_dtype="int8").generate([A, Q], max_new_tokens=1).stats
    assert stats.int8_blocks == 1
    assert ReuseStats.from_dict(json.loads(json.dumps(asdict(stats)))) == stats
    assert (stats + stats).int8_blocks == 2


def test_nothing_is_rounded_twice(model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is applied to unquantized states, and the result is quantized."""
    store, recipe = MemoryStore(1 << 26), recipe_of(model, sink="none")
    BlockAttentionEngine(model, store, kv_dtype="int8").encode([A])
    changed: list[BlockKV] = []
    corrected = Correction.corrected

    def watched(self: Correction, kv: BlockKV, layouts: list[RotaryLayout]) -> BlockKV:
        changed.append(kv)
        return corrected(self, kv, layouts)

    monkeypatch.setattr(Correction, "corrected", watched)
    blocks = [Block("x"), Block(A)]
    int8 = BlockFetcher(model, store, kv_dtype="int8")
    found = fetch(int8, blocks, recipe=recipe).blocks[1]
    assert [kv.scales for kv in changed] == [None]
    fetcher = BlockFetcher(model, MemoryStore(1 << 26))
    plain = fetch(fetcher, blocks, recipe=recipe).blocks[1]
    expected = plain.quantized()
    for layer in range(found.num_layers):
        pairs = zip(found.tensors(layer), expected.tensors(layer), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_invalid_kv_dtypes_are_refused(model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Expected one of .* as kv_dtype, found 'int4'"):
        BlockAttentionEngine(model, kv_dtype="int4")  # type: ignore[arg-type]
    mixed = [(2, 8, torch.float32), (2, 8, torch.bfloat16)]
    monkeypatch.setattr(model, "profile", SimpleNamespace(token_outline=mixed))
    with pytest.raises(ValueError, match=r"several dtypes .*bfloat16.*float32.*kv_dtype="):
        BlockFetcher(model, MemoryStore(1), kv_dtype="int8")
