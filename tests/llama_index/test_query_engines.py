"""Citations, whose labels are outside of the blocks, and the stored text before passages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import MetadataMode

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockCitationQueryEngine,
    BlockKVTransform,
    HashingEmbedding,
    block_response_synthesizer,
    canonical_text,
    encode_prompt_head,
)
from blockattn_rag.model import BlockModel
from tests.llama_index.conftest import RecordingEngine, encoded, passages


@pytest.mark.parametrize("size", [80, 1500], ids=["short", "longer than a citation chunk"])
async def test_each_source_is_one_block_without_its_number(
    size: int, llm: BlockAttentionLLM, engine: RecordingEngine, tokenized: list[str]
) -> None:
    nodes = passages(3, size)
    index = VectorStoreIndex(BlockKVTransform(llm=llm)(nodes), embed_model=HashingEmbedding(64))
    citing = BlockCitationQueryEngine.from_args(index, llm=llm, similarity_top_k=3)
    response = citing.query("What is w1x3?")
    assert str(await citing.aquery("What is w1x3?")) == str(response)
    prompt = engine.calls[0].prompt
    found = [b.text for b in prompt.context if b.is_passage]
    assert sorted(found) == sorted(canonical_text(n) for n in nodes)
    labels = ["Source 1:", "Source 2:", "Source 3:"]
    assert [b.text.strip() for b in prompt.context if not b.is_passage][1:] == labels[1:]
    assert prompt.context[0].text.endswith("Source 1:\n")
    assert engine.calls[0].answer.stats.hits == 3
    assert [n.node.get_content().partition("\n")[0] for n in response.source_nodes] == labels
    assert "kvblock" not in response.source_nodes[0].node.get_content(MetadataMode.NONE)
    fresh = RecordingEngine(engine.model)
    assert fresh.generate(prompt, max_new_tokens=4).text == str(response)
    assert not [text for text in tokenized if "kvblock" in text]


def test_labels_stay_with_their_sources(engine: RecordingEngine) -> None:
    llm = BlockAttentionLLM(
        engine=engine, context_window=3000, max_new_tokens=4, is_chat_model=False
    )
    nodes = BlockKVTransform(llm=llm)(passages(4, 500))
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding(64))
    citing = BlockCitationQueryEngine.from_args(index, llm=llm, similarity_top_k=4)
    citing.query("What is w1x3?")
    assert len(engine.calls) > 1
    for call in engine.calls:
        for before, block in zip(call.prompt.context, call.prompt.context[1:], strict=False):
            if block.is_passage:
                assert not before.is_passage
                assert before.text.rstrip()[:-1].rpartition("\n")[2].startswith("Source ")


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
