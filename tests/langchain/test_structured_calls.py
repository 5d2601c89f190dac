"""Structured output in combination with tools, and from LangChain's agents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage
from pydantic import BaseModel, Field

from blockattn_rag.errors import IncompleteAnswerError
from tests.langchain.conftest import LOOKING_UP, look_up, scripted
from tests.saying import thinking_model
from tests.scripted import Script, prompts_of


class Tower(BaseModel):
    """A tower."""

    höhe: int = Field(ge=0, le=999, description="in metres")
    name: str = Field(max_length=20)


FOUND = Tower(höhe=214, name="Halden")
OBJECT = json.dumps(FOUND.model_dump(), ensure_ascii=False)
AS_CALL = f'<tool_call>\n{{"name": "Tower", "arguments": {OBJECT}}}\n</tool_call>'


def looking_up_first(last: str) -> Script:
    return lambda prompt: last if "<tool_response>" in prompt else LOOKING_UP


@pytest.mark.parametrize("schema", [Tower, Tower.model_json_schema()])
def test_function_calling_forces_a_call_and_returns_its_arguments(schema: Any) -> None:
    chat = scripted("It is 214 metres tall.")  # the grammar forces a call anyway
    structured = chat.with_structured_output(schema, method="function_calling", include_raw=True)
    found = structured.invoke("How tall?")
    (call,) = found["raw"].tool_calls
    assert call["name"] == "Tower"
    parsed = found["parsed"].model_dump() if schema is Tower else found["parsed"]
    assert parsed == call["args"]
    assert found["raw"].content == ""
    assert '"description": "in metres"' in prompts_of(chat)[0]
    plain = chat.with_structured_output(schema, method="function_calling")
    assert [*plain.stream("How tall?")] == [found["parsed"]]


def test_a_call_that_is_cut_off_raises() -> None:
    chat = scripted(AS_CALL, max_tokens=45)
    structured = chat.with_structured_output(Tower, method="function_calling")
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        structured.invoke("How tall?")
    with pytest.raises(IncompleteAnswerError, match="cut off at its token limit"):
        [*structured.stream("How tall?")]


@pytest.mark.parametrize("answer", [LOOKING_UP, OBJECT])
def test_a_model_with_tools_and_a_schema_calls_or_follows_the_schema(answer: str) -> None:
    model = scripted(answer).bind_tools([look_up], response_format=Tower)
    found = model.invoke("How tall?")
    called = [(one["name"], one["args"]) for one in found.tool_calls]
    assert called == ([("look_up", {"query": "towers"})] if answer == LOOKING_UP else [])
    assert found.content == ("" if called else OBJECT)


def test_tools_and_a_schema_exclude_other_text() -> None:
    found = scripted("Hm, well.").bind_tools([look_up], response_format=Tower).invoke("How tall?")
    assert found.tool_calls or Tower.model_validate_json(found.text)


def test_a_required_call_takes_precedence_over_the_schema() -> None:
    options: dict[str, Any] = {"tool_choice": "any", "response_format": Tower}
    found = scripted(LOOKING_UP).bind_tools([look_up], **options).invoke("How tall?")
    assert found.tool_calls[0]["name"] == "look_up"


@pytest.mark.parametrize(
    ("asked", "last"),
    [(ProviderStrategy(Tower), OBJECT), (Tower, OBJECT), (ToolStrategy(Tower), AS_CALL)],
)
async def test_an_agent_calls_tools_and_returns_an_object(asked: Any, last: str) -> None:
    chat = scripted(looking_up_first(last))
    agent: Any = create_agent(chat, tools=[look_up], response_format=asked)
    question: Any = {"messages": [("human", "How tall?")]}
    for state in (agent.invoke(question), await agent.ainvoke(question)):
        assert state["structured_response"] == FOUND
        assert "found towers" in [one.content for one in state["messages"]]
    assert len(prompts_of(chat)) == 4


@pytest.mark.parametrize("asked", [ProviderStrategy(Tower), ToolStrategy(Tower)])
def test_an_agent_without_tools_returns_an_object(asked: Any) -> None:
    agent: Any = create_agent(scripted("Hm."), tools=[], response_format=asked)
    state = agent.invoke({"messages": [("human", "How tall?")]})
    assert isinstance(state["structured_response"], Tower)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_an_object_is_never_mistaken_for_thoughts(method: Any, opens: bool) -> None:
    chat = scripted(
        AS_CALL if method == "function_calling" else OBJECT, model=thinking_model(opens=opens)
    )
    assert chat.to_prompt([HumanMessage("?")]).final.rstrip().endswith("<think>") is opens
    structured = chat.with_structured_output(Tower, method=method, include_raw=True)
    found = structured.invoke("How tall?")
    assert found["parsed"] == FOUND
    message = found["raw"]
    assert isinstance(message, AIMessage)
    assert "reasoning_content" not in message.additional_kwargs
    *_, last = chat.with_structured_output(Tower, method=method).stream("How tall?")
    assert last == FOUND
