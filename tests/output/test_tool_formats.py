"""What models write is what the parser reads, in every format."""

from __future__ import annotations

import pytest

from blockattn_rag.output import FORMATS, ToolCall, parse_answer
from blockattn_rag.prompts.blocks import text_of

CALLS = [ToolCall("look_up", {"q": 'ü "x"'}), ToolCall("other", {})]


@pytest.mark.parametrize("name", ["hermes", "granite", "mistral"])
def test_written_calls_are_read_back(name: str) -> None:
    spans = FORMATS[name].written(CALLS)
    read = parse_answer(text_of(spans), FORMATS[name])
    assert [(one.name, one.arguments) for one in read.calls] == [
        (one.name, one.arguments) for one in CALLS
    ]
    assert all("look_up" not in span.text for span in spans if span.parses_control)


def test_the_marks_of_a_format_are_all_that_must_stay_in_an_answer() -> None:
    assert FORMATS["hermes"].marks == ("<tool_call>", "</tool_call>")
    assert FORMATS["mistral_args"].marks == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
