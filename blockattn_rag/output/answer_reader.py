"""Reads complete or streamed model output that contains thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from blockattn_rag.output.answers import Said, ThoughtReader
from blockattn_rag.output.tool_parser import CallParser, ReadAnswer


class AnswerReader:
    """Splits a model's output into thoughts, text and calls during streaming.

    From the first call on, text is held back and returned with the calls at the end.
    """

    def __init__(self, thoughts: ThoughtReader, parser: CallParser | None) -> None:
        self._thoughts = thoughts
        self._parser = parser
        self._output = ""
        self._ids: list[int] = []
        self._answer_length = 0  # Length of the answer at the end of the output.
        self._shown = 0
        self._is_held = False

    def push(self, text: str, token_ids: Sequence[int]) -> Said:
        """Add the next piece, and return the thoughts and text that can be streamed."""
        said = self._split(text)
        self._ids += token_ids
        if self._parser is None or not self._answer_length or self._is_held:
            return said if self._parser is None else Said(said.thoughts)
        start = len(self._output) - self._answer_length
        end, self._is_held = self._parser.shown(self._output, self._ids, start)
        new = self._output[start + self._shown : end]
        self._shown += len(new)
        return Said(said.thoughts, new)

    def finish(self, text: str, token_ids: Sequence[int]) -> tuple[Said, ReadAnswer]:
        """Parse the finished output, and return new thoughts and text, and all calls."""
        said = self._split(text[len(self._output) :], is_last=True)
        has_only_thoughts = not self._answer_length and bool(text.strip())
        if self._parser is None or has_only_thoughts:
            return said, ReadAnswer(said.answer, [], [])
        answer = self._parser.parse(text, token_ids, len(text) - self._answer_length)
        return Said(said.thoughts, answer.text[self._shown :]), answer

    def _split(self, text: str, *, is_last: bool = False) -> Said:
        self._output += text
        said = self._thoughts.finish(text) if is_last else self._thoughts.push(text)
        self._answer_length += len(said.answer)
        return said
