"""Accuracy by attention mode: the same questions in full mode, in block mode, and without passages.

The table that comes out has the rows of table 1 of Block-Attention (Ma et al. 2025): full
attention, block attention, block attention without position re-encoding, no passage at all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import Generation, ReuseStats
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.evaluation.datasets import EvaluationSample
from blockattn_rag.evaluation.metrics import (
    METRICS,
    Interval,
    bootstrap_mean,
    normalize_answer,
    plain_figures,
)
from blockattn_rag.evaluation.modes import (
    check_prompt,
    check_unchanged,
    engine_for,
    files_of_modes,
    mode_options,
    noted_of,
)
from blockattn_rag.evaluation.records import EvaluationRecord, RecordFile, listed
from blockattn_rag.prompts.blocks import PLAIN, BlockPrompt
from blockattn_rag.prompts.checkpoints import AUTO, format_for
from blockattn_rag.prompts.formats import Passage, PromptFormat

# Liu et al. 2023, closed-book prompt.
CLOSED_BOOK = PromptFormat("closed-book", "", "", "{text}", PLAIN, "Question: {question}\nAnswer: ")


@dataclass(frozen=True, slots=True)
class ModeResult:
    """Figures of one mode. Scores lie in 0..1 with 95 % bootstrap intervals; times are seconds.

    ``difference`` (accuracy minus that of full mode, paired by question) and ``agreement`` (share
    of questions with the same normalised output as in full mode) are None where full mode was not
    run. ``cut_off`` counts answers that ended at ``max_new_tokens`` or at the end of the context
    window. ``ttft_s`` is the median time to the first token, and None where questions were
    answered in batches, because each question then waits for its whole batch. ``stats`` are the
    sums over all questions.
    """

    mode: str
    samples: int
    accuracy: Interval
    exact_match: Interval
    f1: Interval
    difference: Interval | None
    agreement: float | None
    cut_off: int
    ttft_s: float | None
    stats: ReuseStats

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; intervals as ``{"mean", "low", "high"}``."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "stats"}
        return plain_figures(fields) | self.stats.reuse()


@dataclass(frozen=True)  # with no slots, which would leave no room for what was computed
class EvaluationReport:
    """What an evaluation found: its settings, the figures by mode, and every record."""

    settings: Mapping[str, Any]
    records: Sequence[EvaluationRecord]

    @cached_property
    def results(self) -> list[ModeResult]:
        """One row for each mode, in the order of the run."""
        return self._results(self.records)

    @cached_property
    def by_kind(self) -> dict[str, list[ModeResult]]:
        """The rows of each kind of question, where the data tells kinds apart."""
        kinds = sorted({record.kind for record in self.records} - {""})
        of_kind = {kind: [r for r in self.records if r.kind == kind] for kind in kinds}
        return {kind: self._results(records) for kind, records in of_kind.items()}

    def _results(self, records: Sequence[EvaluationRecord]) -> list[ModeResult]:
        by_mode: dict[str, list[EvaluationRecord]] = {}
        for record in records:
            by_mode.setdefault(record.mode, []).append(record)
        full = {record.id: record for record in by_mode.get("full", ())}
        timed = self.settings["batch_size"] == 1
        return [_result(mode, rows, full, timed) for mode, rows in by_mode.items()]

    def __getitem__(self, mode: str) -> ModeResult:
        return next(result for result in self.results if result.mode == mode)

    @property
    def cut_off(self) -> int:
        """How many answers ended at ``max_new_tokens`` or at the end of the context window."""
        return sum(result.cut_off for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Settings and figures as plain JSON types, without the records."""
        return {
            "settings": dict(self.settings),
            "cut_off": self.cut_off,
            "rows": [result.to_dict() for result in self.results],
            "by_kind": {k: [r.to_dict() for r in rows] for k, rows in self.by_kind.items()},
        }


