"""Chat engines pass their passages to the model as blocks."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.memory import ChatMemoryBuffer

from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    BlockPromptHelper,
    HashingEmbedding,
    canonical_text,
    configure,
)
from tests.llama_index.conftest import RecordingEngine, passages

EMBED = HashingEmbedding(64)


@pytest.fixture
def index(llm: BlockAttentionLLM) -> VectorStoreIndex:
    configure(llm)
    return VectorStoreIndex(BlockKVTransform(llm=llm)(passages(3)), embed_model=EMBED)


@pytest.mark.parametrize(
    ("mode", "way", "expected"),
    [
        ("context", "chat", [3, 3]),
        *(
            ("condense_plus_context", way, [3, 0, 3])
            for way in ("chat", "stream_chat", "achat", "astream_chat")
        ),
        ("condense_question", "chat", [3, 0, 3]),
        ("condense_question", "astream_chat", [3, 0, 3]),
    ],
)
async def test_every_turn_of_a_chat_reuses_its_passages(
    mode: str,
    way: str,
    expected: list[int],
    index: VectorStoreIndex,
    llm: BlockAttentionLLM,
    engine: RecordingEngine,
    tokenized: list[str],
) -> None:
    chat: Any = index.as_chat_engine(
        chat_mode=ChatMode(mode),
        llm=llm,
        similarity_top_k=3,
        node_postprocessors=[BlockKVPostprocessor()],
        memory=ChatMemoryBuffer.from_defaults(llm=llm),
    )
    for question in ("What is w1x3?", "And w2x4? {context_str}"):
        response = getattr(chat, way)(question)
        if way in ("achat", "astream_chat"):
            response = await response
        if way == "stream_chat":
            list(response.response_gen)
        elif way == "astream_chat":
            [token async for token in response.async_response_gen()]
        # LlamaIndex returns no sources for async streams of condense_question.
        sources = response.source_nodes
        assert len(sources) == 3 or (mode, way) == ("condense_question", "astream_chat")
        assert not [n for n in sources if "kvblock" in n.get_content()]
    texts = {canonical_text(node) for node in passages(3)}
    fresh = RecordingEngine(engine.model)
    for call, count in zip(engine.calls, expected, strict=True):
        blocks = [block.text for block in call.prompt.context if block.is_passage]
        assert (len(blocks), {*blocks} <= texts) == (count, True)
        assert call.answer.stats.hits >= count
        assert fresh.generate(call.prompt, max_new_tokens=4).text == call.answer.text
    assert not [text for text in tokenized if "kvblock" in text]


def test_configure_sets_llm_helper_and_tokenizer(llm: BlockAttentionLLM) -> None:
    configure(llm)
    assert Settings.llm is llm
    assert isinstance(Settings.prompt_helper, BlockPromptHelper)
    assert len(Settings.tokenizer("abc")) == 3
