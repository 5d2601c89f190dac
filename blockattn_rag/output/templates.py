"""What a chat template does with tools: found by showing it one tool, one call and its result."""

from __future__ import annotations

import hashlib
import os
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from blockattn_rag.output.calls import ID_LENGTH, ToolCall
from blockattn_rag.output.formats import GRANITE, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from blockattn_rag.output.parser import parse_answer
from blockattn_rag.prompts.blocks import Span, merged
from blockattn_rag.prompts.chat_template import Message, Spans, chat_spans, origin_of
from blockattn_rag.prompts.marked_text import content_spans

_CALL = ToolCall("kvprobe", {"kvkey": "kvvalue"}, "kvcall000")
_FUNCTION = {
    "name": _CALL.name,
    "description": "A probe.",
    "parameters": {"type": "object", "properties": {"kvkey": {"type": "string"}}},
}
_TOOL: dict[str, Any] = {"type": "function", "function": _FUNCTION}
_RESULT = "kvresult"
_THOUGHTS = re.compile(r"<think>\s*(</think>\s*)?\Z")  # opened, or left out, by the template

# Where two read a call back, the first one is the form: the second takes more than it writes.
_READERS = (HERMES, MISTRAL, MISTRAL_ARGS, GRANITE, LLAMA3)

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits)


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """What a chat template does with tools.

    Args:
        form: how the model writes calls.
        variable: the template's variable that takes the definitions of tools.
        is_wrapped: whether it expects ``{"type": "function", "function": ...}``, or the function.
        shows_calls: whether it shows the calls of earlier messages. If not, these are put into the
            messages' contents, as the model would write them.
    """

    form: ToolFormat
    variable: str = "tools"
    is_wrapped: bool = True
    shows_calls: bool = True

    def spans(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        **template_kwargs: Any,
    ) -> Spans:
        """The prompt that messages become with tools; see ``chat_spans``.

        Args:
            messages: with ``role``, ``content``, and where they have them ``tool_calls``,
                ``tool_call_id`` and ``name``, as transformers knows them.
            tools: definitions, each ``{"type": "function", "function": {"name", "description",
                "parameters"}}``.
        """
        shown = tools if self.is_wrapped else [tool["function"] for tool in tools]
        return chat_spans(
            tokenizer,
            self.ready(messages),
            tools=shown,
            tools_variable=self.variable,
            **template_kwargs,
        )

    def ready(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with calls and results as the template takes them."""
        turns = [self._with_ids(message) for message in messages]
        if self.form.one_a_message:
            turns = _one_call_each(turns)
        return turns if self.shows_calls else [self._with_written_calls(turn) for turn in turns]

    def _with_ids(self, message: Message) -> Message:
        """A message whose ids are of the form that Mistral's templates insist on."""
        if self.form not in (MISTRAL, MISTRAL_ARGS):
            return message
        turn = dict(message)
        if turn.get("tool_call_id"):
            turn["tool_call_id"] = _short_id(turn["tool_call_id"])
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [{**call, "id": _short_id(call.get("id") or "")} for call in calls]
        return turn

    def _with_written_calls(self, message: Message) -> Message:
        """A message whose calls are part of its content."""
        turn = dict(message)
        if not (calls := turn.pop("tool_calls", None)):
            return turn
        given = turn.get("content")
        origin = origin_of(turn["role"])
        content = given if isinstance(given, tuple) else content_spans(str(given or ""), origin)
        functions = [call["function"] for call in calls]
        written = self.form.written([ToolCall(f["name"], f["arguments"]) for f in functions])
        between = [Span("\n", "template")] if merged(content) else []
        return {**turn, "content": merged([*content, *between, *written])}


def _short_id(given: str) -> str:
    if len(given) == ID_LENGTH and set(given) <= _ID_CHARACTERS:
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:ID_LENGTH]


def _one_call_each(turns: Sequence[Message]) -> list[Message]:
    """Messages of several calls as one message for each call, each before its own result."""
    made: list[Message] = []
    moved: set[int] = set()  # places of the results that stand behind their calls already
    for place, turn in enumerate(turns):
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            made += [] if place in moved else [turn]
            continue
        for index, call in enumerate(calls):
            made.append(
                {**turn, "content": turn["content"] if not index else "", "tool_calls": [call]}
            )
            if (found := _result_of(call, turns, place + 1, moved)) is not None:
                made.append(turns[found])
                moved.add(found)
    return made


def _result_of(
    call: Message, turns: Sequence[Message], start: int, moved: Collection[int]
) -> int | None:
    """Place of a call's result: before the next calls, which may have the same ids again."""
    for place in range(start, len(turns)):
        turn = turns[place]
        if turn.get("tool_calls"):
            return None
        is_its = (turn.get("tool_call_id") or "") == (call.get("id") or "")
        if turn["role"] == "tool" and is_its and place not in moved:
            return place
    return None


class _Probed(NamedTuple):
    tools: ToolTemplate | None
    shows_results: bool


_known: dict[str, _Probed] = {}


def tool_template(tokenizer: Any) -> ToolTemplate | None:
    """What the chat template of a tokenizer does with tools; None if it knows none, or if it is not
    known here how its model writes calls."""
    return _probed(tokenizer).tools


def shows_results(tokenizer: Any) -> bool:
    """Whether the chat template of a tokenizer shows what tools found, in whatever words."""
    return _probed(tokenizer).shows_results


def _probed(tokenizer: Any) -> _Probed:
    given = tokenizer.chat_template
    source = str(
        given.get("tool_use") or given.get("default") if isinstance(given, dict) else given
    )
    if source not in _known:
        _known[source] = _probe(tokenizer, source) if given else _Probed(None, False)
    return _known[source]


def _probe(tokenizer: Any, source: str) -> _Probed:
    question: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    function = {"name": _CALL.name, "arguments": _CALL.arguments}
    calls = [{"type": "function", "id": _CALL.id, "function": function}]
    result = {"role": "tool", "tool_call_id": _CALL.id, "name": _CALL.name, "content": _RESULT}
    history = [*question, {"role": "assistant", "content": "", "tool_calls": calls}, result]

    def render(messages: list[dict[str, Any]], **variables: Any) -> str:
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception:  # noqa: BLE001 -- a program of others: it does not take such messages
            return ""
        return str(rendered)

    shows = "tool" in source and _RESULT in render(history)  # others show roles of any name
    for variable, is_wrapped in (("tools", True), ("xml_tools", False)):
        tools = {variable: [_TOOL if is_wrapped else _FUNCTION]}
        if _CALL.name in (asked := render(question, add_generation_prompt=True, **tools)):
            break
    else:
        return _Probed(None, shows)
    text = render(history, **tools)
    asked = _THOUGHTS.sub("", asked)  # because both marks may begin alike
    begin = len(os.path.commonprefix([asked, text]))  # noqa: RUF071 (characters are meant)
    answer = text[begin:].partition(_RESULT)[0]
    found = ToolTemplate(HERMES, variable, is_wrapped)
    if "kvvalue" in answer:
        forms = (replace(found, form=one) for one in _READERS if _reads_back(answer, one))
        return _Probed(next(forms, None), shows)
    # It shows no calls, but may tell the model how to write them.
    told = next((one for one in (GRANITE, HERMES) if one.opening in source), None)
    return _Probed(replace(found, form=told, shows_calls=False) if told else None, shows)


def _reads_back(answer: str, form: ToolFormat) -> bool:
    calls = parse_answer(answer, form, [_CALL.name]).calls
    return [(call.name, call.arguments) for call in calls] == [(_CALL.name, _CALL.arguments)]
