"""Tool calls in answers, valid, invalid, repeated and required, for every kind of request."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from tests.adapters.frameworks import EACH, EVERY_WAY, WHOLE_OR_STREAM, Framework, How
from tests.scripted import ScriptedEngine, tool_model

pytestmark = EACH

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"query": "towers"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LOOK_UP = tool("look_up", query={"type": "string"})
ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})
DIGITS = tool("digits", a=DIGIT, b=DIGIT)


def scripted(framework: Framework, answer: str) -> Any:
    return framework.chat(ScriptedEngine(lambda _: answer))


@EVERY_WAY
def test_calls_are_parsed_and_the_text_before_them_is_kept(framework: Framework, how: How) -> None:
    chat = scripted(framework, f"I look.\n{CALL}\n{OTHER}")
    found = framework.ask(chat, how, tools=[LOOK_UP, ADD])
    assert found.text == "I look."
    assert found.calls == [("look_up", {"query": "towers"}), ("add", {"a": 1, "b": 2})]
    assert not found.invalid
    assert found.finish_reason == "stop"
    assert '"name": "look_up"' in chat.engine.prompts[0]


@WHOLE_OR_STREAM
@pytest.mark.parametrize(
    ("written", "error"),
    [
        ('<tool_call>\n{"name": "look_up", "arguments": {"query": "to', "ends before the call"),
        ('<tool_call>\n{"name": "look_up", "query": "towers"}\n</tool_call>', "'arguments' once"),
    ],
)
def test_invalid_calls_are_reported(
    framework: Framework, how: How, written: str, error: str
) -> None:
    found = framework.ask(scripted(framework, f"Hm. {written}"), how, tools=[LOOK_UP])
    assert (found.text.strip(), found.calls) == ("Hm.", [])
    ((name, said, text),) = found.invalid
    assert name == "look_up"
    assert error in said
    assert '"to' in text


def test_a_call_cut_off_by_the_token_limit_is_invalid(framework: Framework) -> None:
    chat = framework.chat(ScriptedEngine(lambda _: CALL), 60)
    found = framework.ask(chat, "whole", tools=[LOOK_UP])
    assert (found.calls, len(found.invalid), found.finish_reason) == ([], 1, "length")


@WHOLE_OR_STREAM
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_repeated_call_is_returned_once(framework: Framework, how: How, choice: str) -> None:
    chat = scripted(framework, "\n".join([OTHER] + [CALL] * 4))
    found = framework.ask(chat, how, tools=[LOOK_UP, ADD], tool_choice=choice)
    assert [name for name, _ in found.calls] == ["add", "look_up"]
    assert (found.text, found.invalid) == ("", [])


@WHOLE_OR_STREAM
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_only_the_allowed_call_is_returned(framework: Framework, how: How, choice: str) -> None:
    options: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
    chat = scripted(framework, f"{CALL}\n{OTHER}\nDone.")
    found = framework.ask(chat, how, tools=[LOOK_UP, ADD], **options)
    assert [name for name, _ in found.calls] == ["look_up"]
    assert (found.text, found.invalid, found.finish_reason) == ("", [], "stop")


def test_tool_choice_none_removes_the_tools_from_the_prompt(framework: Framework) -> None:
    chat = scripted(framework, CALL)
    assert framework.ask(chat, "whole", tools=[LOOK_UP], tool_choice="none").text == CALL
    assert "look_up" not in chat.engine.prompts[0]


@WHOLE_OR_STREAM
@pytest.mark.parametrize("choice", ["any", "digits"])
def test_required_call_is_valid(framework: Framework, how: How, choice: str) -> None:
    # The model is random, not scripted.
    chat = framework.chat(BlockAttentionEngine(tool_model()), 200)
    tools = [LOOK_UP, DIGITS] if choice == "digits" else [DIGITS]
    options: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
    found = framework.ask(chat, how, tools=tools, **options)
    ((name, arguments),) = found.calls
    assert (found.text, name, sorted(arguments)) == ("", "digits", ["a", "b"])
    assert all(isinstance(digit, int) and 0 <= digit <= 9 for digit in arguments.values())
