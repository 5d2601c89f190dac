"""Tools of a chat model: binding, calls in answers and streams, and results in the history."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.runnables import RunnableBinding
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from tests.langchain.conftest import passages
from tests.scripted import Script, ScriptedEngine, prompts_of

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"query": "towers"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@tool
def look_up(query: str) -> str:
    """Look something up."""
    return f"found {query}"


def add(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


class Multiply(BaseModel):
    """Multiply numbers."""

    a: int = Field(description="one")
    b: int = Field(description="the other")


def scripted(answer: str | Script) -> ChatBlockAttention:
    script = (lambda _: answer) if isinstance(answer, str) else answer
    return ChatBlockAttention(engine=ScriptedEngine(script), max_tokens=300)


def ask(model: Any, how: str, given: Any = "Which towers?") -> AIMessage:
    if how == "invoke":
        answer = model.invoke(given)
        assert isinstance(answer, AIMessage)
        return answer
    whole = AIMessageChunk(content="")
    for chunk in model.stream(given):
        whole += chunk
    return whole


def test_every_kind_of_tool_is_converted_to_a_definition() -> None:
    chat = scripted("None.")
    plain: dict[str, Any] = {"title": "Negate", "description": "Negate.", "type": "object"}
    plain["properties"] = {"a": {"type": "integer"}}
    model = chat.bind_tools([look_up, add, Multiply, plain], strict=True)
    assert isinstance(model, RunnableBinding)
    assert model.invoke("Hi").content == "None."
    (prompt,) = prompts_of(chat)
    for expected in (
        '"name": "look_up"',
        '"name": "add"',
        '"name": "Multiply"',
        '"name": "Negate"',
    ):
        assert expected in prompt
    assert '"description": "the other"' in prompt
    assert '"strict": true' in prompt


@pytest.mark.parametrize("answer", [f"I look.\n{CALL}", f"One\n{CALL}\ntwo\n{CALL}\nthree {OTHER}"])
def test_standard_content_separates_calls_and_text(answer: str) -> None:
    engine = ScriptedEngine(lambda _: answer)
    chat = ChatBlockAttention(engine=engine, max_tokens=400, output_version="v1")
    chunks: Any = chat.bind_tools([look_up, add]).stream("Which towers?")
    first, *others = chunks
    content: Any = add_ai_message_chunks(first, *others).content
    kinds = [one["type"] for one in content]
    assert kinds.count("tool_call") == answer.count("<tool_call>")
    assert all({*one} <= {"type", "text", "index"} for one in content if one["type"] == "text")


@pytest.mark.parametrize("how", ["invoke", "stream"])
def test_the_next_prompt_has_calls_and_results_with_passages_as_blocks(how: str) -> None:
    chat = scripted(lambda prompt: "Two." if "<tool_response>" in prompt else CALL)
    model = chat.bind_tools([look_up])
    asked = HumanMessage("Which towers?")
    called = ask(model, how, [asked])
    found = ToolMessage(format_blocks(passages(2)), tool_call_id=called.tool_calls[0]["id"])
    answers = [ask(model, how, [asked, called, found]) for _ in range(2)]
    assert [answer.content for answer in answers] == ["Two.", "Two."]
    last = prompts_of(chat)[-1]
    assert f"<|assistant|>\n{CALL}<|end|>\n<|user|>\n<tool_response>\nPassage 0:" in last
    reuse = answers[1].response_metadata["block_attention"]
    assert (reuse["hits"], reuse["misses"]) == (3, 0)  # two passages and the text before them


def test_a_malformed_call_is_part_of_the_next_prompt() -> None:
    chat = scripted('<tool_call>\n{"name": "look_up"}\n</tool_call>')
    answer = chat.bind_tools([look_up]).invoke("?")
    chat.invoke([HumanMessage("?"), answer, HumanMessage("Once more.")])
    assert '<|assistant|>\n{"name": "look_up"}<|end|>' in prompts_of(chat)[-1]


def test_a_template_without_tool_support_is_refused(engine: BlockAttentionEngine) -> None:
    chat = ChatBlockAttention(engine=engine)
    with pytest.raises(ValueError, match=r"does not support tools.*RetrieveFirst"):
        chat.bind_tools([look_up])
    with pytest.raises(ValueError, match=f"template of {chat.model_name} does not support tools"):
        chat.invoke("Hi", tools=[{"type": "function", "function": {"name": "f"}}])


def test_tokens_are_counted_with_tools() -> None:
    chat = scripted("Hi.")
    messages = [HumanMessage("Hello")]
    answer = chat.bind_tools([look_up]).invoke(messages)
    counted = chat.get_num_tokens_from_messages(messages, tools=[look_up])
    assert answer.usage_metadata is not None
    assert counted == answer.usage_metadata["input_tokens"]
    assert counted > chat.get_num_tokens_from_messages(messages)