def evaluate(
    engine: BlockAttentionEngine,
    samples: Sequence[EvaluationSample],
    modes: Sequence[str] = ("full", "block"),
    *,
    prompt: str | PromptFormat = AUTO,
    num_passages: int | None = None,
    max_new_tokens: int = 48,
    batch_size: int = 8,
    stop: Sequence[str] = (),
    records_path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> EvaluationReport:
    """Answer every sample greedily in every mode and score the answers.

    Passages are encoded before block mode answers, so that its times are those of reuse.

    Args:
        engine: the model and its KV store.
        samples: see :func:`blockattn_rag.evaluation.datasets.read_samples`.
        modes: see :data:`blockattn_rag.evaluation.modes.MODES`.
        prompt: a prompt format or its name; ``"auto"`` goes by the model.
        num_passages: keep this many passages of each sample (gold ones first); all if None.
        batch_size: questions answered at once; with 1, times to the first token are told.
        stop: texts that end an answer.
        records_path: keep one JSON line for each answer there, and skip what it holds already.
        settings: what else to note in the report and in the records file, such as the data's name.
        on_progress: called with mode, answered and total questions, at first and after each batch.

    Raises:
        ValueError: an unknown mode or prompt format, a calibration of another model or of other
            prompts, or nothing to do.
        StoreError: a calibration cannot be used.
        DataError: ``records_path`` holds records of another evaluation or of other samples, or is
            no record file.
        ContextOverflowError: prompts do not fit in the context window; names their samples, before
            anything is answered.
    """
    _check_arguments(engine, samples, modes, batch_size)
    form = format_for(prompt, engine.model.name)
    noted = {
        **(settings or {}),
        "fingerprint": engine.model.fingerprint,
        **noted_of(engine),
        "prompt_format": form.name,
        "num_passages": num_passages,
        "max_new_tokens": max_new_tokens,
        "stop": list(stop),
        "batch_size": batch_size,
    }
    shown = [s.with_passages(num_passages) if num_passages else s for s in samples]
    _check_room(engine, form, shown, modes)
    check_prompts(engine, form, shown, modes)
    parse = EvaluationRecord.from_dict
    file = RecordFile(records_path, noted, parse) if records_path is not None else None
    files = files_of_modes(modes, engine)
    if file:
        file.check_samples(shown)
        file.check_files(files)
    done = dict(file.records) if file else {}
    tell = on_progress or (lambda *_: None)
    for mode in modes:
        pending = [sample for sample in shown if (sample.id, mode) not in done]
        before = len(shown) - len(pending)
        tell(mode, before, len(shown))
        for start in range(0, len(pending), batch_size):
            batch = pending[start : start + batch_size]
            answers = _answer(engine, form, batch, mode, max_new_tokens=max_new_tokens, stop=stop)
            new = [_record(s, mode, a, files[mode]) for s, a in zip(batch, answers, strict=True)]
            done.update({(record.id, mode): record for record in new})
            if file:
                file.append(new)
            tell(mode, before + start + len(batch), len(shown))
    check_unchanged(files, engine)
    # The kind decides no answer, and may have been another when the sample was answered.
    records = [replace(done[s.id, mode], kind=s.kind) for mode in modes for s in shown]
    return EvaluationReport(noted, records)


def _answer(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    batch: Sequence[EvaluationSample],
    mode: str,
    **options: Any,
) -> list[Generation]:
    """The answers to a batch of samples, in block mode after their passages were encoded."""
    prompts = [make_prompt(engine, form, sample, mode) for sample in batch]
    how, engine = mode_options(mode, engine), engine_for(engine, mode)
    if how["mode"] == "block":
        for prompt in prompts:
            encoded = {name: how[name] for name in ("sink", "correction")}
            engine.precompute(prompt.context, as_prompt=True, **encoded)
    return engine.generate_batch(prompts, **how, batch_size=len(batch), **options)


def make_prompt(
    engine: BlockAttentionEngine, form: PromptFormat, sample: EvaluationSample, mode: str
) -> BlockPrompt:
    """The prompt of a sample in a mode; closed-book prompts hold no passage."""
    tokenizer = engine.model.tokenizer.tokenizer
    if mode == "closed-book":
        return CLOSED_BOOK.prompt(sample.question, (), tokenizer)
    passages = [Passage(p.title, p.text) for p in sample.passages]
    return form.prompt(sample.question, passages, tokenizer)


def check_prompts(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    samples: Sequence[EvaluationSample],
    modes: Sequence[str],
) -> None:
    """Refuse modes that name a calibration of other prompts; those of one format have one head.

    Raises:
        ValueError: a calibration measured other prompts.
    """
    sample = next((sample for sample in samples if sample.passages), None)
    if sample is not None:
        for mode in modes:
            check_prompt(mode, engine, make_prompt(engine, form, sample, mode))


def _check_arguments(
    engine: BlockAttentionEngine,
    samples: Sequence[EvaluationSample],
    modes: Sequence[str],
    batch_size: int,
) -> None:
    if not modes or len(set(modes)) < len(modes):
        raise ValueError(f"modes must be distinct, and at least one; found {list(modes)}")
    for mode in modes:
        mode_options(mode, engine)
    if not samples:
        raise ValueError("expected at least one sample to evaluate, found none")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}")


