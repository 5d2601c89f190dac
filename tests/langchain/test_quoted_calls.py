"""Calls that an answer quotes are text; those that it makes are calls."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage

from blockattn_rag.langchain import ChatBlockAttention
from blockattn_rag.output import FORMATS
from blockattn_rag.prompts.blocks import Span
from tests.chat_templates import QWEN3
from tests.langchain.test_tools import ask
from tests.quoting import CALLS, called, delete_all, quoted, quoting_model
from tests.scripted import ScriptedEngine

HOW = pytest.mark.parametrize("how", ["invoke", "stream"])
FORM = pytest.mark.parametrize("form", FORMATS)
MADE = [("delete_all", {"now": True})]


def answer_of(
    form: str, spans: list[Span], how: str, special: bool | None = True, **bound: Any
) -> tuple[str, list[tuple[str, Any]]]:
    engine = ScriptedEngine(lambda _: spans, model=quoting_model(form, special))
    chat = ChatBlockAttention(engine=engine, max_tokens=400)
    answer: AIMessage = ask(chat.bind_tools([delete_all], **bound), how)
    assert not answer.invalid_tool_calls
    return str(answer.content), [(one["name"], one["args"]) for one in answer.tool_calls]


@HOW
@FORM
@pytest.mark.parametrize("special", [True, False])
def test_a_quoted_call_is_text_where_its_mark_is_a_token(
    form: str, how: str, special: bool
) -> None:
    (said,) = quoted(form)
    assert answer_of(form, quoted(form), how, special) == (said.text, [])
    text = f"{CALLS[form]} is quoted."
    if form != "llama3":  # whose calls need no mark where an answer begins
        assert answer_of(form, [Span(text, "conversation")], how, special) == (text, [])
    assert answer_of(form, called(form), how, special) == ("I do.", MADE)


@HOW
def test_a_call_is_made_beside_a_quoted_one(how: str) -> None:
    said = [*quoted("hermes"), *called("hermes"), *quoted("hermes")]
    before, after = f"{said[0].text}I do.", said[0].text
    assert answer_of("hermes", said, how) == (before + after, MADE)


@HOW
def test_marks_are_found_behind_thoughts(how: str) -> None:
    model = quoting_model("hermes", template=QWEN3)
    thoughts = Span(f"<think>\nIt says {CALLS['hermes']}.\n</think>\n\n", "conversation")
    said = [thoughts, Span(CALLS["hermes"], "template"), *quoted("hermes"), *called("hermes")]
    chat = ChatBlockAttention(engine=ScriptedEngine(lambda _: said, model=model), max_tokens=600)
    answer: AIMessage = ask(chat.bind_tools([delete_all]), how)
    assert answer.content == f"{quoted('hermes')[0].text}I do."
    assert [one["args"] for one in answer.tool_calls] == [{"now": True}] * 2
    assert CALLS["hermes"] in answer.additional_kwargs["reasoning_content"]


@HOW
@FORM
def test_a_constrained_answer_is_text_or_calls_where_marks_are_no_tokens(
    form: str, how: str
) -> None:
    bound: dict[str, Any] = {"special": None, "tool_calls": "constrained"}
    (said,) = quoted(form)
    assert answer_of(form, [said], how, **bound) == (said.text, [])
    call = CALLS[form].removeprefix("<|python_tag|>")
    assert answer_of(form, [Span(call, "template")], how, **bound) == ("", MADE)


@HOW
def test_text_in_a_constrained_answer_cannot_become_a_call(how: str) -> None:
    said = [Span("Well. ", "template"), Span(CALLS["hermes"], "template")]
    free = answer_of("hermes", said, how, special=None)
    assert free == ("Well.", MADE)  # without a token, nothing tells them apart
    whole = said[0].text + said[1].text
    bound: dict[str, Any] = {"special": None, "tool_calls": "constrained"}
    assert answer_of("hermes", said, how, **bound) == (whole, [])


@HOW
def test_a_call_quoted_in_a_json_answer_beside_tools_is_text(how: str) -> None:
    text = '{"said": "<tool_call>{\'name\': 1}</tool_call>"}'
    asked = {"type": "json_schema", "json_schema": {"name": "Said", "schema": {"type": "object"}}}
    spans = [Span(text, "template")]
    found = answer_of("hermes", spans, how, special=None, response_format=asked)
    assert found == (text, [])


def test_calls_are_constrained_by_the_model_s_defaults_too() -> None:
    said = [Span(f"Well. {CALLS['hermes']}", "template")]
    engine = ScriptedEngine(lambda _: said, model=quoting_model("hermes", None))
    defaults = {"tool_calls": "constrained"}
    chat = ChatBlockAttention(engine=engine, max_tokens=200, generate_kwargs=defaults)
    assert chat.invoke("Without tools?").content == said[0].text
    assert not chat.bind_tools([delete_all]).invoke("?").tool_calls
    with pytest.raises(ValueError, match="tool_calls must be 'free' or 'constrained'; found 'no'"):
        chat.bind_tools([delete_all], tool_calls="no")


def test_other_options_of_tools_are_no_defaults_of_a_model() -> None:
    engine = ScriptedEngine(lambda _: called("hermes"), model=quoting_model("hermes"))
    defaults = {"tool_choice": "any"}
    chat = ChatBlockAttention(engine=engine, max_tokens=200, generate_kwargs=defaults)
    with pytest.raises(ValueError, match="tool_choice"):
        chat.invoke("?")
