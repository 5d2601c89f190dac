"""How models write calls of tools: one format a family, as its vendor documents it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from blockattn_rag.output.calls import ToolCall
from blockattn_rag.prompts.blocks import Span


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls of tools.

    Args:
        name: of the format.
        opening: stands before a call, or before a list of them.
        closing: stands after a call; empty where the call's JSON ends it.
        is_list: whether calls are written as one JSON list.
        arguments_mark: stands between a tool's name and its arguments, where they are no JSON
            object together; empty elsewhere.
        id_mark: stands between the name and the call's id, which some write there.
        argument_keys: keys of an object's arguments; the first one is the documented one.
        is_bare: whether an answer that begins with a JSON object is a call without ``opening``.
        one_a_message: whether histories hold one call in a message at most.
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
        """The strings that must stay in an answer's text, control tokens or not."""
        marks = (self.opening, self.closing, self.arguments_mark, self.id_mark)
        return tuple(mark for mark in marks if mark)

    def written(self, calls: Sequence[ToolCall]) -> tuple[Span, ...]:
        """Calls as the model would write them, for templates that do not."""
        if self.is_list:
            return (Span(self.opening, "template"), *_list_of([self._json(c) for c in calls]))
        spans: list[Span] = []
        for call in calls:
            before = Span(("\n" if spans else "") + self.opening + "\n", "template")
            spans += [before, Span(self._json(call), "conversation")]
            spans.append(Span("\n" + self.closing, "template"))
        return tuple(spans)

    def _json(self, call: ToolCall) -> str:
        written = {"name": call.name, self.argument_keys[0]: call.arguments}
        return json.dumps(written, ensure_ascii=False)


def _list_of(items: Sequence[str]) -> list[Span]:
    spans = [Span("[", "template")]
    for item in items:
        spans += [Span(item, "conversation"), Span(", ", "template")]
    return [*spans[:-1], Span("]", "template")]


HERMES = ToolFormat("hermes", opening="<tool_call>", closing="</tool_call>")
"""Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, Granite 4: an object between tags for each call."""

LLAMA3 = ToolFormat(
    "llama3",
    opening="<|python_tag|>",
    argument_keys=("parameters", "arguments"),
    is_bare=True,
    one_a_message=True,
)
"""Llama 3.1 to 3.3: the answer is an object, ``{"name": ..., "parameters": ...}``."""

MISTRAL = ToolFormat("mistral", opening="[TOOL_CALLS]", is_list=True)
"""Mistral up to tokenizer version 7: one list."""

MISTRAL_ARGS = ToolFormat(
    "mistral_args", opening="[TOOL_CALLS]", arguments_mark="[ARGS]", id_mark="[CALL_ID]"
)
"""Mistral from tokenizer version 11 on: name and arguments apart, each call opened."""

GRANITE = ToolFormat("granite", opening="<|tool_call|>", is_list=True)
"""Granite 3: one list."""

FORMATS: dict[str, ToolFormat] = {
    one.name: one for one in (HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL, GRANITE)
}
"""The formats that are known, by name."""
