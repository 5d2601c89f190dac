"""Tools of a chat model: binding, calls in answers and streams, and results in the history."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableBinding
from pydantic import BaseModel, Field

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from tests.langchain.conftest import LOOKING_UP, look_up, passages, scripted, whole
from tests.scripted import prompts_of

OTHER = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


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


def ask(model: Any, how: str, given: Any) -> AIMessage:
    if how == "stream":
        return whole(model.stream(given))
    answer: AIMessage = model.invoke(given)
    return answer


def test_every_kind_of_tool_is_converted_to_a_definition() -> None:
    chat = scripted("None.")
    plain: dict[str, Any] = {"title": "Negate", "description": "Negate.", "type": "object"}
    plain["properties"] = {"a": {"type": "integer"}}
    model = chat.bind_tools([look_up, add, Multiply, plain], strict=True)
    assert isinstance(model, RunnableBinding)
    assert model.invoke("Hi").content == "None."
    (prompt,) = prompts_of(chat)
    for name in ("look_up", "add", "Multiply", "Negate"):
        assert f'"name": "{name}"' in prompt
    assert '"description": "the other"' in prompt
    assert '"strict": true' in prompt


@pytest.mark.parametrize(
    "answer", [f"I look.\n{LOOKING_UP}", f"One\n{LOOKING_UP}\ntwo\n{LOOKING_UP}\nthree {OTHER}"]
)
def test_standard_content_separates_calls_and_text(answer: str) -> None:
    chat = scripted(answer, 400, output_version="v1")
    content: Any = whole(chat.bind_tools([look_up, add]).stream("Which towers?")).content
    kinds = [part["type"] for part in content]
    assert kinds.count("tool_call") == answer.count("<tool_call>")
    assert all({*part} <= {"type", "text", "index"} for part in content if part["type"] == "text")


@pytest.mark.parametrize("how", ["invoke", "stream"])
def test_the_next_prompt_has_calls_and_results_with_passages_as_blocks(how: str) -> None:
    chat = scripted(lambda prompt: "Two." if "<tool_response>" in prompt else LOOKING_UP)
    model = chat.bind_tools([look_up])
    asked = HumanMessage("Which towers?")
    called = ask(model, how, [asked])
    found = ToolMessage(format_blocks(passages(2)), tool_call_id=called.tool_calls[0]["id"])
    answers = [ask(model, how, [asked, called, found]) for _ in range(2)]
    assert [answer.content for answer in answers] == ["Two.", "Two."]
    last = prompts_of(chat)[-1]
    assert f"<|assistant|>\n{LOOKING_UP}<|end|>\n<|user|>\n<tool_response>\nPassage 0:" in last
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
    usage = chat.bind_tools([look_up]).invoke("Hello").usage_metadata
    assert usage is not None
    asked = [HumanMessage("Hello")]
    counted = chat.get_num_tokens_from_messages(asked, tools=[look_up])
    assert chat.get_num_tokens_from_messages(asked) < counted == usage["input_tokens"]
