"""``ask --compare``: one question in both modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blockattn_rag.app.rag.ask import Answer
from blockattn_rag.engine.results import Mode


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answers to one question in block mode and in full mode."""

    block: Answer
    full: Answer

    @property
    def answers_are_equal(self) -> bool:
        return self.block.answer == self.full.answer

    @property
    def first_token_ratio(self) -> float:
        """How many times longer full mode's first token takes, retrieval included in both."""
        return self.full.waited_s / self.block.waited_s

    @property
    def answer_ratio(self) -> float:
        """How many times longer full mode's whole answer takes."""
        return self.full.answered_s / self.block.answered_s

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; times in seconds."""
        return {
            "question": self.block.question,
            "block": self.block.to_dict(),
            "full": self.full.to_dict(),
            "answers_are_equal": self.answers_are_equal,
            "first_token_ratio": self.first_token_ratio,
            "answer_ratio": self.answer_ratio,
        }


def compare(answer: Callable[[Mode], Answer]) -> Comparison:
    """Answer in block mode, then in full mode.

    Block mode comes first: what full mode reads cannot help it, and it reads the passages from the
    store, as in a new process. Full mode takes nothing from the store or from earlier answers.

    Args:
        answer: Answers the question in a mode. ``Assistant.warm_up`` ran before.
    """
    block = answer("block")
    return Comparison(block, answer("full"))
