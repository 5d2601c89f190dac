"""What a model thinks before it answers, apart from the answer.

Models whose chat template speaks of ``<think>`` write their thoughts between ``<think>`` and
``</think>`` before they answer. Some templates write the opening mark themselves, so that it stands
in the prompt and not in the answer.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from blockattn_rag.prompts.blocks import BlockPrompt

OPENING, CLOSING = "<think>", "</think>"


class Said(NamedTuple):
    """Text of a model, or a piece of it: what it thinks, and what it answers."""

    thoughts: str = ""
    answer: str = ""


def marks_thoughts(tokenizer: Any) -> bool:
    """Whether the chat template of a tokenizer knows answers that begin with thoughts."""
    return CLOSING in str(getattr(tokenizer, "chat_template", None))


class ThoughtReader:
    """Reads one answer, whole or piece by piece as it comes.

    White space around thoughts, and between them and the answer, is left out. An answer that was
    cut off while the model was thinking is thoughts alone. A mark that comes later is text.

    Args:
        tokenizer: the model's; where its chat template marks no thoughts, all text is answer.
        prompt: the prompt that is answered.
        answers_at_once: a grammar holds the answer to what cannot be thoughts, also where the
            prompt has opened them.
    """

    def __init__(
        self, tokenizer: Any, prompt: BlockPrompt, *, answers_at_once: bool = False
    ) -> None:
        is_open = prompt.final.rstrip().endswith(OPENING) and not answers_at_once
        self._at: Literal["start", "thoughts", "gap", "answer"] = "thoughts" if is_open else "start"
        if not marks_thoughts(tokenizer):
            self._at = "answer"
        self._held = ""  # text of which it is not known yet what it is
        self._has_thoughts = False

    def push(self, text: str) -> Said:
        """Take a piece; give what has become certain, maybe nothing."""
        self._held += text
        thoughts = ""
        if self._at == "start":
            self._find_opening()
        if self._at == "thoughts":
            thoughts = self._thoughts()
        if self._at == "gap" and self._held.lstrip():
            self._at, self._held = "answer", self._held.lstrip()
        return Said(thoughts, self._taken() if self._at == "answer" else "")

    def finish(self, text: str = "") -> Said:
        """Take the last piece; give all that is left."""
        said = self.push(text)
        if self._at == "thoughts":
            return Said(said.thoughts + self._taken().rstrip(), said.answer)
        return Said(said.thoughts, said.answer + ("" if self._at == "gap" else self._taken()))

    def _find_opening(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self._at, self._held = "thoughts", begun.removeprefix(OPENING)
        elif not OPENING.startswith(begun):
            self._at = "answer"

    def _thoughts(self) -> str:
        """Thoughts up to the closing mark, or to what may be its beginning or blanks before it."""
        if not self._has_thoughts:
            self._held = self._held.lstrip()
        text, mark, rest = self._held.partition(CLOSING)
        if mark:
            self._at, self._held = "gap", rest
            return text.rstrip()
        sizes = (n for n in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:n]))
        certain = text[: len(text) - next(sizes, 0)].rstrip()
        self._held = text[len(certain) :]
        self._has_thoughts |= bool(certain)
        return certain

    def _taken(self) -> str:
        text, self._held = self._held, ""
        return text
