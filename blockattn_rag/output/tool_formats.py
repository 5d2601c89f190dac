"""Tool calls, their formats as documented by model vendors, and their grammars."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockattn_rag.output.answers import OPENING as THOUGHTS
from blockattn_rag.output.schema import prepared
from blockattn_rag.prompts.blocks import Span

ID_LENGTH = 9
"""Length of call ids. Mistral's chat templates require this length; others accept it."""

_HALF = re.compile("[\ud800-\udfff]")


def new_call_id() -> str:
    return secrets.token_hex(ID_LENGTH)[:ID_LENGTH]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's tool call, with its arguments by name."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=new_call_id)

    def to_dict(self) -> dict[str, Any]:
        """Convert the call to the form used in chat messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """Invalid tool call in a model's answer. ``text``: As written. ``error``: Why it is invalid."""

    text: str
    error: str
    name: str | None = None
    id: str = field(default_factory=new_call_id)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a model family writes tool calls.

    Args:
        opening: Mark before a call or a list of calls.
        closing: Mark after a call. Empty: the call ends with its JSON.
        is_list: Whether calls are written as a single JSON list.
        arguments_mark: Mark between a tool's name and its arguments, in formats that do not put
            both in one JSON object.
        id_mark: Optional mark between tool name and call id.
        argument_keys: Accepted keys for a call's arguments, with the documented key first.
        is_bare: Whether a JSON object at the start of an answer is a call even without ``opening``.
        one_a_message: Whether each message in the history may have at most one call.
    """

    name: str
    opening: str
    closing: str = ""
    is_list: bool = False
    arguments_mark: str = ""
    id_mark: str = ""
    argument_keys: tuple[str, ...] = ("arguments",)
    is_bare: bool = False
    one_a_message: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format, without empty ones."""
        marks = (self.opening, self.closing, self.arguments_mark, self.id_mark)
        return tuple(mark for mark in marks if mark)

    def written(self, calls: Sequence[ToolCall]) -> tuple[Span, ...]:
        """Write calls as the model would, for chat templates that do not render calls."""
        before, between, after = "\n", f"\n{self.closing}\n{self.opening}\n", f"\n{self.closing}"
        if self.is_list:
            before, between, after = "[", ", ", "]"
        spans = [Span(self.opening + before, "template")]
        for call in calls:
            written = {"name": call.name, self.argument_keys[0]: call.arguments}
            text = json.dumps(written, ensure_ascii=False)
            spans += [Span(text, "answer"), Span(between, "template")]
        return (*spans[:-1], Span(after, "template"))


FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        # Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, Granite 4: one object between tags per call.
        ToolFormat("hermes", opening="<tool_call>", closing="</tool_call>"),
        # Mistral up to tokenizer version 7: a single list.
        ToolFormat("mistral", opening="[TOOL_CALLS]", is_list=True),
        # Mistral from version 11: opening, name and arguments for each call.
        ToolFormat(
            "mistral_args", opening="[TOOL_CALLS]", arguments_mark="[ARGS]", id_mark="[CALL_ID]"
        ),
        # Granite 3: a single list.
        ToolFormat("granite", opening="<|tool_call|>", is_list=True),
        # Llama 3.1 to 3.3: the answer is an object, {"name": ..., "parameters": ...}.
        ToolFormat(
            "llama3",
            opening="<|python_tag|>",
            argument_keys=("parameters", "arguments"),
            is_bare=True,
            one_a_message=True,
        ),
    )
}
"""Known formats by name, in the order in which ``tool_template`` tries them."""


