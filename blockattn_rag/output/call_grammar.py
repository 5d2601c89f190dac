"""Grammars that hold an answer to calls of tools, with arguments that fit the tools' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockattn_rag.output.formats import ToolFormat
from blockattn_rag.output.marks import mark_ids
from blockattn_rag.output.schema import prepared
from blockattn_rag.prompts.thoughts import OPENING as THOUGHTS

# Calls are written as templates write them, without blanks of the model's own.
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
    """A grammar, in llguidance's dialect of Lark, of an answer that is one call or more.

    Args:
        form: how calls are written.
        tools: definitions of those that may be called.
        tokenizer: the model's, a transformers tokenizer. Marks that it has a token for are this
            token, others are text.
        several: whether more than one call may be made.
        answer: JSON schema of what the answer may be in place of calls.
        or_text: whether the answer may be text in place of calls, which begins as no call does.
    """
    literal = _literals(form, tokenizer)
    opening, closing = literal(form.opening), literal(form.closing)
    key, arguments_mark = form.argument_keys[0], literal(form.arguments_mark)
    rules: list[str] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        if form.arguments_mark:
            call = f"{_text(function['name'])} {arguments_mark} arguments_{index}"
        else:
            begin = f'{{"name": {name}, "{key}": '
            call = f'{_text(begin)} arguments_{index} "}}"'
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rules.append(f"call_{index}: {call}")
        rules.append(f"arguments_{index}: {_object(schema)}")
    call = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules.append(f"call: {call}")
    more = "" if not several else " ({} call)*"
    if form.is_list:
        start = f'{opening} " "? "[" call{more.format(_text(", "))} "]"'
    elif form.closing:
        rules.append(f'tagged: {opening} "\\n" call "\\n" {closing}')
        start = "tagged" + (' ("\\n" tagged)*' if several else "")
    elif form.arguments_mark:
        start = f"{opening} call" + (f" ({opening} call)*" if several else "")
    else:
        start = "call"  # Llama's templates know one call in a message
    if answer is not None:
        rules.append(f"calls: {start}")
        rules.append(f"answer: {_object(answer)}")
        start = "calls | answer"
    elif or_text:
        rules.append(f"calls: {start}")
        begins = [form.opening, THOUGHTS, *(["{"] if form.is_bare else [])]
        # The intersection leaves out bytes that are no text, which the complement alone allows.
        blanks, other = r"[\s\x1c-\x1f]*", "|".join(map(_escaped, begins))
        rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:{blanks}({other}).*)/")
        start = "calls | TEXT"
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _object(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**prepared(schema), 'x-guidance': _JSON})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A text in a regular expression of llguidance, between slashes."""
    return re.sub(r"[^\w\s]", lambda found: f"\\x{ord(found[0]):02x}", text)


def _literals(form: ToolFormat, tokenizer: Any) -> Callable[[str], str]:
    """What stands for a mark in a grammar: an added token by its number, or its text."""
    numbers = mark_ids(form, tokenizer)

    def literal(mark: str) -> str:
        return f"<[{numbers[mark]}]>" if mark in numbers else _text(mark)

    return literal
