"""Tool calls of the OpenAI route: calls made by the model are calls, and quoted ones are text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from blockattn_rag.errors import ProtocolError
from blockattn_rag.output import FORMATS
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server.vllm.answers import ServedTools
from tests.chat_templates import QWEN3
from tests.models import tiny_tokenizer
from tests.quoting import CALLS, called, quoted, quoting_model
from tests.server.served_answers import Definition, chat_request, streamed_answer, whole_answer

FORM = pytest.mark.parametrize("form", FORMATS)
NOW = {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]}
TOOL = {"type": "function", "function": {"name": "delete_all", "parameters": NOW}}
MADE = [("delete_all", {"now": True})]


def served(
    form: str, template: str | None = None, **fields: Any
) -> tuple[ServedTools, BlockTokenizer]:
    """Return the tools of a chat with a model that uses this call format, and its tokenizer."""
    tokenizer = quoting_model(form, template=template).tokenizer
    tools = ServedTools.of(chat_request([TOOL], **fields), tokenizer.tokenizer)
    assert tools is not None
    return tools, tokenizer


def calls_of(calls: Sequence[Any] | None) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in calls or ()]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def said(form: str, spans: list[Span], **fields: Any) -> Any:
    """Return text, calls, finish reason and thoughts, after checking streams of several sizes."""
    tools, tokenizer = served(form, **fields)
    ids = tokenizer.final_ids(spans, first=False)
    choice = whole_answer(tools, ids)
    message = choice["message"]
    calls = calls_of(message["tool_calls"])
    whole = message["content"] or "", calls, choice["finish_reason"], message["reasoning"] or ""
    for size in (1, 3, 50):
        chunks = streamed_answer(tools, ids, size)
        deltas = [chunk["delta"] for chunk in chunks]
        streamed = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        text, thoughts = (
            "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")
        )
        assert (text, calls_of(streamed), chunks[-1]["finish_reason"], thoughts) == whole
        assert [call["index"] for call in streamed] == [*range(len(streamed))]
    return whole


@FORM
def test_a_quoted_call_is_text(form: str) -> None:
    assert said(form, quoted(form)) == (quoted(form)[0].text, [], "stop", "")


@FORM
def test_a_call_of_the_model_is_made(form: str) -> None:
    assert said(form, called(form)) == ("I do.", MADE, "tool_calls", "")


def test_calls_next_to_quoted_ones_are_made() -> None:
    spans = [*quoted("hermes"), *called("hermes"), *quoted("hermes")]
    quote = quoted("hermes")[0].text
    assert said("hermes", spans) == (f"{quote}I do.{quote}", MADE, "tool_calls", "")


@pytest.mark.parametrize("shown", [True, False])
def test_calls_in_thoughts_are_not_made(shown: bool) -> None:
    thought = Span(CALLS["hermes"], "template")
    spans = [
        Span("<think>\nPerhaps ", "conversation"),
        thought,
        Span("?\n</think>\n\n", "conversation"),
    ]
    options = {"template": QWEN3, "include_reasoning": shown}
    text, calls, reason, thoughts = said("hermes", [*spans, *quoted("hermes")], **options)
    assert (text, calls, reason) == (quoted("hermes")[0].text, [], "stop")
    assert ("Perhaps" in thoughts) == shown
    text, calls, reason, _ = said("hermes", [*spans, *called("hermes")], **options)
    assert (text, calls, reason) == ("I do.", MADE, "tool_calls")


def test_calls_before_a_stop_string_are_made() -> None:
    spans = [*called("hermes"), Span(" STOP and more", "conversation")]
    assert said("hermes", spans, stop=["STOP"]) == ("I do.", MADE, "tool_calls", "")


def test_text_is_streamed_until_the_first_call() -> None:
    tools, tokenizer = served("hermes")
    ids = tokenizer.final_ids([*quoted("hermes"), *called("hermes")], first=False)
    chunks = streamed_answer(tools, ids, size=1)
    assert sum(bool(chunk["delta"].get("content")) for chunk in chunks) > 20
    assert all("tool_calls" not in chunk["delta"] for chunk in chunks[:-1])


def test_malformed_call_is_shown_as_text() -> None:
    broken = Span('<tool_call>\n{"name": "delete_all", "arguments": {"now"', "template")
    text, calls, reason, _ = said("hermes", [Span("I do.", "conversation"), broken])
    assert text.startswith("I do.")
    assert '{"name": "delete_all", "arguments": {"now"' in text
    assert (calls, reason) == ([], "stop")


@pytest.mark.parametrize("wanted", [None, True])
def test_token_ids_are_returned_on_request_only(wanted: bool | None) -> None:
    tools, tokenizer = served("hermes", return_token_ids=wanted)
    ids = tokenizer.final_ids(called("hermes"), first=False)
    assert ("token_ids" in whole_answer(tools, ids)) == bool(wanted)
    chunks = streamed_answer(tools, ids)
    assert all(("token_ids" in chunk) == bool(wanted) for chunk in chunks)


@pytest.mark.parametrize(
    "choice", ["required", Definition(type="function", function={"name": "delete_all"})]
)
def test_a_required_call_is_enforced_by_a_grammar(choice: Any) -> None:
    tools, _ = served("hermes", tool_choice=choice)
    assert "delete_all" in tools.options["structured_outputs"]["grammar"]
    assert tools.options["response_format"] is None


def test_optional_calls_need_no_grammar() -> None:
    tools, _ = served("hermes")
    assert tools.options == {"response_format": None, "structured_outputs": None}
    assert not tools.has_own_grammar


def test_chats_without_tools_are_unchanged() -> None:
    tokenizer = quoting_model("hermes").tokenizer.tokenizer
    assert ServedTools.of(chat_request([]), tokenizer) is None
    assert ServedTools.of(chat_request([TOOL], tool_choice="none"), tokenizer) is None
    assert ServedTools.of(chat_request([TOOL]), tiny_tokenizer()) is None


def test_invalid_choice_is_refused() -> None:
    tokenizer = quoting_model("hermes").tokenizer.tokenizer
    with pytest.raises(ProtocolError, match="delete_none"):
        ServedTools.of(chat_request([TOOL], tool_choice="delete_none"), tokenizer)
