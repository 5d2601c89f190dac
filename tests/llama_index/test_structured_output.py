"""The LLM, its query engines and its streams return complete objects of a class, or raise."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel, Field

from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
    block_query_engine,
    block_response_synthesizer,
)
from tests.llama_index.conftest import RecordingEngine, passages


class Tower(BaseModel):
    höhe: int = Field(ge=0, le=99)
    known: bool


PROMPT = PromptTemplate("What is {thing}?")


@pytest.fixture
def llm(engine: RecordingEngine) -> BlockAttentionLLM:
    return BlockAttentionLLM(engine=engine, max_new_tokens=60)


async def test_a_class_returns_its_objects(llm: BlockAttentionLLM) -> None:
    found = llm.structured_predict(Tower, PROMPT, thing="a tower")
    assert isinstance(found, Tower)
    assert await llm.astructured_predict(Tower, PROMPT, thing="a tower") == found
    streamed = list(llm.stream_structured_predict(Tower, PROMPT, thing="a tower"))
    assert streamed[-1] == found
    assert len(streamed) > 1  # partial objects
    steps = await llm.astream_structured_predict(Tower, PROMPT, thing="a tower")
    assert [step async for step in steps][-1] == found


def test_an_answer_that_is_cut_off_raises(llm: BlockAttentionLLM) -> None:
    short = {"max_new_tokens": 8}
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        llm.structured_predict(Tower, PROMPT, llm_kwargs=short, thing="a tower")
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        list(llm.stream_structured_predict(Tower, PROMPT, llm_kwargs=short, thing="a tower"))


def test_a_structured_llm_answers_messages(llm: BlockAttentionLLM) -> None:
    answer = llm.as_structured_llm(Tower).chat([ChatMessage(role="user", content="What?")])
    assert isinstance(answer.raw, Tower)


def test_a_synthesizer_with_a_class_reuses_passages(
    llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    nodes = [NodeWithScore(node=node) for node in passages(3)]
    synthesizer = block_response_synthesizer(llm, output_cls=Tower)
    for question in ("How tall?", "How old?"):
        answer: Any = synthesizer.synthesize(
            question, nodes=BlockKVPostprocessor().postprocess_nodes(nodes)
        )
        assert isinstance(answer.response, Tower)
    hits = [call.answer.stats.hits for call in engine.calls]
    assert hits == [0, 4]  # three passages and the text before them


def test_a_block_query_engine_passes_the_class_to_its_synthesizer(llm: BlockAttentionLLM) -> None:
    nodes = BlockKVTransform(llm=llm)([TextNode(text=text) for text in ("One.", "Two.")])
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding(8))
    engine = block_query_engine(index, llm, output_cls=Tower, similarity_top_k=1)
    found: Any = engine.query("How tall?")
    assert isinstance(found.response, Tower)
    assert len(found.source_nodes) == 1
