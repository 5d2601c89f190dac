"""Tool calls that an answer merely quotes are text; calls that the model makes are calls."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.output import FORMATS
from blockattn_rag.prompts.blocks import Span
from tests.adapters.frameworks import EACH, WHOLE_OR_STREAM, Framework, How
from tests.chat_templates import QWEN3
from tests.quoting import CALLS, called, quoted, quoting_model
from tests.scripted import ScriptedEngine

pytestmark = EACH
# Streams are tested with one call format; the parser's tests stream all of them.
FORM = pytest.mark.parametrize(
    ("form", "how"), [*((form, "whole") for form in FORMATS), ("hermes", "stream")]
)
MADE = [("delete_all", {"now": True})]
NOW = {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]}
TOOL = {"type": "function", "function": {"name": "delete_all", "parameters": NOW}}


def answer_of(
    framework: Framework,
    form: str,
    spans: list[Span],
    how: How,
    special: bool | None = True,
    **options: Any,
) -> tuple[str, list[tuple[str, Any]]]:
    engine = ScriptedEngine(lambda _: spans, model=quoting_model(form, special))
    found = framework.ask(framework.chat(engine), how, tools=[TOOL], **options)
    assert not found.invalid
    return found.text, found.calls


@pytest.mark.parametrize(
    ("form", "special", "how"),
    [
        *((form, True, "whole") for form in FORMATS),
        ("hermes", True, "stream"),
        ("hermes", False, "whole"),
        ("hermes", False, "stream"),
    ],
)
def test_a_quoted_call_is_text(framework: Framework, form: str, how: How, special: bool) -> None:
    (said,) = quoted(form)
    assert answer_of(framework, form, quoted(form), how, special) == (said.text, [])
    text = f"{CALLS[form]} is quoted."
    if form != "llama3":  # at the start of an answer, its calls need no delimiter
        spans = [Span(text, "conversation")]
        assert answer_of(framework, form, spans, how, special) == (text, [])
    assert answer_of(framework, form, called(form), how, special) == ("I do.", MADE)


@WHOLE_OR_STREAM
def test_a_call_next_to_a_quoted_call_is_made(framework: Framework, how: How) -> None:
    said = [*quoted("hermes"), *called("hermes"), *quoted("hermes")]
    expected = f"{said[0].text}I do.{said[0].text}", MADE
    assert answer_of(framework, "hermes", said, how) == expected


@WHOLE_OR_STREAM
def test_calls_are_found_after_thoughts(framework: Framework, how: How) -> None:
    model = quoting_model("hermes", template=QWEN3)
    thoughts = Span(f"<think>\nIt says {CALLS['hermes']}.\n</think>\n\n", "conversation")
    said = [thoughts, Span(CALLS["hermes"], "template"), *quoted("hermes"), *called("hermes")]
    chat = framework.chat(ScriptedEngine(lambda _: said, model=model), 600)
    found = framework.ask(chat, how, tools=[TOOL])
    assert found.text == f"{quoted('hermes')[0].text}I do."
    assert found.calls == MADE * 2
    assert CALLS["hermes"] in found.thoughts


@FORM
def test_a_constrained_answer_is_either_text_or_calls(
    framework: Framework, form: str, how: How
) -> None:
    options: dict[str, Any] = {"special": None, "tool_calls": "constrained"}
    (said,) = quoted(form)
    assert answer_of(framework, form, [said], how, **options) == (said.text, [])
    call = Span(CALLS[form].removeprefix("<|python_tag|>"), "template")
    assert answer_of(framework, form, [call], how, **options) == ("", MADE)


@WHOLE_OR_STREAM
def test_text_in_a_constrained_answer_cannot_become_a_call(framework: Framework, how: How) -> None:
    said = [Span("Well. ", "template"), Span(CALLS["hermes"], "template")]
    free = answer_of(framework, "hermes", said, how, special=None)
    assert free == ("Well.", MADE)  # without special tokens, a quoted call cannot be distinguished
    options: dict[str, Any] = {"special": None, "tool_calls": "constrained"}
    text = said[0].text + said[1].text
    assert answer_of(framework, "hermes", said, how, **options) == (text, [])


@WHOLE_OR_STREAM
def test_a_call_quoted_in_a_json_answer_with_tools_is_text(framework: Framework, how: How) -> None:
    text = '{"said": "<tool_call>{\'name\': 1}</tool_call>"}'
    asked = {"type": "json_schema", "json_schema": {"name": "Said", "schema": {"type": "object"}}}
    spans = [Span(text, "template")]
    found = answer_of(framework, "hermes", spans, how, special=None, response_format=asked)
    assert found == (text, [])


def test_calls_may_be_constrained_by_default(framework: Framework) -> None:
    said = [Span(f"Well. {CALLS['hermes']}", "template")]
    engine = ScriptedEngine(lambda _: said, model=quoting_model("hermes", None))
    chat = framework.chat(engine, generate_kwargs={"tool_calls": "constrained"})
    assert framework.ask(chat, "whole").text == said[0].text
    assert not framework.ask(chat, "whole", tools=[TOOL]).calls
    with pytest.raises(ValueError, match="Invalid tool_calls 'no': expected 'free'"):
        framework.ask(chat, "whole", tools=[TOOL], tool_calls="no")


def test_other_tool_options_are_refused_as_defaults(framework: Framework) -> None:
    engine = ScriptedEngine(lambda _: called("hermes"), model=quoting_model("hermes"))
    chat = framework.chat(engine, generate_kwargs={"tool_choice": "any"})
    with pytest.raises(ValueError, match="tool_choice"):
        framework.ask(chat, "whole")
