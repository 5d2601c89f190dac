"""Calls of tools in an answer that is being made, which end it."""

from __future__ import annotations

from typing import Any

from blockattn_rag.engine.results import GenerationChunk, Marks, marks_at_end
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.output.thinking import ThoughtReader, has_no_thoughts
from blockattn_rag.output.tool_use import AnswerReader
from blockattn_rag.prompts.blocks import BlockPrompt


class CallWatch:
    """Reads the calls of one answer as its text comes, thoughts aside.

    Args:
        reader: Reads the calls.
        thoughts: Reads the thoughts before them.
    """

    def __init__(self, reader: AnswerReader, thoughts: ThoughtReader) -> None:
        self._reader = reader
        self._thoughts = thoughts

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: Any, prompt: BlockPrompt) -> CallWatch | None:
        """The watch of an answer with these options; None: it makes no calls."""
        if sampling.calls is None:
            return None
        grammar = sampling.grammar
        at_once = has_no_thoughts(grammar.asked if grammar else {})
        thoughts = ThoughtReader(tokenizer, prompt, answers_at_once=at_once)
        return cls(sampling.calls.reader(), thoughts)

    @property
    def is_over(self) -> bool:
        """Whether the answer ends here; see ``AnswerReader``."""
        return self._reader.is_over

    @property
    def has_loop(self) -> bool:
        """Whether the same call came twice in a row."""
        return self._reader.has_loop

    def push(self, text: str, marks: Marks) -> None:
        """Take the next piece of the answer, and where control tokens are in it."""
        answer = self._thoughts.push(text).answer
        piece = GenerationChunk(text, marks=marks)
        self._reader.read(answer, marks_at_end(piece, answer), last=False)
