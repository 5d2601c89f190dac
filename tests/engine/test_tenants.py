"""Namespaces and read-only engines: tenants do not affect each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.fetcher import BlockFetcher, Fetched, OnMiss
from blockattn_rag.errors import MissError
from blockattn_rag.kv.block_kv import token_digest
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockTemplate, Origin, Span
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore
from blockattn_rag.store.namespaces import Access
from tests.engine.ingestion import fetch, ingest

A, B = Block("first passage"), Block("second")
PROMPT = ["system", "first passage", "second", "question?"]


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return MemoryStore(1 << 26) if request.param == "memory" else DirectoryStore(tmp_path / "kv")


def found(fetched: Fetched) -> tuple[int, int]:
    return fetched.hits, fetched.misses


def of_tenant(
    model: BlockModel,
    store: KVStore,
    *names: str,
    read_only: bool = False,
    on_miss: OnMiss = "compute",
) -> BlockFetcher:
    access = Access(names[0], names[1:], read_only)
    return BlockFetcher(model, store, 1 << 20, access, on_miss=on_miss)


# -- identity ----------------------------------------------------------------------------------


def test_blocks_are_identified_by_their_tokens(model: BlockModel, store: KVStore) -> None:
    fetcher = of_tenant(model, store, "one")
    kv = fetch(fetcher, [A, B]).blocks[1]
    ids = model.tokenizer.block_ids(B, first=False)
    assert kv.digest == token_digest(ids)
    assert (kv.token_ids.tolist(), kv.namespace, kv.handle) == (ids, "one", B.handle)


def test_texts_with_equal_token_ids_share_an_entry(model: BlockModel, store: KVStore) -> None:
    fetcher = of_tenant(model, store, "")
    ingest(fetcher, [Block("ab", BlockTemplate(after="c"))])
    assert found(fetch(fetcher, [A, Block("a", BlockTemplate(after="bc")), Block("abc")])) == (2, 1)
    assert ingest(fetcher, [Block("abc")]).reused == 1


@pytest.mark.parametrize("origin", ["conversation", "prompt", "altered"])
def test_user_text_never_hits_a_passage(model: BlockModel, store: KVStore, origin: Origin) -> None:
    fetcher = of_tenant(model, store, "one", "public")
    ingest(of_tenant(model, store, "public"), [A, B])
    ingest(fetcher, [A])
    written = [Block.of([Span(block.text, origin)]) for block in (A, B)]
    assert found(fetch(fetcher, [Block("x"), *written])) == (0, 3)
    assert found(fetch(fetcher, [Block("x"), *written, A, B])) == (5, 0)
    assert not any(fetcher.contains(block) for block in written) or isinstance(store, MemoryStore)


# -- tenants -----------------------------------------------------------------------------------


def test_tenants_share_no_entries(model: BlockModel, store: KVStore) -> None:
    ingest(of_tenant(model, store, "one"), [A, B])
    for name in ("two", "", "One"):
        other = of_tenant(model, store, name, on_miss="error")
        assert not other.contains(A)
        with pytest.raises(MissError):
            fetch(other, [A, B])
        assert ingest(other, [A]).computed == 1
    assert of_tenant(model, store, "one").contains(B)


def test_tenants_do_not_affect_each_other(model: BlockModel, store: KVStore) -> None:
    def logits(engine: BlockAttentionEngine) -> torch.Tensor:
        return engine.answer_logits(PROMPT, [5, 6])

    alone = logits(BlockAttentionEngine(model, namespace="two"))
    one = BlockAttentionEngine(model, store, namespace="one", kv_dtype="int8", recipe="bos")
    one.encode(PROMPT[:-1])
    BlockAttentionEngine(model, store, namespace="one", kv_dtype="int8").encode(PROMPT[:-1])
    two = BlockAttentionEngine(model, store, namespace="two")
    stats = two.generate(PROMPT, max_new_tokens=1).stats
    assert (stats.hits, stats.misses) == (0, 3)
    assert torch.equal(logits(two), alone)
    assert not torch.equal(logits(BlockAttentionEngine(model, store, namespace="one")), alone)


def test_a_shared_namespace_is_never_written(model: BlockModel, store: KVStore) -> None:
    ingest(of_tenant(model, store, "public"), [A])
    fetcher = of_tenant(model, store, "one", "public")
    assert fetcher.contains(A)
    assert ingest(fetcher, [A, B]).reused == 1
    fetched = fetch(fetcher, [Block("x"), B, A])
    assert found(fetched) == (2, 1)
    assert [kv.namespace for kv in fetched.blocks] == ["one", "one", "public"]
    for name in ("public", "two"):
        assert not of_tenant(model, store, name).contains(B)


def test_a_damaged_shared_entry_is_recomputed_as_own(model: BlockModel, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "kv")
    ingest(of_tenant(model, store, "public"), [A])
    (shared,) = store.path.rglob("*.safetensors")
    shared.write_bytes(shared.read_bytes()[:-9])
    damaged = shared.read_bytes()
    fetched = fetch(of_tenant(model, store, "one", "public"), [B, A])
    assert fetched.misses == 2
    assert fetched.blocks[1].namespace == "one"
    assert shared.read_bytes() == damaged


@pytest.mark.parametrize("name", ["a:b", "a/b", ".", "-a", "ä", "a" * 65, "a b", None, 7, "a\n"])
def test_invalid_namespace_names_are_refused(model: BlockModel, name: object) -> None:
    with pytest.raises(ValueError, match="A namespace consists of"):
        BlockAttentionEngine(model, namespace=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="A namespace consists of"):
        BlockAttentionEngine(model, read_namespaces=[name])  # type: ignore[list-item]


def test_a_string_instead_of_a_list_of_namespaces_is_refused(model: BlockModel) -> None:
    with pytest.raises(TypeError, match="list of names, found the string 'public'"):
        BlockAttentionEngine(model, read_namespaces="public")


# -- read-only ---------------------------------------------------------------------------------


def entries(store: KVStore) -> dict[str, list[int]]:
    return {key: kv.token_ids.tolist() for key in list(store.keys()) if (kv := store.get(key))}


@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_read_only_engine_answers(model: BlockModel, store: KVStore, resident_bytes: int) -> None:
    BlockAttentionEngine(model, store).encode(["first passage"])
    before = entries(store)
    engine = BlockAttentionEngine(model, store, read_only=True, resident_bytes=resident_bytes)
    for turn in range(3):
        stats = engine.generate(PROMPT, max_new_tokens=1).stats
        known = 3 if turn and resident_bytes else 1
        assert (stats.hits, stats.misses) == (known, 3 - known)
    assert entries(store) == before
    assert engine.access.read_only


def test_a_read_only_engine_keeps_recomputed_blocks_in_memory(
    model: BlockModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    BlockAttentionEngine(model, tmp_path / "kv").encode(["first passage"])
    (path,) = (tmp_path / "kv").rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    engine = BlockAttentionEngine(model, tmp_path / "kv", read_only=True)
    for hits in (0, 3):
        assert engine.generate(PROMPT, max_new_tokens=1).stats.hits == hits
    assert "recomputed and kept in memory" in caplog.text
    assert [path] == list((tmp_path / "kv").rglob("*.safetensors"))


def test_read_only_engine_refuses_to_encode(model: BlockModel, store: KVStore) -> None:
    BlockAttentionEngine(model, store).encode(["first passage"])
    engine = BlockAttentionEngine(model, store, read_only=True)
    assert engine.encode(["first passage"]) == [A.handle]
    with pytest.raises(ValueError, match=r"1 of 2 blocks are not in the store.*read_only=True"):
        engine.encode(["first passage", "second"])
