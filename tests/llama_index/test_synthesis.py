"""Synthesis helpers: the head of prompts can be stored explicitly if it contains no question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core.prompts import PromptTemplate

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    block_response_synthesizer,
    encode_prompt_head,
)
from blockattn_rag.model import BlockModel
from tests.llama_index.conftest import RecordingEngine, encoded, passages


@pytest.mark.parametrize(
    "fields",
    [
        {"is_chat_model": True},
        {"is_chat_model": False},
        {"is_chat_model": False, "completion_to_prompt": "User: {}\nAssistant: ".format},
    ],
    ids=["chat", "completion", "own-format"],
)
def test_a_stored_head_is_reused_by_the_first_question_of_a_process(
    block_model: BlockModel, tmp_path: Path, fields: dict[str, Any]
) -> None:
    def fresh() -> tuple[BlockAttentionLLM, RecordingEngine]:
        engine = RecordingEngine(block_model, tmp_path / "kv")
        llm = BlockAttentionLLM(
            engine=engine, max_new_tokens=2, system_prompt="Be brief.", **fields
        )
        return llm, engine

    nodes = encoded(fresh()[0], passages())
    found = []
    for stores_head in (False, False, True, False):
        llm, engine = fresh()
        if stores_head:
            encode_prompt_head(llm)
        block_response_synthesizer(llm).synthesize("What?", nodes)
        found += [(call.answer.stats.hits, call.answer.stats.misses) for call in engine.calls]
    assert found == [(3, 1), (3, 1), (4, 0), (4, 0)]


def test_a_template_without_a_head_stores_nothing(block_model: BlockModel, tmp_path: Path) -> None:
    engine = BlockAttentionEngine(block_model, tmp_path / "kv")
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=2)
    encode_prompt_head(llm, PromptTemplate("{query_str}\n{context_str}\nAnswer:"))
    assert engine.store.stats().entries == 0
