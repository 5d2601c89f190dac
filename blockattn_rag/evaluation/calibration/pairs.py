"""Questions with passages, as they are asked; and full mode's answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.evaluation.fidelity import full_answer
from blockattn_rag.prompts.blocks import BlockPrompt

TEACHER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Pair:
    """A question and the prompt that it becomes with its passages.

    ``id`` and ``digest`` are of the prompt: what was measured of it holds in any other run.
    ``seen_by``: the reader, correction and merge, as settings name them, that were made with the
    question.
    """

    question: str
    prompt: BlockPrompt
    seen_by: frozenset[str] = frozenset()
    id: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [block.rendered_spans for block in self.prompt.context]
        told = json.dumps([*parts, self.prompt.final]).encode()
        object.__setattr__(self, "id", hashlib.sha256(told).hexdigest()[:16])

    @property
    def digest(self) -> str:
        return self.id

    @property
    def passages(self) -> int:
        return sum(block.is_passage for block in self.prompt.context)


class Teacher:
    """Full mode's answers, each computed once while there is room for its predictions.

    Args:
        engine: the engine.
        max_new_tokens: longest answer.
        max_bytes: of the predictions that are kept; they have one float32 per token of the
            vocabulary and token of the answer.
    """

    def __init__(
        self, engine: BlockAttentionEngine, max_new_tokens: int, max_bytes: int = TEACHER_BYTES
    ) -> None:
        self._engine = engine
        self._max_new_tokens = max_new_tokens
        self._room = max_bytes
        self._kept: dict[str, tuple[Sequence[int], Tensor]] = {}

    def __call__(self, pair: Pair) -> tuple[Sequence[int], Tensor]:
        """The answer and its log-probabilities in float64, as ``full_answer``."""
        if (known := self._kept.get(pair.id)) is not None:
            return known[0], known[1].double()
        answer, expected = full_answer(self._engine, pair.prompt, self._max_new_tokens)
        small = expected.float().cpu()
        if small.nbytes <= self._room:
            self._room -= small.nbytes
            self._kept[pair.id] = answer, small
        return answer, expected
