"""Tool calls in answers to OpenAI clients, parsed from tokens as in an engine.

Calls start with a special token of the model. The same characters in ordinary tokens, for example
in a quoted passage, are text. vLLM's parsers, which receive only text, would parse them as a call.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.errors import ProtocolError
from blockattn_rag.output.answer_reader import AnswerReader
from blockattn_rag.output.answers import Said, ThoughtReader, has_no_thoughts
from blockattn_rag.output.grammar import KINDS
from blockattn_rag.output.tool_calls import ToolCall
from blockattn_rag.output.tool_parser import ReadAnswer
from blockattn_rag.output.tool_templates import tool_template
from blockattn_rag.output.tool_use import ToolUse
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.server.vllm.chat_report import edited_events


class ServedTools:
    """Tools of one chat: adapts vLLM's request, and adds the calls to its answer.

    Answers are decoded from their token ids, as in an engine, because vLLM's text may be cut at
    stop strings or omit control tokens. Thoughts are returned in the answer's field ``reasoning``.
    """

    def __init__(self, use: ToolUse, tokenizer: Any, request: Any) -> None:
        requested = _grammar(request)
        self._tokenizer = tokenizer
        self._parser = use.parser(tokenizer, requested)
        self._returns_ids = bool(request.return_token_ids)
        self._shows_thoughts = request.include_reasoning is not False
        stop = request.stop or ()
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._prompt = BlockPrompt((), "?")
        self.options = use.engine_options(tokenizer, requested)
        """Options with the answer's grammar: ``response_format`` and ``structured_outputs``."""
        self.has_own_grammar = self.options != requested
        """Whether the tools changed the request's grammar."""

    @classmethod
    def of(cls, request: Any, tokenizer: Any) -> ServedTools | None:
        """Create the tools of a chat request. None if the chat has no tools, or their format is
        unknown: vLLM's own parser is then used.
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
            return None if use is None else cls(use, tokenizer, request)
        except (TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from error

    def begin(self, prompt: BlockPrompt) -> None:
        """Record the rendered prompt, which may end with the start of the answer's thoughts."""
        self._prompt = prompt

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
        thoughts = ThoughtReader(self._tokenizer, self._prompt, answers_at_once=no_thoughts)
        detokenizer = Detokenizer(self._tokenizer, self._stop)
        return _Output(detokenizer, AnswerReader(thoughts, self._parser))

    @staticmethod
    def _read(choice: dict[str, Any], output: _Output) -> tuple[str, str, list[dict[str, Any]]]:
        """Return a choice's new text and thoughts and, at its end, all calls."""
        said = output.push(choice.get("token_ids") or ())
        if not choice.get("finish_reason"):
            return said.answer, said.thoughts, []
        rest, read = output.finish()
        if read.calls and choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        # Clients can receive invalid calls only as text.
        invalid = "".join(f"\n{call.text}" for call in read.invalid)
        content = said.answer + rest.answer + invalid
        return content, said.thoughts + rest.thoughts, _calls(read.calls)

    def _shown(self, thoughts: str) -> str | None:
        return (thoughts or None) if self._shows_thoughts else None

    def _drop_ids(self, data: dict[str, Any]) -> None:
        """Remove token ids that the client did not request."""
        if not self._returns_ids:
            data.pop("prompt_token_ids", None)
            for choice in data.get("choices", ()):
                choice.pop("token_ids", None)


@dataclass(frozen=True, slots=True)
class _Output:
    """Decoder for the output of one choice, which separates thoughts, text and calls."""

    _detokenizer: Detokenizer
    _reader: AnswerReader

    def push(self, ids: Iterable[int]) -> Said:
        """Add tokens. Returns thoughts and text that can be sent now."""
        new = [*ids]
        return self._reader.push("".join(map(self._detokenizer.push, new)), new)

    def finish(self) -> tuple[Said, ReadAnswer]:
        """Parse the finished output. Returns new thoughts and text, and all calls."""
        self._detokenizer.finish()
        return self._reader.finish(self._detokenizer.text, self._detokenizer.ids)


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    written = ((call, json.dumps(call.arguments, ensure_ascii=False)) for call in calls)
    return [
        {**call.to_dict(), "function": {"name": call.name, "arguments": arguments}}
        for call, arguments in written
    ]


def _grammar(request: Any) -> dict[str, Any]:
    requested, outputs = request.response_format, request.structured_outputs
    values = {} if outputs is None else {name: getattr(outputs, name, None) for name in KINDS}
    chosen = {name: value for name, value in values.items() if value is not None}
    return {
        "response_format": None if requested is None else requested.model_dump(by_alias=True),
        "structured_outputs": chosen or None,
    }
