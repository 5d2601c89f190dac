"""Evaluation of block mode on a user's collection and questions, compared with full mode.

The recipe in use and ``"fast"``, which has no cost per answer, are compared with full mode on each
question. Divergence and agreement need no reference answers (``evaluation.fidelity``). For
questions with reference answers, correct answers are counted, too, with and without passages.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.engine.outline import FAST
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
"""Fraction of full mode's correct answers, or of its tokens, that a recipe must keep."""

FEWEST = 30
"""Minimum number of questions for a reliable verdict."""

_TIMED = 5
"""Number of questions to measure time to first token on, which adds a full-mode pass to each."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Question with its prompt and its reference answers, which may be empty."""

    id: str
    question: str
    prompt: BlockPrompt
    answers: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """Summary of one mode or recipe, with 95 % bootstrap intervals over questions.

    Args:
        agreement, kl: See ``FidelityResult``. None in full mode and without passages.
        right, kept: Number of correct answers, and of those that are also correct in full mode.
            None without reference answers.
        ttft_s: Median time to first token in seconds. None without passages.
    """

    name: str
    agreement: Interval | None = None
    kl: Interval | None = None
    right: int | None = None
    kept: int | None = None
    ttft_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return plain_figures({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """Results of full mode, the recipe in use, ``"fast"``, and answers without passages."""

    questions: int
    with_answers: int
    rows: tuple[CollectionRow, ...]

    def __getitem__(self, name: str) -> CollectionRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def recipes(self) -> tuple[CollectionRow, ...]:
        """Block-mode rows, the recipe in use first."""
        return tuple(row for row in self.rows if row.name not in (FULL, CLOSED_BOOK))

    def gain(self, row: CollectionRow) -> float | None:
        """Fraction of full mode's accuracy gain from passages that a row keeps. None for the row
        without passages, without reference answers, or if passages do not improve full mode."""
        if row.right is None or row.name == CLOSED_BOOK:
            return None
        full, none = (self[name].right or 0 for name in (FULL, CLOSED_BOOK))
        return (row.right - none) / (full - none) if full > none else None

    def share(self, row: CollectionRow) -> float:
        """Fraction of full mode's correct answers that a recipe keeps; if none, of its tokens."""
        if row.kept is not None and (right := self[FULL].right):
            return row.kept / right
        assert row.agreement is not None
        return row.agreement.mean

    def sooner(self, row: CollectionRow) -> float:
        full = self[FULL].ttft_s
        assert full is not None
        assert row.ttft_s is not None
        return full / row.ttft_s

    @property
    def best(self) -> CollectionRow | None:
        """The cheapest recipe that keeps at least ``TOLERANCE`` of full mode's answers, or None."""
        return next((row for row in self.recipes[::-1] if self.share(row) >= TOLERANCE), None)

    def to_dict(self) -> dict[str, Any]:
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
    """Compare full mode, the engine's recipe, and ``"fast"`` on every question.

    Args:
        engine: Engine without resident blocks, so that times include reading them. Missing blocks
            are encoded and stored; for ``"fast"`` in a temporary folder, if it encodes differently.
    """
    with tempfile.TemporaryDirectory() as folder:
        engines = _engines(engine, folder)
        measured = {row: _Measured() for row in (FULL, *engines, CLOSED_BOOK)}
        for number, question in enumerate(asked):
            on_progress(number, len(asked))
            _measure(engine, engines, question, max_new_tokens, measured, is_timed=number < _TIMED)
    on_progress(len(asked), len(asked))
    right = measured[FULL].right
    if not right:  # No question has reference answers, so this row was not measured.
        del measured[CLOSED_BOOK]
    rows = tuple(row.summary(name, right) for name, row in measured.items())
    return CollectionReport(len(asked), len(right), rows)


def _engines(engine: BlockAttentionEngine, folder: str) -> dict[str, BlockAttentionEngine]:
    """Create engines, by row name, for the recipe in use and, if it differs, for ``"fast"``."""
    fast = Recipe.of_text(FAST)
    assert fast is not None
    if engine.recipe.outline == fast.outline:
        return {FAST: engine}
    # Recipes with the same encoding share blocks. Other blocks are kept out of the user's store.
    store = engine.store if engine.recipe.encoding == fast.encoding else folder
    options: dict[str, Any] = {"namespace": engine.access.namespace, "kv_dtype": engine.kv_dtype}
    other = BlockAttentionEngine(engine.model, store, recipe=fast, resident_bytes=0, **options)
    return {str(engine.recipe): engine, FAST: other}


@dataclass
class _Measured:
    compared: list[FidelityRecord] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def summary(self, name: str, right_in_full: Sequence[bool]) -> CollectionRow:
        compared, right = self.compared, self.right
        pairs = zip(right, right_in_full, strict=True)
        return CollectionRow(
            name,
            agreement=bootstrap_mean([r.agreement for r in compared]) if compared else None,
            kl=bootstrap_mean([r.kl for r in compared]) if compared else None,
            right=sum(right) if right else None,
            kept=sum(a and b for a, b in pairs) if right else None,
            ttft_s=statistics.median(self.times) if self.times else None,
        )


def _measure(
    engine: BlockAttentionEngine,
    engines: Mapping[str, BlockAttentionEngine],
    asked: Asked,
    max_new_tokens: int,
    measured: Mapping[str, _Measured],
    *,
    is_timed: bool,
) -> None:
    prompt, options = asked.prompt, {"max_new_tokens": max_new_tokens, "do_sample": False}
    # Without reference answers, only the time to first token is needed.
    wanted: dict[str, Any] = options if asked.answers else {**options, "max_new_tokens": 1}
    ids, expected = full_answer(engine, prompt, max_new_tokens)
    tokenizer = engine.model.tokenizer.tokenizer
    texts = {FULL: tokenizer.decode(ids, skip_special_tokens=True)}
    if is_timed:
        first = engine.generate(prompt, mode="full", max_new_tokens=1).stats
        measured[FULL].times.append(first.ttft_s)
    for name, own in engines.items():
        own.precompute(prompt.context, as_prompt=True)
        if asked.answers or is_timed:
            found = own.generate(prompt, **wanted)
            texts[name] = found.text
            if is_timed:
                measured[name].times.append(found.stats.ttft_s)
        logits = own.answer_logits(prompt, ids)
        record = FidelityRecord.compared(asked, Row(name, own.recipe), logits, expected)
        measured[name].compared.append(record)
    if asked.answers:
        bare = CLOSED_BOOK_FORMAT.prompt(asked.question, (), tokenizer)
        texts[CLOSED_BOOK] = engine.generate(bare, mode="full", **wanted).text
        for name, text in texts.items():
            measured[name].right.append(bool(contains_answer(text, asked.answers)))
