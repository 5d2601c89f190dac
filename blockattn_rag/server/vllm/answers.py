"""Reuse reports and tool calls, which this package adds to vLLM's answers to OpenAI clients.

Most models start a call with a special token, so calls are parsed from tokens. The same characters
in ordinary tokens, for example in a quoted passage, are text. From text alone, as in vLLM's
parsers, they cannot be distinguished from a call.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.errors import ProtocolError
from blockattn_rag.output.answers import ThoughtReader, has_no_thoughts
from blockattn_rag.output.grammar import KINDS
from blockattn_rag.output.tool_formats import ToolCall
from blockattn_rag.output.tool_parser import AnswerReader
from blockattn_rag.output.tool_templates import tool_template
from blockattn_rag.output.tool_use import ToolUse
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.server.plan import BlockPlan, ServedBlocks
from blockattn_rag.server.protocol import FIELD

_DATA = "data: "
_SIGNS = ('"finish_reason":"', '"usage":{', '"kv_transfer_params":')
"""Substrings of the stream events that ``ChatReport`` edits."""

_Output = tuple[Detokenizer, AnswerReader]
"""Decoder of one choice, and the reader that separates its thoughts, text and calls."""


@dataclass(slots=True)
class Ticket:
    """State of a block-mode request while vLLM's handlers process it.

    Args:
        ensure_again: Function that checks all blocks of the prompt thoroughly, encodes missing
            blocks, and returns the number of tokens of each encoded block by key.
        encoded: Number of tokens of each block that was encoded for this request, by key.
        keys: Store keys of the context blocks, in order.
    """

    plan: BlockPlan
    ensure_again: Callable[[], Awaitable[Mapping[str, int]]]
    encoded: Mapping[str, int] = field(default_factory=dict)
    keys: Sequence[str] = ()
    prompt_tokens: int = 0
    served: ServedBlocks | None = None


@dataclass(frozen=True, slots=True)
class ChatReport:
    """Adds the reuse report to a vLLM answer for OpenAI clients.

    The report replaces ``kv_transfer_params``. Tokens that were encoded or recomputed for this
    request are subtracted from ``cached_tokens``.

    Args:
        ticket: State of the request. None: full mode.
        reason: Why recognized passages were not used. Reported only in full mode.
    """

    ticket: Ticket | None
    recipe: RecipeOutline
    reason: str = ""

    def answer(self, answer: Any) -> dict[str, Any]:
        data: dict[str, Any] = answer.model_dump()
        self._edit(data)
        return {**data, FIELD: self._report()}

    def events(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Convert a stream. The report is added to the event with the finish reason."""
        return edited_events(events, self._edit, _SIGNS)

    def _edit(self, data: dict[str, Any]) -> None:
        data.pop("kv_transfer_params", None)  # vLLM 0.33 adds this field to all events.
        if any(choice.get("finish_reason") for choice in data.get("choices", ())):
            data[FIELD] = self._report()
        served = self.ticket and self.ticket.served
        details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
        if served and details.get("cached_tokens"):
            computed = served.encoded_tokens + sum(served.recomputed)
            details["cached_tokens"] = max(details["cached_tokens"] - computed, 0)

    def _report(self) -> dict[str, Any]:
        if self.ticket is None:
            return {"mode": "full", **({"reason": self.reason} if self.reason else {})}
        if self.ticket.served is None:  # An aborted answer has no report.
            return {"mode": "block"}
        counts = self.ticket.served.reuse(self.ticket.plan.lengths, self.ticket.prompt_tokens)
        return {"mode": "block", **counts, "recipe": str(self.recipe)}