def mark_ids(form: ToolFormat, tokenizer: Any) -> dict[str, int]:
    """Return the token ids of marks that are single added tokens of a transformers tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    numbers = {str(token): number for number, token in added.items()}
    return {mark: numbers[mark] for mark in form.marks if mark in numbers}


# Calls have the white space that chat templates write, and no other.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def calls_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    several: bool,
    answer: dict[str, Any] | None = None,
    or_text: bool = False,
) -> str:
    """Create a grammar for answers with one or more tool calls, in llguidance's dialect of Lark.

    Args:
        tokenizer: The model's transformers tokenizer. A mark that is an added token must be
            generated as that token. Other marks are text.
        several: Whether an answer may have more than one call.
        answer: JSON schema for answers without calls. Default: answers must have calls.
        or_text: Whether text is allowed instead of calls. It must not start like calls or thoughts.
    """
    numbers = mark_ids(form, tokenizer)

    def literal(mark: str) -> str:
        return f"<[{numbers[mark]}]>" if mark in numbers else _text(mark)

    opening = literal(form.opening)
    rules: list[str] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        if form.arguments_mark:
            mark = literal(form.arguments_mark)
            call = f"{_text(function['name'])} {mark} arguments_{index}"
        else:
            begin = f'{{"name": {name}, "{form.argument_keys[0]}": '
            call = f'{_text(begin)} arguments_{index} "}}"'
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rules += [f"call_{index}: {call}", f"arguments_{index}: {_object(schema)}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    if form.is_list:
        more = f" ({_text(', ')} call)*" if several else ""
        start = f'{opening} " "? "[" call{more} "]"'
    elif form.closing:
        rules.append(f'tagged: {opening} "\\n" call "\\n" {literal(form.closing)}')
        start = "tagged" + (' ("\\n" tagged)*' if several else "")
    elif form.arguments_mark:
        start = f"{opening} call" + (f" ({opening} call)*" if several else "")
    else:
        start = "call"  # Llama's chat templates only allow one call per message.
    if answer is not None or or_text:
        rules.append(f"calls: {start}")
        start = "calls | answer"
    if answer is not None:
        rules.append(f"answer: {_object(answer)}")
    elif or_text:
        begins = [form.opening, THOUGHTS, *(["{"] if form.is_bare else [])]
        # Intersect with "any text", because the complement alone would allow invalid UTF-8.
        blanks, other = r"[\s\x1c-\x1f]*", "|".join(map(_escaped, begins))
        rules += ["answer: TEXT", f"TEXT: /(?s:.*)/ & ~/(?s:{blanks}({other}).*)/"]
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _object(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**prepared(schema), 'x-guidance': _JSON})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Escape a text for llguidance's regular expressions, which are enclosed in slashes."""
    return re.sub(r"[^\w\s]", lambda match: f"\\x{ord(match[0]):02x}", text)


def read_call(
    value: Any, text: str, argument_keys: Sequence[str] = ("arguments",)
) -> ToolCall | InvalidToolCall:
    """Parse a JSON value, written as ``text``, as a call. Unknown fields make the call invalid."""
    if not isinstance(value, dict):
        return InvalidToolCall(text, f"Expected a JSON object, found {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return InvalidToolCall(text, f"Expected a tool's 'name', found {_kind(name)}")
    keys = [key for key in argument_keys if key in value]
    if len(keys) != 1:
        expected = " or ".join(map(repr, argument_keys))
        return InvalidToolCall(text, f"Expected {expected} once, found {sorted(value)}", name)
    if others := sorted(value.keys() - {"name", "id", "type", *keys}):
        return InvalidToolCall(text, f"Found unknown fields {', '.join(map(repr, others))}", name)
    if not isinstance(arguments := value[keys[0]], dict):
        error = f"Expected {keys[0]!r} to be a JSON object, found {_kind(arguments)}"
        return InvalidToolCall(text, error, name)
    call_id = value.get("id")
    if not isinstance(call_id, str) or not call_id:
        call_id = new_call_id()
    return ToolCall(name, arguments, call_id)


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``start``. Returns the value and its end index."""
    value, end = _DECODER.raw_decode(text, start)
    if half := _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError(f"Found {half[0]!a}, which is a lone surrogate")
    return value, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"Found the key {key!r} twice")
        value[key] = item
    return value


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"Found the number {digits[:40]}, expected a finite 64-bit float")
    return number


def _kind(value: Any) -> str:
    kinds = {type(None): "none", list: "a list", str: "a string", dict: "an object"}
    return kinds.get(type(value), repr(value)[:40])


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_constant=_finite, parse_float=_finite
)
