"""Parses answers: thoughts of reasoning models, and complete JSON.

Thoughts are the text between ``<think>`` and ``</think>`` in an answer. Some chat templates put the
opening mark at the end of the prompt, so that the answer starts with thoughts, without a mark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.output.grammar import parse_grammar
from blockattn_rag.prompts.blocks import BlockPrompt

OPENING, CLOSING = "<think>", "</think>"

_REASONS = {
    "length": "was cut off at its token limit: raise max_new_tokens (or retrieve fewer passages, "
    "if the context window is full), or limit the schema with maxLength, maxItems and maximum",
    "repetition": "was stopped because it repeated itself: pass a schema, change the prompt, or "
    "set a temperature",
    "depth": "is nested too deeply to be parsed: limit the depth of the schema",
}


def complete_json(text: str, finish_reason: str | None) -> Any:
    """Parse an answer as JSON. Raises ``IncompleteAnswerError`` if it is not complete JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise incomplete(text, "depth") from None
    except ValueError as error:
        raise incomplete(text, finish_reason, str(error)) from error
    if finish_reason == "length" and type(value) in (int, float):  # Digits may be missing.
        raise incomplete(text, finish_reason)
    return value


def incomplete(text: str, finish_reason: str | None, reason: str = "") -> IncompleteAnswerError:
    ended = f"ended before it was complete: remove stop strings that it may contain ({reason})"
    why = _REASONS.get(finish_reason or "", ended)
    shown = repr(text) if len(text) <= 200 else f"{text[:100]!r} ... {text[-100:]!r}"
    return IncompleteAnswerError(f"A JSON answer {why}. Found {shown}", text)


class Said(NamedTuple):
    """A model's output, or a piece of it, split into thoughts and answer."""

    thoughts: str = ""
    answer: str = ""


def marks_thoughts(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template supports thoughts before answers."""
    return CLOSING in str(getattr(tokenizer, "chat_template", None))


def has_no_thoughts(options: Mapping[str, Any]) -> bool:
    """Whether the options contain a grammar that rules out thoughts before the answer."""
    grammar = parse_grammar(options.get("response_format"), options.get("structured_outputs"))
    if grammar is None or grammar.kind == "structural_tag":
        return False
    return CLOSING not in grammar.text


def begun_length(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``mark``."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


class ThoughtReader:
    """Splits a model's output, complete or in pieces, into thoughts and answer.

    White space around thoughts is dropped. If the output is cut off during the thoughts, the answer
    is empty. Marks after the start of the answer are ordinary text.

    Args:
        tokenizer: The model's tokenizer. If its chat template does not mark thoughts, all text is
            the answer.
        answers_at_once: Whether a grammar rules out thoughts. If so, an opening mark at the end of
            the prompt is ignored.
    """

    def __init__(
        self, tokenizer: Any, prompt: BlockPrompt, *, answers_at_once: bool = False
    ) -> None:
        is_open = prompt.final.rstrip().endswith(OPENING) and not answers_at_once
        self._at: Literal["start", "thoughts", "gap", "answer"] = "thoughts" if is_open else "start"
        if not marks_thoughts(tokenizer):
            self._at = "answer"
        self._held = ""  # Text that has not been classified yet.
        self._has_thoughts = False

    def push(self, text: str, *, is_last: bool = False) -> Said:
        """Add the next piece, and return the text that can now be classified.

        ``is_last``: Whether the output is complete, so that all remaining text is returned.
        """
        self._held += text
        thoughts = answer = ""
        if self._at == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPENING):
                self._at, self._held = "thoughts", begun.removeprefix(OPENING)
            elif is_last or not OPENING.startswith(begun):
                self._at = "answer"
        if self._at == "thoughts":
            thoughts = self._thoughts(is_last)
        if self._at == "gap" and self._held.lstrip():
            self._at, self._held = "answer", self._held.lstrip()
        if self._at == "answer":
            answer, self._held = self._held, ""
        return Said(thoughts, answer)

    def _thoughts(self, is_last: bool) -> str:
        """Return thoughts up to the closing mark, or up to text that may be its beginning."""
        if not self._has_thoughts:
            self._held = self._held.lstrip()
        text, mark, rest = self._held.partition(CLOSING)
        if mark:
            self._at, self._held = "gap", rest
            return text.rstrip()
        held = 0 if is_last else begun_length(text, CLOSING)
        certain = text[: len(text) - held].rstrip()
        self._held = text[len(certain) :]
        self._has_thoughts |= bool(certain)
        return certain
