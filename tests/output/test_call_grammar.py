"""Grammars of tool calls only allow calls that the parser accepts and that follow the schema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from blockattn_rag.output import FORMATS, ToolFormat, parse_answer
from blockattn_rag.output.tool_formats import calls_grammar
from tests.models import marked_tokenizer
from tests.output.grammars import TOKENIZER, accepts, matcher

CITY = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city"],
    "$defs": {"City": {"enum": ["Paris", "Köln"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
WRITTEN = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</tool_call>",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ],
    "llama3": [
        '{"name": "get_weather", "parameters": {"city": "Köln"}}',
        '{"name": "now", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    ],
    "mistral_args": ['[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "[TOOL_CALLS]now[ARGS]{}"],
    "granite": [
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        '<|tool_call|>[{"name": "now", "arguments": {}}]',
    ],
}
_LISTED = (
    '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'
)
SEVERAL = {
    "hermes": "\n".join(WRITTEN["hermes"]),
    "mistral": f"[TOOL_CALLS]{_LISTED}",
    "mistral_args": "".join(WRITTEN["mistral_args"]),
    "granite": f"<|tool_call|>{_LISTED}",
}


def fits(form: ToolFormat, text: str, *, special: bool = True, several: bool = True) -> bool:
    tokenizer = marked_tokenizer(form.marks, special=special)
    calls = calls_grammar(form, TOOLS, tokenizer, several=several)
    return accepts(matcher(tokenizer, grammar=calls), text, tokenizer)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_in_the_documented_format_are_allowed(name: str, special: bool) -> None:
    for text in WRITTEN[name]:
        assert fits(FORMATS[name], text, special=special)
        (call,) = parse_answer(text, FORMATS[name]).calls
        if call.name == "get_weather":
            jsonschema.validate(call.arguments, CITY)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("sound", "bad"),
    [
        ("Paris", "Rome"),
        ("city", "town"),
        ("get_weather", "get_rain"),
        ('{"city"', '{"x": 1, "city"'),
        ('"Paris"', '"Paris", "x": 1'),
    ],
)
def test_arguments_that_violate_the_schema_are_not_allowed(name: str, sound: str, bad: str) -> None:
    text = WRITTEN[name][0].replace("Köln", "Paris")
    assert fits(FORMATS[name], text)
    assert not fits(FORMATS[name], text.replace(sound, bad))


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_cannot_be_replaced_by_text_or_the_end(name: str) -> None:
    assert not fits(FORMATS[name], "")
    assert not fits(FORMATS[name], "Well.")
    assert not fits(FORMATS[name], WRITTEN[name][0] + " Well.")


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls_are_only_allowed_if_calls_may_be_parallel(name: str) -> None:
    assert fits(FORMATS[name], SEVERAL[name])
    assert len(parse_answer(SEVERAL[name], FORMATS[name]).calls) == 2
    assert not fits(FORMATS[name], SEVERAL[name], several=False)


def test_tool_names_that_need_escaping_are_supported() -> None:
    tools = [{"type": "function", "function": {"name": 'say "hi"'}}]
    calls = calls_grammar(FORMATS["llama3"], tools, TOKENIZER, several=False)
    assert accepts(matcher(grammar=calls), '{"name": "say \\"hi\\"", "parameters": {}}')


@pytest.mark.parametrize("special", [True, False, None])
@pytest.mark.parametrize("name", FORMATS)
def test_first_token_decides_between_text_and_calls(name: str, special: bool | None) -> None:
    form = FORMATS[name]
    tokenizer = TOKENIZER if special is None else marked_tokenizer(form.marks, special=special)
    calls = calls_grammar(form, TOOLS, tokenizer, several=True, or_text=True)
    fitting = matcher(tokenizer, grammar=calls)
    quoted = f"It says {WRITTEN[name][0]}." if special is None else "It says {}, <tool> [TOOL]."
    for text in ("", "Well.", " \n", "Ünï 🙂\n\nWell", quoted, *WRITTEN[name]):
        assert accepts(fitting, text, tokenizer)
    opened = [form.opening, f" \n\x1c{form.opening}", f"{form.opening}x", "<think>x", " <think>"]
    for text in [*opened, *(["{", ' {"a": 1}'] if form.is_bare else [])]:
        assert not accepts(fitting, text, tokenizer)
