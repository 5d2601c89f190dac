"""Tools of a request: choices, definitions and grammars."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.output.tool_use import ToolUse, choice_of, prompt_spans
from blockattn_rag.prompts.blocks import text_of
from tests.chat_templates import QWEN25
from tests.models import tiny_tokenizer


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def use(*names: str, template: str | None = QWEN25, **options: Any) -> ToolUse:
    call = {"tools": [tool(name) for name in names], **options}
    parsed = ToolUse.of_call(call, lambda: tiny_tokenizer(chat=template), "small")
    assert parsed is not None
    return parsed


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
def test_a_tool_choice_is_a_keyword_or_the_name_of_a_tool(choice: Any, expected: str) -> None:
    assert choice_of(choice, [tool("add"), tool("any")]) == expected


@pytest.mark.parametrize(
    "choice",
    [{"function": "add"}, {"function": {"name": None}}, {"function": 3, "name": "add"}, {}, 1, "x"],
)
def test_invalid_tool_choices_are_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"the name of a tool \(add\)"):
        choice_of(choice, [tool("add")])


def test_two_tools_may_have_the_same_name() -> None:
    # LangChain's standard tests bind several tools with one name. A call may mean any of them.
    held = use("add", "add", tool_choice="add")
    assert "call_1" in held.engine_options(tiny_tokenizer(), {})["structured_outputs"]["grammar"]


@pytest.mark.parametrize("definition", [{}, "add", {"function": {}}, {"name": "add"}])
def test_invalid_tool_definitions_are_refused(definition: Any) -> None:
    with pytest.raises(TypeError, match=r"A tool's definition must be \{'type': 'function'.*found"):
        ToolUse.of_call({"tools": [definition]}, tiny_tokenizer, "small")


def test_a_required_call_works_without_tool_support_in_the_template() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    held = use("add", template=template, tool_choice="any")
    turns = [{"role": "user", "content": "?"}]
    assert '"name": "add"' in text_of(prompt_spans(tiny_tokenizer(chat=template), turns, held))
    with pytest.raises(ValueError, match=r"small does not support tools.*require a call"):
        use("add", template=template)
    with pytest.raises(ValueError, match="does not support tools"):
        use("add", template=None, tool_choice="any")


@pytest.mark.parametrize(
    "options", [{"tool_choice": "any"}, {"tool_choice": "add"}, {"tool_calls": "constrained"}]
)
def test_a_grammar_that_forbids_required_or_constrained_calls_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="the regular expression 'a' with tools"):
        use("add", **options).engine_options(
            tiny_tokenizer(), {"structured_outputs": {"regex": "a"}}
        )


def test_unknown_tool_call_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid tool_calls 'all': expected 'free'"):
        use("add", tool_calls="all")


def test_results_precede_the_question_if_the_template_drops_them() -> None:
    template = "{# tool #}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    turns = [{"role": "user", "content": "1 + 2?"}, {"role": "tool", "content": "3"}]
    text = text_of(prompt_spans(tiny_tokenizer(chat=template), turns, None))
    assert text == "3\n\n1 + 2?"
