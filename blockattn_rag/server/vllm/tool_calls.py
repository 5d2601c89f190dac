"""Tool calls in the answers to OpenAI clients, parsed by token as in an engine.

A mark of a call is a token of the model. The same characters as text, for example in a quoted
passage, are text: vLLM's own parsers see only text and would make a call of them.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockattn_rag.errors import ProtocolError
from blockattn_rag.output.tool_calls import ToolCall
from blockattn_rag.output.tool_parser import CallParser, ReadAnswer
from blockattn_rag.output.tool_templates import tool_template
from blockattn_rag.output.tool_use import ToolUse

_DATA = "data: "


@dataclass(slots=True)
class _Choice:
    """State of one choice of a streamed answer.

    Args:
        text: Text so far, without reasoning.
        ids: Token ids so far.
        sent: Characters of ``text`` that were sent.
        has_reasoning: Whether a part of the tokens is reasoning.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    sent: int = 0
    has_reasoning: bool = False


class ServedTools:
    """Tools of one chat: changes vLLM's request, and puts calls into its answer.

    Args:
        use: The tools.
        tokenizer: Transformers tokenizer of the model.
        options: ``response_format`` and ``structured_outputs`` of the request, as plain values.
        returns_ids: Whether the client asked for token ids.
    """

    def __init__(
        self, use: ToolUse, tokenizer: Any, options: Mapping[str, Any], returns_ids: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._parser: CallParser = use.parser(tokenizer, options)
        self._returns_ids = returns_ids
        self.options = use.engine_options(tokenizer, options)
        """Grammar of the answer: ``response_format`` and ``structured_outputs``."""

    @classmethod
    def of(cls, request: Any, tokenizer: Any) -> ServedTools | None:
        """The tools of a chat, as vLLM's object. None: the chat has no tools, or their form is
        unknown, so that vLLM's own parser is used.

        Raises:
            ProtocolError: An option is invalid.
        """
        if not request.tools or tool_template(tokenizer) is None:
            return None
        choice = request.tool_choice
        options = {
            "tools": [tool.model_dump() for tool in request.tools],
            "tool_choice": choice.model_dump() if hasattr(choice, "model_dump") else choice,
            "parallel_tool_calls": request.parallel_tool_calls,
        }
        try:
            use = ToolUse.of_call(options, lambda: tokenizer, request.model)
            if use is None:
                return None
            return cls(use, tokenizer, _grammar(request), bool(request.return_token_ids))
        except (TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from error

    def answer(self, data: dict[str, Any]) -> None:
        """Put the calls into a complete answer, a JSON object."""
        for choice in data["choices"]:
            message, ids = choice["message"], choice.get("token_ids") or []
            text = message.get("content") or ""
            read = self._parsed(text, ids, has_reasoning=_reasoning(message) is not None)
            message["content"] = _text(read) or None
            message["tool_calls"] = _calls(read.calls)
            self._end(choice, bool(read.calls))
        self._drop_ids(data)

    async def events(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Convert a stream. Text is sent up to the first call, and calls at the end."""
        states: dict[int, _Choice] = {}
        try:
            async for event in events:
                if not event.startswith(_DATA + "{"):
                    yield event
                    continue
                data = json.loads(event.removeprefix(_DATA))
                for choice in data.get("choices", ()):
                    self._advance(choice, states.setdefault(choice["index"], _Choice()))
                self._drop_ids(data)
                text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
                yield f"{_DATA}{text}\n\n"
        finally:
            await events.aclose()

    def _advance(self, choice: dict[str, Any], state: _Choice) -> None:
        """Edit the chunk of a choice."""
        delta = choice["delta"]
        state.text += delta.get("content") or ""
        state.ids += choice.get("token_ids") or ()
        state.has_reasoning |= _reasoning(delta) is not None
        if choice.get("finish_reason"):
            read = self._parsed(state.text, state.ids, state.has_reasoning)
            shown, calls = _text(read), _calls(read.calls)
            if calls:
                delta["tool_calls"] = [
                    {"index": number, **call} for number, call in enumerate(calls)
                ]
            self._end(choice, bool(calls))
        else:
            ids = self._answer_ids(state.text, state.ids) if state.has_reasoning else state.ids
            end, _ = self._parser.shown(state.text, ids)
            shown = state.text[:end]
        if "content" in delta or len(shown) > state.sent:
            delta["content"] = shown[state.sent :]
        state.sent = max(state.sent, len(shown))

    def _parsed(self, text: str, ids: Sequence[int], has_reasoning: bool) -> ReadAnswer:
        return self._parser.parse(text, self._answer_ids(text, ids) if has_reasoning else ids)

    def _answer_ids(self, text: str, ids: Sequence[int]) -> Sequence[int]:
        """The last token ids, without those of the reasoning before the text."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            tail = self._tokenizer.decode(ids[middle:], skip_special_tokens=True)
            low, high = (middle + 1, high) if len(tail) > len(text) else (low, middle)
        return ids[low:]

    @staticmethod
    def _end(choice: dict[str, Any], has_calls: bool) -> None:
        if has_calls and choice.get("finish_reason") == "stop":
            choice["finish_reason"] = "tool_calls"

    def _drop_ids(self, data: dict[str, Any]) -> None:
        """Remove token ids that the client did not ask for."""
        if not self._returns_ids:
            data.pop("prompt_token_ids", None)
            for choice in data.get("choices", ()):
                choice.pop("token_ids", None)


def _reasoning(message: Mapping[str, Any]) -> Any:
    return message.get("reasoning") or message.get("reasoning_content")


def _text(read: ReadAnswer) -> str:
    """Text of an answer. Invalid calls are shown as they are, because clients cannot receive them
    otherwise."""
    return "\n".join(filter(None, (read.text, *(call.text for call in read.invalid))))


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in calls
    ]


def _grammar(request: Any) -> dict[str, Any]:
    """The grammar of a request, as the options of an engine."""
    given, outputs = request.response_format, request.structured_outputs
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    values = {} if outputs is None else {name: getattr(outputs, name, None) for name in kinds}
    chosen = {name: value for name, value in values.items() if value is not None}
    return {
        "response_format": None if given is None else given.model_dump(by_alias=True),
        "structured_outputs": chosen or None,
    }
