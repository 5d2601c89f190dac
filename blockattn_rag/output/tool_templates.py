"""Detects tool support in a chat template by rendering a tool, a call and its result."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from blockattn_rag.output.tool_formats import FORMATS, ID_LENGTH, ToolCall, ToolFormat
from blockattn_rag.output.tool_parser import parse_answer
from blockattn_rag.prompts.blocks import Span, merged
from blockattn_rag.prompts.chat_template import Message, Spans, chat_spans, spans_of

_CALL = ToolCall("kvprobe", {"kvkey": "kvvalue"}, "kvcall000")
_FUNCTION = {
    "name": _CALL.name,
    "description": "A probe.",
    "parameters": {"type": "object", "properties": {"kvkey": {"type": "string"}}},
}
_TOOL: dict[str, Any] = {"type": "function", "function": _FUNCTION}
_RESULT = "kvresult"
_THOUGHTS = re.compile(r"<think>\s*(</think>\s*)?\Z")  # The template opens or skips thoughts.


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """Tool support in a chat template.

    Args:
        variable: Template variable for tool definitions. None: the template does not support tools,
            so definitions are added as text, in a user message at the end.
        is_wrapped: Whether each definition is ``{"type": "function", "function": ...}`` rather than
            just the function.
        shows_calls: Whether the template renders calls in earlier messages. If not, they are added
            to the messages' contents.
    """

    form: ToolFormat
    variable: str | None = "tools"
    is_wrapped: bool = True
    shows_calls: bool = True

    def spans(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        **template_kwargs: Any,
    ) -> Spans:
        """Render messages and tools to a prompt; see ``chat_spans``."""
        if self.variable is None:
            return chat_spans(tokenizer, self._with_tools(messages, tools), **template_kwargs)
        return chat_spans(
            tokenizer,
            self.ready(messages),
            tools=tools if self.is_wrapped else [tool["function"] for tool in tools],
            tools_variable=self.variable,
            **template_kwargs,
        )

    def ready(self, messages: Sequence[Message]) -> list[Message]:
        """Convert calls and results in messages to the form that the template expects."""
        turns = [self._with_ids(message) for message in messages]
        if self.form.one_a_message:
            turns = _one_call_each(turns)
        return turns if self.shows_calls else [self._with_written_calls(turn) for turn in turns]

    def _with_ids(self, message: Message) -> Message:
        if not self.form.name.startswith("mistral"):
            return message
        turn = dict(message)
        if turn.get("tool_call_id"):
            turn["tool_call_id"] = _short_id(turn["tool_call_id"])
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [{**call, "id": _short_id(call.get("id") or "")} for call in calls]
        return turn

    def _with_written_calls(self, message: Message) -> Message:
        turn = dict(message)
        if not (calls := turn.pop("tool_calls", None)):
            return turn
        content = spans_of(turn)
        functions = [call["function"] for call in calls]
        written = self.form.written([ToolCall(f["name"], f["arguments"]) for f in functions])
        between = [Span("\n", "template")] if content else []
        return {**turn, "content": merged([*content, *between, *written])}

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Add tool definitions at the end, in a user message, so that passages remain blocks."""
        form = self.form
        words = (
            f"Answer with a call of one of these functions, written as\n{form.opening}\n"
            f'{{"name": ..., "{form.argument_keys[0]}": ...}}\n{form.closing}\nThe functions:\n'
            + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        )
        turns = without_tools(messages)
        if not turns or turns[-1]["role"] != "user":
            turns.append({"role": "user", "content": ""})
        content = spans_of(turns[-1])
        between = [Span("\n\n", "system")] if content else []
        turns[-1] = {**turns[-1], "content": (*content, *between, Span(words, "system"))}
        return turns


def without_tools(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages for a chat template without tools: drop calls, and make results user text.

    A result is moved before the question that it answers, because the question must be in the final
    block after all passages.
    """
    turns: list[dict[str, Any]] = []
    for turn in messages:
        if turn["role"] == "tool":
            if turn["content"]:
                asked = [index for index, earlier in enumerate(turns) if earlier["role"] == "user"]
                plain = {"role": "user", "content": turn["content"]}
                turns.insert(asked[-1] if asked else len(turns), plain)
        elif turn["content"] or not turn.get("tool_calls"):
            turns.append({name: value for name, value in turn.items() if name != "tool_calls"})
    return turns


def _short_id(call_id: str) -> str:
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:ID_LENGTH]


def _one_call_each(turns: Sequence[Message]) -> list[Message]:
    """Split messages with several calls into one message per call, each followed by its result."""
    rest, split = [*turns], list[Message]()
    while rest:
        turn = rest.pop(0)
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(turn)
            continue
        for index, call in enumerate(calls):
            content = "" if index else turn["content"]
            split.append({**turn, "content": content, "tool_calls": [call]})
            call_id = call.get("id") or ""
            # Search only up to the next message with calls, because ids may be reused there.
            for later in takewhile(lambda later: not later.get("tool_calls"), rest):
                if later["role"] == "tool" and (later.get("tool_call_id") or "") == call_id:
                    rest.remove(later)
                    split.append(later)
                    break
    return split


class _Probed(NamedTuple):
    tools: ToolTemplate | None
    shows_results: bool


_known: dict[str, _Probed] = {}


def tool_template(tokenizer: Any) -> ToolTemplate | None:
    """Detect a chat template's tool support. None: no support, or an unknown format of calls."""
    return _probed(tokenizer).tools


def shows_results(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template renders tool results."""
    return _probed(tokenizer).shows_results


def _probed(tokenizer: Any) -> _Probed:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    source = str(template)
    if source not in _known:
        _known[source] = _probe(tokenizer, source) if template else _Probed(None, False)
    return _known[source]


def _probe(tokenizer: Any, source: str) -> _Probed:
    question: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    result = {"role": "tool", "tool_call_id": _CALL.id, "name": _CALL.name, "content": _RESULT}
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL.to_dict()]}
    history = [*question, call, result]

    def render(messages: list[dict[str, Any]], **variables: Any) -> str:
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception:  # noqa: BLE001 -- templates may raise any error
            return ""
        return str(rendered)

    # Templates that render any role, without mentioning tools, do not support results.
    shows = "tool" in source and _RESULT in render(history)
    for variable, is_wrapped in (("tools", True), ("xml_tools", False)):
        tools = {variable: [_TOOL if is_wrapped else _FUNCTION]}
        if _CALL.name in (asked := render(question, add_generation_prompt=True, **tools)):
            break
    else:
        return _Probed(None, shows)
    text = render(history, **tools)
    asked = _THOUGHTS.sub("", asked)  # Marks of thoughts may start like marks of calls.
    begin = len(os.path.commonprefix([asked, text]))  # noqa: RUF071 (characters are meant)
    answer = text[begin:].partition(_RESULT)[0]
    template = ToolTemplate(FORMATS["hermes"], variable, is_wrapped)
    if "kvvalue" in answer:
        # The first format that can parse the call is the template's format.
        forms = (form for form in FORMATS.values() if _reads_back(answer, form))
    else:
        # The template does not render calls, but its instructions may show how to write them.
        described = (FORMATS["granite"], FORMATS["hermes"])
        forms = (form for form in described if form.opening in source)
        template = replace(template, shows_calls=False)
    return _Probed(next((replace(template, form=form) for form in forms), None), shows)


def _reads_back(answer: str, form: ToolFormat) -> bool:
    calls = parse_answer(answer, form, [_CALL.name]).calls
    return [(call.name, call.arguments) for call in calls] == [(_CALL.name, _CALL.arguments)]
