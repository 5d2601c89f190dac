"""Metadata and serialization of components that are created from a model name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import ChatMessage

from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform


def test_metadata_describes_the_model(saved: str, loads: list[Any]) -> None:
    llm = BlockAttentionLLM(model_name=saved)
    assert llm.metadata.context_window == 4096
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == saved
    assert llm.to_prompt([ChatMessage(content="Hi")]).final.startswith("<|begin|>")
    assert len(llm.tokenize("abc")) == 3
    assert len(loads) == 1
    given: Any = {"is_chat_model": False, "is_function_calling_model": False}
    own = BlockAttentionLLM(engine=llm.engine, context_window=1000, max_new_tokens=9, **given)
    metadata = own.metadata
    assert (metadata.context_window, metadata.num_output) == (1000, 9)
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (False, False)
    assert own.to_payload()["model_name"] == saved


def test_components_survive_a_dict(saved: str, tmp_path: Path) -> None:
    llm = BlockAttentionLLM(saved, kv_store=tmp_path / "kv", context_window=900, mode="full")
    again = BlockAttentionLLM.from_dict(llm.to_dict())
    assert again.to_dict() == llm.to_dict()
    transform = BlockKVTransform(llm=llm, show_progress=True)
    assert BlockKVTransform.from_dict(transform.to_dict()).to_dict() == transform.to_dict()
    assert llm.to_json()
    assert transform.to_json()
