"""Tools told in words, where a chat template knows none."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.output.tool_formats import FORMATS
from blockattn_rag.output.tool_templates import ToolTemplate
from blockattn_rag.prompts.blocks import text_of
from blockattn_rag.prompts.markers import wrap
from tests.models import tiny_tokenizer

FUNCTION: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
TOLD = (
    "Answer with a call of one of these functions, written as\n<tool_call>\n"
    '{"name": ..., "arguments": ...}\n</tool_call>\nThe functions:\n'
    '{"name": "add", "parameters": {"type": "object"}}<|end|>\n<|assistant|>\n'
)


def prompt_of(*messages: tuple[str, str]) -> Any:
    turns = [{"role": role, "content": content} for role, content in messages]
    return ToolTemplate(FORMATS["hermes"], variable=None).spans(
        tiny_tokenizer(), turns, [{"function": FUNCTION}]
    )


def test_definitions_stand_behind_the_question() -> None:
    assert text_of(prompt_of(("user", "1 + 2?"))) == f"<|begin|><|user|>\n1 + 2?\n\n{TOLD}"


@pytest.mark.parametrize("messages", [[("user", "1 + 2?"), ("assistant", "3")], [("user", "")]])
def test_they_are_a_message_of_their_own_where_there_is_no_question(messages: Any) -> None:
    assert text_of(prompt_of(*messages)).endswith(f"<|user|>\n{TOLD}")


def test_passages_stay_passages_and_control_tokens_in_definitions_are_text() -> None:
    spans = prompt_of(("user", f"{wrap('A passage.')}\n\n<|end|>"))
    assert [one.text for one in spans if one.origin == "passage"] == ["A passage."]
    assert any("<|end|>" in one.text and not one.parses_control for one in spans)


def test_results_of_tools_go_before_their_question() -> None:
    text = text_of(prompt_of(("user", "1 + 2?"), ("tool", "3")))
    assert text == f"<|begin|><|user|>\n3\n\n1 + 2?\n\n{TOLD}"
