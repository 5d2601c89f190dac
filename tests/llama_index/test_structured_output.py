"""The LLM, its query engines and its streams return complete objects of a class, or raise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel, Field

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
    block_query_engine,
    block_response_synthesizer,
)
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from tests.engines import tuned_model


class Tower(BaseModel):
    höhe: int = Field(ge=0, le=99)
    known: bool


PROMPT = PromptTemplate("What is {thing}?")


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tuned_model(max_position_embeddings=8192)


@pytest.fixture
def llm(model: BlockModel) -> BlockAttentionLLM:
    engine = BlockAttentionEngine(model, MemoryStore(1 << 28))
    return BlockAttentionLLM(engine=engine, max_new_tokens=60)


def test_a_class_returns_its_objects(llm: BlockAttentionLLM) -> None:
    found = llm.structured_predict(Tower, PROMPT, thing="a tower")
    assert isinstance(found, Tower)
    assert asyncio.run(llm.astructured_predict(Tower, PROMPT, thing="a tower")) == found


def test_a_stream_returns_partial_objects(llm: BlockAttentionLLM) -> None:
    found = list(llm.stream_structured_predict(Tower, PROMPT, thing="a tower"))
    assert found[-1] == llm.structured_predict(Tower, PROMPT, thing="a tower")
    assert len(found) > 1

    async def streamed() -> list[Any]:
        steps = await llm.astream_structured_predict(Tower, PROMPT, thing="a tower")
        return [one async for one in steps]

    assert asyncio.run(streamed())[-1] == found[-1]


def test_an_answer_that_is_cut_off_raises(llm: BlockAttentionLLM) -> None:
    short = {"max_new_tokens": 8}
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        llm.structured_predict(Tower, PROMPT, llm_kwargs=short, thing="a tower")
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        list(llm.stream_structured_predict(Tower, PROMPT, llm_kwargs=short, thing="a tower"))


def test_a_structured_llm_answers_messages(llm: BlockAttentionLLM) -> None:
    answer = llm.as_structured_llm(Tower).chat([ChatMessage(role="user", content="What?")])
    assert isinstance(answer.raw, Tower)


def test_a_synthesizer_with_a_class_reuses_passages(llm: BlockAttentionLLM) -> None:
    nodes = [
        NodeWithScore(node=TextNode(text=f"Passage {one} tells of a tower.")) for one in range(3)
    ]
    marked = BlockKVPostprocessor().postprocess_nodes(nodes)
    seen = []
    chat = llm.engine.generate

    def noted(prompt: Any, **options: Any) -> Any:
        answer = chat(prompt, **options)
        seen.append(answer.stats)
        return answer

    llm.engine.generate = noted  # type: ignore[method-assign]
    synthesizer = block_response_synthesizer(llm, output_cls=Tower)
    for question in ("How tall?", "How old?"):
        answer: Any = synthesizer.synthesize(question, nodes=marked)
        assert isinstance(answer.response, Tower)
    assert [stats.hits for stats in seen] == [0, 4]  # three passages and the text before them


def test_a_block_query_engine_passes_the_class_to_its_synthesizer(llm: BlockAttentionLLM) -> None:
    nodes = BlockKVTransform(llm=llm)([TextNode(text=text) for text in ("One.", "Two.")])
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding(8))
    engine = block_query_engine(index, llm, output_cls=Tower, similarity_top_k=1)
    found: Any = engine.query("How tall?")
    assert isinstance(found.response, Tower)
    assert len(found.source_nodes) == 1
