"""What blocks are kept in is an argument for loading the engine, and of a component's state."""

from __future__ import annotations

import json

from blockattn_rag.adapters.engine_source import EngineSource
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.store import MemoryStore
from tests.engines import local
from tests.models import shared_tiny_llama, tiny_tokenizer


def test_kv_dtype_reaches_the_engine_and_survives_serialization() -> None:
    arguments = {"kv_dtype": "int8"}
    model, tokenizer, store = shared_tiny_llama(), tiny_tokenizer(), MemoryStore(1 << 20)
    source = EngineSource(None, model, tokenizer, store, "auto", arguments)
    assert local(source.engine).kv_dtype == "int8"
    assert source.fields()["model_kwargs"] == arguments
    named = BlockAttentionLLM(model_name="bundled", model_kwargs=arguments)
    state = json.loads(named.to_json())
    assert local(BlockAttentionLLM.from_dict(state).engine).kv_dtype == "int8"