class ServedTools:
    """Adapts a chat request with tools for vLLM, and adds the tool calls to vLLM's answer.

    Answers are decoded from their token ids, because vLLM's text may be cut at stop strings
    or omit control tokens. Thoughts are returned in the answer's field ``reasoning``.
    """

    def __init__(self, use: ToolUse, tokenizer: Any, request: Any) -> None:
        requested = _grammar(request)
        self._tokenizer = tokenizer
        self._parser = use.parser(tokenizer, requested)
        self._returns_ids = bool(request.return_token_ids)
        self._shows_thoughts = request.include_reasoning is not False
        stop = request.stop or ()
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.prompt = BlockPrompt((), "?")
        """Rendered prompt, which may end with the start of the answer's thoughts."""
        self.options = use.engine_options(tokenizer, requested)
        """Options with the answer's grammar: ``response_format`` and ``structured_outputs``."""
        self.has_own_grammar = self.options != requested
        """Whether the tools changed the request's grammar."""

    @classmethod
    def of(cls, request: Any, tokenizer: Any) -> ServedTools | None:
        """Create the tools of a chat. Returns None if no tools may be called, or if their format is
        unknown. In the latter case, vLLM's own parser is used."""
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
            return None if use is None else cls(use, tokenizer, request)
        except (TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from error

    def answer(self, data: dict[str, Any]) -> None:
        """Add the calls to a complete answer, a JSON object."""
        for choice in data["choices"]:
            content, thoughts, calls = self._read(choice, self._output())
            choice["message"] |= {"content": content or None, "tool_calls": calls}
            choice["message"]["reasoning"] = self._shown(thoughts)
        self._drop_ids(data)

    def events(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Convert a stream. Text is sent until the first call, and calls are sent at the end."""
        outputs: dict[int, _Output] = {}

        def edit(data: dict[str, Any]) -> None:
            for choice in data.get("choices", ()):
                output = outputs.setdefault(choice["index"], self._output())
                content, thoughts, calls = self._read(choice, output)
                delta = choice["delta"]
                if calls:
                    delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
                if content or "content" in delta:
                    delta["content"] = content
                if shown := self._shown(thoughts):
                    delta["reasoning"] = shown
            self._drop_ids(data)

        return edited_events(events, edit, ("{",))

    def _output(self) -> _Output:
        no_thoughts = has_no_thoughts(self.options)
        thoughts = ThoughtReader(self._tokenizer, self.prompt, answers_at_once=no_thoughts)
        return Detokenizer(self._tokenizer, self._stop), AnswerReader(thoughts, self._parser)

    @staticmethod
    def _read(choice: dict[str, Any], output: _Output) -> tuple[str, str, list[dict[str, Any]]]:
        """Return a choice's new text and thoughts and, at its end, all calls."""
        detokenizer, reader = output
        ids = choice.get("token_ids") or []
        said = reader.push("".join(map(detokenizer.push, ids)), ids)
        if not choice.get("finish_reason"):
            return said.answer, said.thoughts, []
        detokenizer.finish()
        rest, read = reader.finish(detokenizer.text, detokenizer.ids)
        if read.calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        # Clients can receive invalid calls only as text.
        invalid = "".join(f"\n{call.text}" for call in read.invalid)
        content = said.answer + rest.answer + invalid
        return content, said.thoughts + rest.thoughts, _calls(read.calls)

    def _shown(self, thoughts: str) -> str | None:
        return (thoughts or None) if self._shows_thoughts else None

    def _drop_ids(self, data: dict[str, Any]) -> None:
        if not self._returns_ids:
            data.pop("prompt_token_ids", None)
            for choice in data.get("choices", ()):
                choice.pop("token_ids", None)


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    written = [call.to_dict() for call in calls]
    for function in (call["function"] for call in written):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return written


def _grammar(request: Any) -> dict[str, Any]:
    requested, outputs = request.response_format, request.structured_outputs
    values = {} if outputs is None else {name: getattr(outputs, name, None) for name in KINDS}
    chosen = {name: value for name, value in values.items() if value is not None}
    return {
        "response_format": None if requested is None else requested.model_dump(by_alias=True),
        "structured_outputs": chosen or None,
    }


async def edited_events(
    events: AsyncGenerator[str, None], edit: Callable[[dict[str, Any]], None], signs: Sequence[str]
) -> AsyncGenerator[str, None]:
    """Apply ``edit`` to the JSON of all stream events that contain one of ``signs``."""
    try:
        async for event in events:
            if event.startswith(_DATA) and any(sign in event for sign in signs):
                data = json.loads(event.removeprefix(_DATA))
                edit(data)
                text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
                event = f"{_DATA}{text}\n\n"
            yield event
    finally:
        await events.aclose()
