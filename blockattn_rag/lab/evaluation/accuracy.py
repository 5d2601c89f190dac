"""Accuracy of full mode, block mode with recipes, and answers without passages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import Generation, Mode, ReuseStats
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.lab.evaluation.datasets import EvaluationSample
from blockattn_rag.lab.evaluation.metrics import (
    METRICS,
    Interval,
    bootstrap_mean,
    normalize_answer,
    plain_figures,
)
from blockattn_rag.lab.evaluation.records import (
    CLOSED_BOOK,
    FULL,
    Recipes,
    RecordFile,
    Report,
    Row,
    listed,
    rows_of,
    settings_of,
)
from blockattn_rag.prompts.blocks import NO_TEMPLATE, BlockPrompt
from blockattn_rag.prompts.checkpoints import AUTO_FORMAT, format_for
from blockattn_rag.prompts.formats import PromptFormat

# Closed-book prompt from Liu et al. 2023.
CLOSED_BOOK_FORMAT = PromptFormat(
    "closed-book", "", "", "{text}", NO_TEMPLATE, "Question: {question}\nAnswer: "
)
_COUNTS = ("hits", "misses", "reused_tokens", "computed_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """Scored answer to one question in one row. ``mode``: Row name. ``recipe``: Recipe digest."""

    id: str
    digest: str
    mode: str
    question: str
    answers: tuple[str, ...]
    output: str
    accuracy: float
    exact_match: float
    f1: float
    hits: int
    misses: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int
    finish_reason: str
    recipe: str = ""

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> EvaluationRecord:
        return cls(**{**line, "answers": tuple(line["answers"])})


@dataclass(frozen=True, slots=True)
class ModeResult:
    """Summary of one row. Scores are in 0..1 with 95 % bootstrap intervals.

    Args:
        difference: Accuracy minus full mode's accuracy, paired by question.
        agreement: Fraction of questions with the same normalized output as in full mode.
        cut_off: Number of answers that were cut off at ``max_new_tokens`` or by the context window.
        stats: Reuse counts summed over all questions. All times are 0.
    """

    mode: str
    samples: int
    accuracy: Interval
    exact_match: Interval
    f1: Interval
    difference: Interval
    agreement: float
    cut_off: int
    stats: ReuseStats

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "stats"}
        return plain_figures(fields) | self.stats.reuse()


EvaluationReport = Report[EvaluationRecord, ModeResult]
"""Result of ``evaluate``: a record for each answer, and a summary of each row."""


def evaluate(
    engine: BlockAttentionEngine,
    samples: Sequence[EvaluationSample],
    recipes: Recipes = ("auto",),
    *,
    closed_book: bool = False,
    max_new_tokens: int = 48,
    batch_size: int = 8,
    records_path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationReport:
    """Answer each sample in full mode and with each recipe, greedily, and score the answers.

    ``batch_size``: Number of prompts in a batch. Other arguments: see ``measure_fidelity``.

    Raises:
        ValueError: A recipe, its name or ``batch_size`` is invalid, or ``samples`` is empty.
        DataError: ``records_path`` contains records of another evaluation or other samples, or is
            not a record file.
        ContextOverflowError: Prompts do not fit in the context window. The message lists their
            samples. Raised before any prompt is answered.
    """
    if batch_size < 1:
        raise ValueError(f"Invalid batch_size {batch_size}: expected 1 or more")
    if not samples:
        raise ValueError("Expected at least one sample, found none")
    rows = rows_of(engine, Row(FULL), recipes, closed_book)
    form = format_for(AUTO_FORMAT, engine.model.name)
    limits = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    noted = settings_of(engine, settings, prompt_format=form.name, **limits)
    _check_room(engine, form, samples)
    file = RecordFile(records_path, noted, EvaluationRecord.from_dict, samples=samples, rows=rows)
    notify = on_progress or (lambda *_: None)
    answered, total = 0, len(rows) * len(samples)
    for row in rows:
        pending = [sample for sample in samples if (sample.id, row.name) not in file.records]
        answered += len(samples) - len(pending)
        notify(answered, total)
        for start in range(0, len(pending), batch_size):
            batch = pending[start : start + batch_size]
            bare = row.name == CLOSED_BOOK
            prompts = [make_prompt(engine, form, s, closed_book=bare) for s in batch]
            if row.recipe is not None:
                for prompt in prompts:
                    engine.precompute(prompt.context, as_prompt=True, recipe=row.recipe)
            options = {**row.options, "batch_size": len(batch), "max_new_tokens": max_new_tokens}
            answers = engine.generate_batch(prompts, **options)
            file.append([_record(s, row, a) for s, a in zip(batch, answers, strict=True)])
            answered += len(batch)
            notify(answered, total)
    return file.report(_result)


def make_prompt(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    sample: EvaluationSample,
    *,
    closed_book: bool = False,
) -> BlockPrompt:
    if closed_book:
        form = CLOSED_BOOK_FORMAT
    passages = () if closed_book else sample.passages
    return form.prompt(sample.question, passages, engine.model.tokenizer.tokenizer)


def _check_room(
    engine: BlockAttentionEngine, form: PromptFormat, samples: Sequence[EvaluationSample]
) -> None:
    most = engine.model.max_context_tokens - 1
    found = {}
    for sample in samples:
        context, final = engine.model.tokenizer.prompt_ids(make_prompt(engine, form, sample))
        tokens = sum(map(len, context)) + len(final)
        if tokens > most:
            found[sample.id] = tokens
    if found:
        raise ContextOverflowError(
            f"{len(found)} of {len(samples)} prompts do not fit in the model's context window of "
            f"{most + 1} tokens, including the answer: {listed(list(found))}, up to "
            f"{max(found.values())} tokens; use fewer passages (with_passages), or remove these "
            "samples"
        )


def _record(sample: EvaluationSample, row: Row, answer: Generation) -> EvaluationRecord:
    scores: dict[str, Any] = {
        name: metric(answer.text, sample.answers) for name, metric in METRICS.items()
    }
    counts: dict[str, Any] = {name: getattr(answer.stats, name) for name in _COUNTS}
    return EvaluationRecord(
        id=sample.id,
        digest=sample.digest,
        mode=row.name,
        question=sample.question,
        answers=sample.answers,
        output=answer.text,
        finish_reason=answer.finish_reason,
        recipe=row.digest,
        **scores,
        **counts,
    )


def _result(name: str, by_row: Mapping[str, Sequence[EvaluationRecord]]) -> ModeResult:
    rows = by_row[name]
    pairs = [*zip(rows, by_row[FULL], strict=True)]
    same = [normalize_answer(row.output) == normalize_answer(f.output) for row, f in pairs]
    mode: Mode = "block" if rows[0].recipe else "full"
    counts = {count: sum(getattr(row, count) for row in rows) for count in _COUNTS}
    return ModeResult(
        mode=name,
        samples=len(rows),
        accuracy=bootstrap_mean([row.accuracy for row in rows]),
        exact_match=bootstrap_mean([row.exact_match for row in rows]),
        f1=bootstrap_mean([row.f1 for row in rows]),
        difference=bootstrap_mean([r.accuracy - f.accuracy for r, f in pairs]),
        agreement=statistics.fmean(same),
        cut_off=sum(row.finish_reason == "length" for row in rows),
        stats=ReuseStats(mode, **counts),
    )