def _check_room(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    samples: Sequence[EvaluationSample],
    modes: Sequence[str],
) -> None:
    """Refuse prompts that leave no room for an answer. One mode with passages is checked for all,
    because their prompts are the same."""
    mode = next((mode for mode in modes if mode != "closed-book"), modes[0])
    most = engine.model.max_context_tokens - 1
    found = {}
    for sample in samples:
        context, final = engine.model.tokenizer.prompt_ids(make_prompt(engine, form, sample, mode))
        tokens = sum(map(len, context)) + len(final)
        if tokens > most:
            found[sample.id] = tokens
    if found:
        raise ContextOverflowError(
            f"{len(found)} of {len(samples)} prompts do not fit in the model's context window of "
            f"{most + 1} tokens, the answer included: {listed(list(found))}, up to "
            f"{max(found.values())} tokens; keep fewer passages (num_passages, --num-passages), or "
            "leave these samples out"
        )


def _record(
    sample: EvaluationSample, mode: str, answer: Generation, files: str
) -> EvaluationRecord:
    kept = replace(answer.stats, fetch_s=0.0, assemble_s=0.0, prefill_s=0.0, total_s=0.0)
    return EvaluationRecord(
        id=sample.id,
        digest=sample.digest,
        mode=mode,
        kind=sample.kind,
        question=sample.question,
        answers=sample.answers,
        output=answer.text,
        stats=kept,
        finish_reason=answer.finish_reason,
        files=files,
        **{name: metric(answer.text, sample.answers) for name, metric in METRICS.items()},
    )


def _result(
    mode: str, rows: Sequence[EvaluationRecord], full: Mapping[str, EvaluationRecord], timed: bool
) -> ModeResult:
    pairs = [(row, full[row.id]) for row in rows if row.id in full]
    same = [normalize_answer(row.output) == normalize_answer(f.output) for row, f in pairs]
    return ModeResult(
        mode=mode,
        samples=len(rows),
        accuracy=bootstrap_mean([row.accuracy for row in rows]),
        exact_match=bootstrap_mean([row.exact_match for row in rows]),
        f1=bootstrap_mean([row.f1 for row in rows]),
        difference=bootstrap_mean([r.accuracy - f.accuracy for r, f in pairs]) if pairs else None,
        agreement=statistics.fmean(same) if pairs else None,
        cut_off=sum(row.finish_reason == "length" for row in rows),
        ttft_s=statistics.median(row.stats.ttft_s for row in rows) if timed else None,
        stats=sum((row.stats for row in rows[1:]), rows[0].stats),
    )
