"""How much of full mode's answers a collection keeps in block mode, measured on real questions.

Three ways to answer are compared on every question: full mode, the recipe in use, and the same
recipe without what it costs per answer. Divergence and agreement need no right answers
(``evaluation.fidelity``). With right answers, these are counted too, and the same model answers
without passages, which shows what passages gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.outline import FAST
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.evaluation.accuracy import CLOSED_BOOK_FORMAT
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, full_answer
from blockattn_rag.lab.evaluation.metrics import (
    Interval,
    bootstrap_mean,
    contains_answer,
    plain_figures,
)
from blockattn_rag.lab.evaluation.records import CLOSED_BOOK, FULL, Row
from blockattn_rag.prompts.blocks import BlockPrompt

TOLERANCE = 0.95
"""Share of full mode's answers that a recipe must keep: of its tokens, or of its right answers."""

FEWEST = 30
"""Number of questions below which a verdict is not reliable."""

_TIMED = 5
"""Questions whose first token is timed. Full mode needs another pass of the prompt for that."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its prompt. ``answers``: Right answers; empty if they are unknown."""

    id: str
    question: str
    prompt: BlockPrompt
    answers: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Empty, because no record is resumed."""
        return ""


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """Summary of one way to answer, with 95 % bootstrap intervals over questions.

    Args:
        name: ``"full"``, the recipe's text form, or ``"closed-book"``.
        agreement, kl: See ``FidelityResult``. None in full mode and without passages.
        right: Number of right answers. None if right answers are unknown.
        kept: Full mode's right answers that stay right.
        ttft_s: Median seconds to the first token, None without passages.
    """

    name: str
    agreement: Interval | None = None
    kl: Interval | None = None
    right: int | None = None
    kept: int | None = None
    ttft_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; intervals as ``{"mean", "low", "high"}``."""
        return plain_figures({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """Result of an evaluation: full mode, the recipes, the cheapest last, and without passages.

    Args:
        questions: Number of questions.
        with_answers: Number of questions with right answers.
    """

    questions: int
    with_answers: int
    rows: tuple[CollectionRow, ...]

    def __getitem__(self, name: str) -> CollectionRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def recipes(self) -> tuple[CollectionRow, ...]:
        """The rows of block mode, the recipe in use first."""
        return tuple(row for row in self.rows if row.name not in (FULL, CLOSED_BOOK))

    def gain(self, row: CollectionRow) -> float | None:
        """Share of the gain from passages that a row keeps: (right - none) / (full - none).

        None if right answers are unknown, or passages gain nothing in full mode.
        """
        if row.right is None or row.name == CLOSED_BOOK:
            return None
        full, none = (self[name].right or 0 for name in (FULL, CLOSED_BOOK))
        return (row.right - none) / (full - none) if full > none else None

    def share(self, row: CollectionRow) -> float:
        """Share of full mode's answers that a recipe keeps: right answers if known, else tokens."""
        if row.kept is not None and (right := self[FULL].right):
            return row.kept / right
        assert row.agreement is not None
        return row.agreement.mean

    def sooner(self, row: CollectionRow) -> float:
        """How many times sooner than in full mode the first token comes."""
        full = self[FULL].ttft_s
        assert full is not None
        assert row.ttft_s is not None
        return full / row.ttft_s

    @property
    def best(self) -> CollectionRow | None:
        """The cheapest recipe within ``TOLERANCE`` of full mode. None: there is none."""
        return next((row for row in self.recipes[::-1] if self.share(row) >= TOLERANCE), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        rows = [row.to_dict() | {"gain": self.gain(row)} for row in self.rows]
        counts = {"questions": self.questions, "with_answers": self.with_answers}
        return counts | {"rows": rows, "best": self.best and self.best.name}


def evaluate_collection(
    engine: BlockAttentionEngine,
    asked: Sequence[Asked],
    *,
    max_new_tokens: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> CollectionReport:
    """Compare full mode, the engine's recipe, and its free part on every question.

    Args:
        engine: An engine that keeps no blocks in memory, so that times include reading them.
        asked: At least one question. Blocks that are not stored are encoded and stored.
        max_new_tokens: Maximum length of an answer in tokens.
        on_progress: Called with the number of finished questions and the number of all questions.

    Raises:
        ContextOverflowError: A prompt does not fit in the context window.
    """
    rows = _rows(engine.recipe)
    compared: dict[str, list[FidelityRecord]] = {row.name: [] for row in rows}
    right: dict[str, list[bool]] = {row.name: [] for row in (Row(FULL), *rows, Row(CLOSED_BOOK))}
    times: dict[str, list[float]] = {row.name: [] for row in (Row(FULL), *rows)}
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for number, one in enumerate(asked):
        on_progress(number, len(asked))
        engine.precompute(one.prompt.context, as_prompt=True)
        ids, expected = full_answer(engine, one.prompt, max_new_tokens)
        if number < _TIMED:
            first = engine.generate(one.prompt, mode="full", max_new_tokens=1).stats
            times[FULL].append(first.ttft_s)
        if one.answers:
            tokenizer = engine.model.tokenizer.tokenizer
            text = tokenizer.decode(ids, skip_special_tokens=True)
            right[FULL].append(_is_right(text, one))
            bare = CLOSED_BOOK_FORMAT.prompt(one.question, (), tokenizer)
            found = engine.generate(bare, mode="full", **options)
            right[CLOSED_BOOK].append(_is_right(found.text, one))
        for row in rows:
            # Without right answers, only the first token is needed, for its time.
            wanted = options if one.answers else options | {"max_new_tokens": 1}
            found = engine.generate(one.prompt, **row.options, **wanted)
            times[row.name].append(found.stats.ttft_s)
            if one.answers:
                right[row.name].append(_is_right(found.text, one))
            logits = engine.answer_logits(one.prompt, ids, **row.options)
            compared[row.name].append(FidelityRecord.compared(one, row, logits, expected))
    on_progress(len(asked), len(asked))
    return _report(len(asked), compared, right, times)


def _rows(recipe: Recipe) -> list[Row]:
    """The recipe in use, and the recipe without its costs per answer, if it has any."""
    free = replace(recipe, promote=0, recompute=0.0)
    name = FAST if free == Recipe.of_text(FAST) else str(free)
    return [*([Row(str(recipe), recipe)] if free != recipe else []), Row(name, free)]


def _is_right(text: str, asked: Asked) -> bool:
    return bool(contains_answer(text, asked.answers))


def _report(
    questions: int,
    compared: dict[str, list[FidelityRecord]],
    right: dict[str, list[bool]],
    times: dict[str, list[float]],
) -> CollectionReport:
    rows = []
    for name, found in right.items():
        records = compared.get(name)
        rows.append(
            CollectionRow(
                name,
                agreement=bootstrap_mean([one.agreement for one in records]) if records else None,
                kl=bootstrap_mean([one.kl for one in records]) if records else None,
                right=sum(found) if found else None,
                kept=sum(a and b for a, b in zip(found, right[FULL], strict=True))
                if found
                else None,
                ttft_s=statistics.median(times[name][:_TIMED]) if name in times else None,
            )
        )
    with_answers = len(right[FULL])
    return CollectionReport(questions, with_answers, tuple(rows if with_answers else rows[:-1]))
