"""Adapters use the namespace of their engine and pass loading arguments to it."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.adapters.sources import EngineSource
from blockattn_rag.llama_index import BlockKVTransform
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from blockattn_rag.store.namespaces import Access
from tests.adapters.frameworks import EACH, Framework
from tests.models import shared_tiny_llama, tiny_tokenizer


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 26)


def engine_of(store: MemoryStore, namespace: str) -> BlockAttentionEngine:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    return BlockAttentionEngine(model, store, namespace=namespace)


def test_loading_arguments_reach_the_engine(store: MemoryStore) -> None:
    arguments: dict[str, Any] = {
        "namespace": "one", "read_namespaces": ["public"], "read_only": True, "kv_dtype": "int8",
    }  # fmt: skip
    source = EngineSource(
        model_name=shared_tiny_llama(),
        tokenizer_name=tiny_tokenizer(),
        kv_store=store,
        model_kwargs=arguments,
    )
    engine = source.engine
    assert engine.access == Access("one", ("public",), read_only=True)
    assert engine.kv_dtype == "int8"
    assert source.fields()["model_kwargs"] == arguments


@EACH
def test_ingestion_uses_the_engines_namespace(framework: Framework, store: MemoryStore) -> None:
    framework.ingest(framework.ingestion(engine=engine_of(store, "one")), ["a passage"])
    assert [kv.namespace for key in list(store.keys()) if (kv := store.get(key))] == ["one"]


def test_tenants_do_not_share_cached_ingestions(store: MemoryStore) -> None:
    one, two = (BlockKVTransform(engine=engine_of(store, name)).to_dict() for name in ("a", "b"))
    assert one != two
    assert {**one, "namespace": "b"} == two
