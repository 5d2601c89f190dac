"""Fidelity: how far block mode's predictions are from full mode's, without labels.

Full mode answers each question greedily; every other mode is then shown that answer token by token,
and its predictions are compared with full mode's (Kullback-Leibler divergence, in nats). That tells
settings apart with far fewer questions than accuracy does. It rewards what full mode says, right or
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.evaluation.datasets import EvaluationSample
from blockattn_rag.evaluation.metrics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    plain_figures,
)
from blockattn_rag.evaluation.modes import (
    check_unchanged,
    engine_for,
    files_of_modes,
    mode_options,
    noted_of,
)
from blockattn_rag.evaluation.records import RecordFile, Sample, without_blank
from blockattn_rag.evaluation.run import check_prompts, make_prompt
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import place
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.greedy import greedy_answers
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.checkpoints import AUTO, format_for
from blockattn_rag.prompts.formats import PromptFormat

FLOOR = "floor"
"""Full attention computed in two steps, the context first: equal to full mode but for rounding."""


_ROUNDING = 10.0
"""Divergence of less than so many times the floor's is taken for rounding."""


@dataclass(frozen=True, slots=True)
class FidelityRecord:
    """One question in one mode, compared with full mode along full mode's answer.

    ``kl`` is the mean over the answer's ``tokens``, ``first_kl`` that of its first token, both in
    nats; ``agreement`` is the share of tokens at which the mode's first choice is full mode's. The
    mode's own greedy answer is the same where that is 1. ``files``: as of an ``EvaluationRecord``.
    """

    id: str
    digest: str
    mode: str
    tokens: int
    kl: float
    first_kl: float
    agreement: float
    files: str = ""

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> FidelityRecord:
        """The record whose ``to_dict`` this is.

        Raises:
            TypeError: fields are missing, or there are others.
        """
        return cls(**line)

    @classmethod
    def compared(
        cls, sample: Sample, mode: str, logits: Tensor, expected: Tensor
    ) -> FidelityRecord:
        """Compare a mode's ``logits`` with full mode's log-probabilities.

        Both are ``[answer tokens, vocab]``; ``expected`` is :func:`full_answer`'s.
        """
        found = _log_probabilities(logits)
        kl = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1).clamp_min(0)
        agrees = (found.argmax(-1) == expected.argmax(-1)).double()
        return cls(
            id=sample.id,
            digest=sample.digest,
            mode=mode,
            tokens=len(expected),
            kl=float(kl.mean()),
            first_kl=float(kl[0]),
            agreement=float(agrees.mean()),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return without_blank(asdict(self), "files")


@dataclass(frozen=True, slots=True)
class FidelityResult:
    """Figures of one mode, with 95 % bootstrap intervals over questions.

    ``recovery`` is the share of block mode's divergence that the mode takes away: (KL of block less
    KL of the mode) / (KL of block less KL of the floor). None for block mode itself and without
    passages, where block mode was not run, and where it differs from full mode by rounding alone.
    """

    mode: str
    samples: int
    kl: Interval
    first_kl: Interval
    agreement: Interval
    identical: Interval
    recovery: Interval | None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types; intervals as ``{"mean", "low", "high"}``."""
        return plain_figures({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True)  # with no slots, which would leave no room for what was computed
class FidelityReport:
    """What was found: the settings, the figures by mode, and every record."""

    settings: Mapping[str, Any]
    records: Sequence[FidelityRecord]

    @cached_property
    def results(self) -> list[FidelityResult]:
        """One row for each mode, in the order of the run."""
        by_mode: dict[str, list[FidelityRecord]] = {}
        for record in self.records:
            by_mode.setdefault(record.mode, []).append(record)
        return [_result(rows, by_mode) for rows in by_mode.values()]

    def __getitem__(self, mode: str) -> FidelityResult:
        return next(result for result in self.results if result.mode == mode)

    def to_dict(self) -> dict[str, Any]:
        """Settings and figures as plain JSON types, without the records."""
        rows = [result.to_dict() for result in self.results]
        return {"settings": dict(self.settings), "rows": rows}


def measure_fidelity(
    engine: BlockAttentionEngine,
    samples: Sequence[EvaluationSample],
    modes: Sequence[str] = ("block",),
    *,
    prompt: str | PromptFormat = AUTO,
    num_passages: int | None = None,
    max_new_tokens: int = 24,
    records_path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> FidelityReport:
    """Compare modes with full mode on every sample.

    Args:
        engine: the model and its KV store.
        samples: see :func:`blockattn_rag.evaluation.datasets.read_samples`; answers are not used.
        modes: see :data:`blockattn_rag.evaluation.modes.MODES`; full mode is compared with itself
            under the name ``"floor"``, in every run.
        prompt: a prompt format or its name; ``"auto"`` goes by the model.
        num_passages: keep this many passages of each sample (gold ones first); all if None.
        max_new_tokens: longest answer of full mode.
        records_path: keep one JSON line for each sample and mode there, and skip what it holds.
        settings: what else to note in the report and in the records file.
        on_progress: called with samples done and all samples.

    Raises:
        ValueError: an unknown mode or prompt format, a calibration of another model or of other
            prompts, or nothing to do.
        StoreError: a calibration cannot be used.
        DataError: ``records_path`` holds records of another measurement, or is no record file.
        ContextOverflowError: a prompt does not fit in the context window.
    """
    wanted = _wanted(modes, engine)
    form = format_for(prompt, engine.model.name)
    noted = {
        **(settings or {}),
        "measured": "fidelity",
        "fingerprint": engine.model.fingerprint,
        **noted_of(engine),
        "prompt_format": form.name,
        "num_passages": num_passages,
        "max_new_tokens": max_new_tokens,
    }
    shown = shown_samples(samples, num_passages)
    check_prompts(engine, form, shown, wanted[1:])

    def compare(sample: EvaluationSample, missing: Sequence[str]) -> list[FidelityRecord]:
        return _compare(engine, form, sample, missing, max_new_tokens)

    files = files_of_modes(wanted[1:], engine)
    report = compare_each(shown, wanted, compare, noted, records_path, on_progress, files)
    check_unchanged(files, engine)
    return report


S = TypeVar("S", bound=Sample)


def compare_each(
    samples: Sequence[S],
    modes: Sequence[str],
    compare: Callable[[S, Sequence[str]], list[FidelityRecord]],
    noted: Mapping[str, Any],
    records_path: str | Path | None,
    on_progress: Callable[[int, int], None] | None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> FidelityReport:
    """The report of all samples in all modes; what ``records_path`` holds is not compared again.

    Args:
        samples: as they are shown.
        compare: compares one sample in the modes named with full mode.
        noted: what the records depend on.
        files: digests of the files that modes name, by mode.
    """
    parse = FidelityRecord.from_dict
    file = RecordFile(records_path, noted, parse) if records_path is not None else None
    if file:
        file.check_samples(samples)
        file.check_files(files)
    done = dict(file.records) if file else {}
    tell = on_progress or (lambda *_: None)
    for number, sample in enumerate(samples):
        tell(number, len(samples))
        missing = [mode for mode in modes if (sample.id, mode) not in done]
        if not missing:
            continue
        new = [replace(one, files=files.get(one.mode, "")) for one in compare(sample, missing)]
        done.update({(record.id, record.mode): record for record in new})
        if file:
            file.append(new)
    tell(len(samples), len(samples))
    return FidelityReport(noted, [done[s.id, mode] for mode in modes for s in samples])


def shown_samples(
    samples: Sequence[EvaluationSample], num_passages: int | None
) -> list[EvaluationSample]:
    """The samples with the passages that are shown; at least one sample."""
    if not samples:
        raise ValueError("expected at least one sample to compare, found none")
    return [s.with_passages(num_passages) if num_passages else s for s in samples]


def _wanted(modes: Sequence[str], engine: BlockAttentionEngine) -> list[str]:
    others = [mode for mode in modes if mode != "full"]
    if not others or len(set(modes)) < len(modes):
        raise ValueError(f"modes must be distinct, and one of them not full; found {list(modes)}")
    for mode in others:
        mode_options(mode, engine)
    return [FLOOR, *others]


def _compare(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    sample: EvaluationSample,
    modes: Sequence[str],
    max_new_tokens: int,
) -> list[FidelityRecord]:
    """One sample in several modes, which share full mode's answer and predictions."""

    def prompt_in(mode: str) -> BlockPrompt:
        return make_prompt(engine, form, sample, mode)

    full = full_answer(engine, prompt_in("full"), max_new_tokens)
    return compare_modes(engine, sample, modes, prompt_in, *full)


def compare_modes(
    engine: BlockAttentionEngine,
    sample: Sample,
    modes: Sequence[str],
    prompt_in: Callable[[str], BlockPrompt],
    answer: Sequence[int],
    expected: Tensor,
) -> list[FidelityRecord]:
    """One sample in several modes.

    Args:
        prompt_in: its prompt in a mode.
        answer, expected: of ``full_answer``.
    """
    records = []
    for mode in modes:
        if mode == FLOOR:
            logits = _in_two_steps(engine.model, prompt_in("full"), answer)
        else:
            answering, how = engine_for(engine, mode), mode_options(mode, engine)
            logits = answering.answer_logits(prompt_in(mode), answer, **how)
        records.append(FidelityRecord.compared(sample, mode, logits, expected))
    return records


def full_answer(
    engine: BlockAttentionEngine, prompt: BlockPrompt, max_new_tokens: int
) -> tuple[list[int], Tensor]:
    """Full mode's greedy answer, and its log-probabilities ``[answer tokens, vocab]`` in float64
    along that answer.

    Raises:
        ContextOverflowError: the prompt leaves no room for one token.
    """
    model = engine.model
    ids = model.tokenizer.prompt_ids(prompt).flat
    limit = model.room_for(len(ids), Sampling(max_new_tokens=max_new_tokens))
    ((answer, logits),) = greedy_answers(model, [ids], limit)
    return answer.tolist(), _log_probabilities(logits)


def _log_probabilities(logits: Tensor) -> Tensor:
    # In float64, because the floor of float32 is about 1e-12.
    return F.log_softmax(logits.double(), dim=-1)


def _in_two_steps(model: BlockModel, prompt: BlockPrompt, answer: Sequence[int]) -> Tensor:
    """The logits of full attention, with the whole context computed as one block."""
    ids = model.tokenizer.prompt_ids(prompt)
    context = [token for block in ids.context for token in block]
    blocks = [as_one_block(model, context)] if context else []
    return model.answer_logits(context, ids.final, answer, model.cache_for(place(blocks)))


def as_one_block(model: BlockModel, context_ids: list[int]) -> BlockKV:
    """Full mode's keys and values of a whole context of at least one token."""
    ((kv,),) = model.encode([EncodeRequest(context_ids, "", "")])
    return kv


def is_rounding(kl: float, floor: float) -> bool:
    """Whether a mean divergence is no more than what rounding alone does, given the floor's."""
    return kl <= _ROUNDING * floor


def _result(
    rows: Sequence[FidelityRecord], by_mode: Mapping[str, Sequence[FidelityRecord]]
) -> FidelityResult:
    mode = rows[0].mode
    recovery = None
    if mode not in ("block", FLOOR, "closed-book") and "block" in by_mode:
        of_block, of_mode, of_floor = (
            np.array([row.kl for row in by_mode[name]]) for name in ("block", mode, FLOOR)
        )
        if not is_rounding(of_block.mean(), of_floor.mean()):
            recovery = bootstrap_ratio(of_block - of_mode, of_block - of_floor)
    return FidelityResult(
        mode=mode,
        samples=len(rows),
        kl=bootstrap_mean([row.kl for row in rows]),
        first_kl=bootstrap_mean([row.first_kl for row in rows]),
        agreement=bootstrap_mean([row.agreement for row in rows]),
        identical=bootstrap_mean([float(row.agreement == 1) for row in rows]),
        recovery=recovery,
    )
