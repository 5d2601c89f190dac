"""The tools of one call: choices, definitions, and grammars."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.output.tool_formats import FORMATS
from blockattn_rag.output.tool_parser import ReadAnswer
from blockattn_rag.output.tool_use import CallReading, ToolUse, choice_of, prompt_spans
from blockattn_rag.prompts.blocks import text_of
from tests.chat_templates import QWEN25
from tests.models import tiny_tokenizer


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def use(*names: str, template: str | None = QWEN25, **options: Any) -> ToolUse | None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    call = {"tools": [tool(name) for name in names], **options}
    return ToolUse.of_call(call, lambda: tokenizer, "small")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, "auto"),
        ("any", "required"),
        (True, "required"),
        (False, "none"),
        ("add", "add"),
        ({"type": "function", "function": {"name": "add"}}, "add"),
        ({"type": "tool", "name": "add"}, "add"),
        ({"function": {"name": "any"}}, "any"),
    ],
)
def test_a_choice_is_a_word_or_a_tool_s_name(choice: Any, expected: str) -> None:
    assert choice_of(choice, [tool("add"), tool("any")]) == expected


@pytest.mark.parametrize("choice", [{"function": "add"}, {"function": {"name": None}}, {}, 1, "x"])
def test_another_choice_is_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"the name of a tool \(add\); found"):
        choice_of(choice, [tool("add")])


def test_two_tools_may_have_one_name() -> None:
    # LangChain's standard tests bind several; a call of it may be of either.
    held = use("add", "add", tool_choice="add")
    assert held is not None
    assert "call_1" in held.engine_options(tiny_tokenizer(), {})["structured_outputs"]["grammar"]


@pytest.mark.parametrize("definition", [{}, "add", {"function": {}}, {"name": "add"}])
def test_what_defines_no_tool_is_refused(definition: Any) -> None:
    with pytest.raises(TypeError, match=r"A tool's definition must be \{'type': 'function'.*found"):
        ToolUse.of_call({"tools": [definition]}, tiny_tokenizer, "small")


def test_a_required_call_needs_no_template_that_knows_tools() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    held = use("add", template=template, tool_choice="any")
    assert held is not None
    assert '"name": "add"' in text_of(
        prompt_spans(_tokenizer(template), [{"role": "user", "content": "?"}], held)
    )
    with pytest.raises(ValueError, match=r"template of small supports no tools.*require a call"):
        use("add", template=template)
    with pytest.raises(ValueError, match="supports no tools"):
        use("add", template=None, tool_choice="any")


def _tokenizer(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "options", [{"tool_choice": "any"}, {"tool_choice": "add"}, {"tool_calls": "constrained"}]
)
def test_a_grammar_that_forbids_required_or_constrained_calls_is_refused(options: Any) -> None:
    held = use("add", **options)
    assert held is not None
    with pytest.raises(ValueError, match="the regular expression 'a' with tools"):
        held.engine_options(tiny_tokenizer(), {"structured_outputs": {"regex": "a"}})


def test_an_unknown_way_of_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="tool_calls must be 'free' or 'constrained'; found 'all'"):
        use("add", tool_calls="all")


def test_nothing_counts_behind_the_only_call_that_is_allowed() -> None:
    held = use("add", parallel_tool_calls=False)
    assert held is not None
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    reader = held.engine_options(tiny_tokenizer(), {})["calls"].reader()
    text, calls, invalid = ReadAnswer.of(reader.read(f"So: {call} and {call} done", last=True))
    assert (text, [one.arguments for one in calls], invalid) == ("So:", [{"a": 1}], [])
    assert reader.is_over
    assert not reader.has_loop


@pytest.mark.parametrize("form", ["mistral", "granite"])
@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_a_list_of_calls_ends_at_the_same_call_again(form: str, pieces: int) -> None:
    one = '{"name": "add", "arguments": {"a": [{}, {}], "b": "x"}}'
    other = one.replace("x", "y")
    reading = CallReading(FORMATS[form], ("add",), frozenset(), only_first=False, parallel=True)
    reader = reading.reader()
    written = f"{FORMATS[form].opening}[{one}, {other}, {other}, {other}, {other}"
    read = []
    for start in range(0, len(written), pieces):
        read += reader.read(written[start : start + pieces], last=False)
        if reader.is_over:
            break
    read += reader.read("", last=True)
    _, calls, invalid = ReadAnswer.of(read)
    assert [call.arguments["b"] for call in calls] == ["x", "y"]
    assert not invalid
    assert reader.has_loop


@pytest.mark.parametrize("given", ['{"a": 1, "b": 2}', '{"a": 1', "[]"])
def test_the_same_call_in_a_row_comes_once(given: str) -> None:
    held = use("add")
    assert held is not None
    call = f'<tool_call>{{"name": "add", "arguments": {given}}}</tool_call>\n'
    reader = held.engine_options(tiny_tokenizer(), {})["calls"].reader()
    once = reader.read(call, last=False)
    assert (len(once), reader.is_over) == (1, False)
    assert reader.read(call * 3, last=True) == []
    assert reader.is_over


def test_true_and_one_are_different_arguments() -> None:
    held = use("add")
    assert held is not None
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    reader = held.engine_options(tiny_tokenizer(), {})["calls"].reader()
    assert len(reader.read(call + call.replace("1", "true"), last=True)) == 2
    assert not reader.has_loop


def test_results_go_before_the_question_where_the_template_would_drop_them() -> None:
    template = "{# tool #}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "1 + 2?"}, {"role": "tool", "content": "3"}]
    text = text_of(prompt_spans(_tokenizer(template), turns, None))
    assert text == "3\n\n1 + 2?"
