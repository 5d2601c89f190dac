"""Settings of the LLM: template variables and thoughts."""

from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import ChatMessage

from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.model import BlockModel
from tests.engines import tuned_model
from tests.llama_index.conftest import RecordingEngine
from tests.saying import says, thinking_tokenizer

ANSWER = "<think>\nIt is deep.\n</think>\n\n31 metres."
ASKED = [ChatMessage("How deep?")]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tuned_model(thinking_tokenizer())


@pytest.fixture
def engine(model: BlockModel) -> RecordingEngine:
    return RecordingEngine(model)


@pytest.fixture
def llm(engine: RecordingEngine) -> BlockAttentionLLM:
    return BlockAttentionLLM(engine=engine, max_new_tokens=2)


def test_variables_that_would_be_ignored_are_refused(engine: RecordingEngine) -> None:
    own = BlockAttentionLLM(
        engine=engine,
        messages_to_prompt=lambda messages: "".join(str(m.content) for m in messages),
        generate_kwargs={"chat_template_kwargs": {"enable_thinking": False}},
    )
    with pytest.raises(ValueError, match="messages_to_prompt replaces the template"):
        own.chat(ASKED)


async def test_thoughts_of_completions_and_streams(llm: BlockAttentionLLM) -> None:
    completion = llm.complete("How deep?", **says(ANSWER))
    assert completion.text == "31 metres."
    assert completion.additional_kwargs["thinking"] == "It is deep."
    streamed = [step async for step in await llm.astream_chat(ASKED, **says(ANSWER))]
    for steps in (list(llm.stream_chat(ASKED, **says(ANSWER))), streamed):
        deltas = [step.additional_kwargs.get("thinking_delta") for step in steps]
        assert "".join(filter(None, deltas)) == "It is deep."
        assert sum(map(bool, deltas)) > 5


def test_the_template_receives_earlier_thoughts(llm: BlockAttentionLLM) -> None:
    earlier = llm.chat(ASKED, **says(ANSWER)).message
    final = llm.to_prompt([*ASKED, earlier, *ASKED]).final
    assert "<think>\nIt is deep.\n</think>\n\n31 metres.<|end|>" in final
