"""Calls that an answer quotes are text; those that it makes are calls."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool

from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.output import FORMATS
from blockattn_rag.prompts.blocks import Span
from tests.llama_index.test_tools import calls_of
from tests.quoting import CALLS, called, delete_all, quoted, quoting_model
from tests.scripted import ScriptedEngine

HOW = pytest.mark.parametrize("how", ["chat", "stream"])
TOOL = FunctionTool.from_defaults(delete_all)
MADE = [("delete_all", {"now": True})]


def answer_of(
    form: str, spans: list[Span], how: str, special: bool | None = True, **options: Any
) -> tuple[str | None, list[tuple[str, Any]]]:
    engine = ScriptedEngine(lambda _: spans, model=quoting_model(form, special))
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=200)
    given: Any = {"tools": [TOOL], "user_msg": "Well?", **options}
    if how == "chat":
        response = llm.chat_with_tools(**given)
    else:
        steps = [*llm.stream_chat_with_tools(**given)]
        response = steps[-1]
        assert "".join(one.delta or "" for one in steps) == (response.message.content or "")
    return response.message.content, calls_of(response)


@HOW
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("special", [True, False])
def test_a_quoted_call_is_text_where_its_mark_is_a_token(
    form: str, how: str, special: bool
) -> None:
    (said,) = quoted(form)
    assert answer_of(form, quoted(form), how, special) == (said.text, [])
    assert answer_of(form, called(form), how, special) == ("I do.", MADE)


@HOW
def test_text_in_a_constrained_answer_cannot_become_a_call(how: str) -> None:
    said = [Span(f"Well. {CALLS['hermes']}", "template")]
    assert answer_of("hermes", said, how, special=None) == ("Well.", MADE)
    constrained: dict[str, Any] = {"special": None, "tool_calls": "constrained"}
    assert answer_of("hermes", said, how, **constrained) == (said[0].text, [])
    call = [Span(CALLS["hermes"], "template")]
    assert answer_of("hermes", call, how, **constrained)[1] == MADE


def test_calls_are_constrained_by_the_model_s_defaults_too() -> None:
    said = [Span(f"Well. {CALLS['hermes']}", "template")]
    engine = ScriptedEngine(lambda _: said, model=quoting_model("hermes", None))
    defaults = {"tool_calls": "constrained"}
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=200, generate_kwargs=defaults)
    assert str(llm.complete("Without tools?")) == said[0].text
    assert not calls_of(llm.chat_with_tools([TOOL], "Well?"))


def test_other_options_of_tools_are_no_defaults_of_a_model() -> None:
    engine = ScriptedEngine(lambda _: called("hermes"), model=quoting_model("hermes"))
    options: dict[str, Any] = {"engine": engine, "max_new_tokens": 200}
    llm = BlockAttentionLLM(**options, generate_kwargs={"tool_choice": "any"})
    with pytest.raises(ValueError, match="tool_choice"):
        llm.chat([ChatMessage("?")])
    with pytest.raises(ValueError, match="tool_calls"):
        BlockAttentionLLM(**options).complete("?", tool_calls="constrained")
