"""Markers are removed from everything that is sent to other models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, format_blocks, without_markers
from tests.langchain.conftest import passages


def texts(messages: Any) -> list[Any]:
    return [message.content for message in messages]


def test_every_kind_of_prompt_and_message_is_cleaned() -> None:
    marked = format_blocks(passages(1))
    plain = passages(1)[0].page_content.strip()
    assert without_markers(f"a {marked}") == f"a {plain}"
    assert without_markers(StringPromptValue(text=marked)).text == plain
    assert without_markers(HumanMessage(marked)).content == plain
    parts: list[str | dict[Any, Any]] = [{"type": "text", "text": marked, "kv_handle": "x"}, marked]
    assert without_markers(HumanMessage(parts)).content == [
        {"type": "text", "text": plain, "kv_handle": "x"},
        plain,
    ]
    assert texts(without_markers([("system", marked), HumanMessage(marked)])) == [plain, plain]
    template = ChatPromptTemplate.from_messages([("human", "{text}")])
    assert texts(without_markers(template.invoke({"text": marked})).messages) == [plain]
    call = {"type": "tool_call", "id": "1", "name": "f", "args": {"page": [marked]}}
    result: list[str | dict[Any, Any]] = [
        {"type": "tool_result", "content": [{"type": "text", "text": marked}]}
    ]
    assert without_markers(AIMessage("", tool_calls=[call])).tool_calls[0]["args"] == {
        "page": [plain]
    }
    assert "kvblock" not in str(without_markers(HumanMessage(result)))
    with pytest.raises(TypeError, match="found int"):
        without_markers(3)


def failing(chat: ChatBlockAttention) -> ChatBlockAttention:
    """Return a model that fails, because it only uses stored passages and its store is empty."""
    engine = BlockAttentionEngine(chat.engine.model, on_miss="error")
    return ChatBlockAttention(engine=engine)


def test_fallbacks_of_other_packages_get_no_markers(chat: ChatBlockAttention) -> None:
    seen: list[Any] = []

    def note(value: Any) -> str:
        seen.append(value)
        return "from the fallback"

    broken = failing(chat)
    both = broken.with_fallbacks([RunnableLambda(note)])
    marked = format_blocks(passages(2))
    assert both.invoke([("system", marked), ("human", "Which?")]) == "from the fallback"
    assert "kvblock" not in str(seen)
    assert passages(2)[1].page_content.strip() in str(seen)


def test_a_fallback_to_our_own_model_keeps_markers(chat: ChatBlockAttention) -> None:
    broken = failing(chat)
    marked = [("system", format_blocks(passages(2))), ("human", "Which?")]
    others = [chat.bind(max_tokens=2).with_retry(), FakeListChatModel(responses=["no"])]
    answer = broken.with_fallbacks(others).invoke(marked)
    assert answer.response_metadata["block_attention"]["misses"] == 3
    assert answer.response_metadata["block_attention"]["mode"] == "block"


def test_tool_artifacts_need_no_markers(chat: ChatBlockAttention) -> None:
    found = [*passages(2), passages(1)[0]]
    tool = create_retriever_tool(
        RunnableLambda(lambda _: found),  # type: ignore[arg-type]
        "search",
        "finds passages",
        response_format="content_and_artifact",
    )
    call = {"type": "tool_call", "id": "1", "name": "search", "args": {"query": "x"}}
    message = tool.invoke(call)
    assert isinstance(message, ToolMessage)
    assert "kvblock" not in str(message)
    prompt = chat.to_prompt([HumanMessage("Which?"), AIMessage("", tool_calls=[call]), message])
    blocks = [block.text for block in prompt.context if block.is_passage]
    assert blocks == [document.page_content.strip() for document in found]


def test_artifacts_are_marked_only_where_they_fill_complete_lines(chat: ChatBlockAttention) -> None:
    documents = [Document("e"), Document("lines\nof text")]
    message = ToolMessage("Results:\ne\n\nlines\nof text", tool_call_id="1", artifact=documents)
    prompt = chat.to_prompt([HumanMessage("Which?"), message])
    assert [b.text for b in prompt.context if b.is_passage] == ["e", "lines\nof text"]


def test_foreign_artifact_marks_nothing(chat: ChatBlockAttention) -> None:
    message = ToolMessage("other text", tool_call_id="1", artifact=[*passages(1), "no document"])
    prompt = chat.to_prompt([HumanMessage("Which?"), message])
    assert not [block for block in prompt.context if block.is_passage]
