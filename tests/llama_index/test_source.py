"""Loading late, sharing one engine, and travelling as fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("model")
    model = tiny_model("llama")
    model.config.block_attention = {"test": True}
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of ``BlockAttentionEngine.from_pretrained`` during the test."""
    seen: list[Any] = []
    original = BlockAttentionEngine.from_pretrained

    def spy(model: Any, **kwargs: Any) -> BlockAttentionEngine:
        seen.append((model, kwargs))
        return original(model, **kwargs)

    monkeypatch.setattr(BlockAttentionEngine, "from_pretrained", spy)
    return seen


def test_metadata_needs_no_weights(saved: str, loads: list[Any]) -> None:
    llm = BlockAttentionLLM(model_name=saved)
    assert llm.metadata.context_window == 4096
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == saved
    assert llm.to_prompt([ChatMessage(content="Hi")]).final.startswith("<|begin|>")
    assert len(llm.tokenize("abc")) == 3
    assert loads == []


def test_given_metadata_needs_no_file_at_all(loads: list[Any]) -> None:
    given: Any = {"is_chat_model": True, "is_function_calling_model": False}
    llm = BlockAttentionLLM("nowhere/at-all", context_window=1000, **given)
    assert llm.metadata.context_window == 1000
    assert not llm.metadata.is_function_calling_model
    assert llm.to_payload()["model_name"] == "nowhere/at-all"
    assert loads == []


def test_components_survive_a_dict(saved: str, tmp_path: Path) -> None:
    llm = BlockAttentionLLM(saved, kv_store=tmp_path / "kv", context_window=900, mode="full")
    again = BlockAttentionLLM.from_dict(llm.to_dict())
    assert again.to_dict() == llm.to_dict()
    transform = BlockKVTransform(llm=llm, show_progress=True)
    assert BlockKVTransform.from_dict(transform.to_dict()).to_dict() == transform.to_dict()
    assert llm.to_json()
    assert transform.to_json()
