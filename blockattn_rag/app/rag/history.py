"""Earlier turns of a conversation, as part of the next question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def with_history(
    question: str, turns: Sequence[Turn], *, count: Callable[[str], int], max_tokens: int
) -> str:
    """A question behind the turns before it, so that it may refer to them.

    They stand with the question and not before the passages, which stay blocks that are reused.
    The oldest are left out where they take too much.

    Args:
        question: the new one.
        turns: the earlier ones, oldest first.
        count: tokens of a text.
        max_tokens: what the earlier turns may take.
    """
    kept: list[str] = []
    left = max_tokens
    for turn in reversed(turns):
        text = f"Q: {turn.question}\nA: {turn.answer}"
        if (left := left - count(text)) < 0:
            break
        kept.insert(0, text)
    if not kept:
        return question
    return "Earlier questions and answers:\n" + "\n".join(kept) + f"\n\nThis question: {question}"
