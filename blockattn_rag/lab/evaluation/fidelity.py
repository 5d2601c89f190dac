"""Fidelity: how closely block mode's predictions match full mode's, measured without labels.

Full mode answers each question with greedy decoding. Then, each recipe predicts every token of this
answer from the preceding tokens, and its predictions are compared with full mode's
(Kullback-Leibler divergence, in nats). Fidelity can distinguish recipes with far fewer questions
than accuracy can. It rewards agreement with full mode, whether full mode is right or wrong.

Prompts come from evaluation data or a log. A log is a plain or gzip-compressed JSON Lines file.
Each ``prompt`` is a list as for ``engine.generate``, with the final block last::

    {"prompt": ["You are ...", "passage 1", "passage 2", "question"], "id": "optional"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.kv.context import place
from blockattn_rag.lab.evaluation.accuracy import make_prompt
from blockattn_rag.lab.evaluation.datasets import (
    EvaluationSample,
    S,
    Sample,
    digest_of,
    id_of,
    read_distinct,
)
from blockattn_rag.lab.evaluation.metrics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    plain_figures,
)
from blockattn_rag.lab.evaluation.records import (
    CLOSED_BOOK,
    PLAIN,
    Recipes,
    RecordFile,
    Report,
    Row,
    rows_of,
    settings_of,
)
from blockattn_rag.lab.json_lines import JsonRecord, list_of, not_blank
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.decoding import greedy_answers
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.checkpoints import AUTO_FORMAT, format_for

FLOOR = Row("floor")
"""Row for full attention computed in two steps, context first, which differs from full mode only by
rounding."""

_ROUNDING = 10.0
"""Divergences below this multiple of the floor's divergence count as rounding errors."""

_UNMEASURED_FLOOR = 1e-9
"""Assumed divergence of the floor if it was not measured: an upper bound for float32."""


@dataclass(frozen=True, slots=True)
class FidelityRecord:
    """Comparison of a row with full mode on one question, over the tokens of full mode's answer.

    Args:
        mode: Name of the row.
        tokens: Number of tokens in full mode's answer.
        kl, first_kl: Divergence in nats: mean over the answer, and at its first token.
        agreement: Fraction of tokens for which the row's most likely token equals full mode's. If
            it is 1, the greedy answers are identical.
        recipe: Digest of the row's recipe. Empty in full mode.
    """

    id: str
    digest: str
    mode: str
    tokens: int
    kl: float
    first_kl: float
    agreement: float
    recipe: str = ""

    @classmethod
    def of(cls, sample: Sample, row: Row, kl: Tensor, agrees: Tensor) -> FidelityRecord:
        """Create a record from each token's divergence, and whether its top prediction agrees."""
        kl = kl.clamp_min(0)  # Negative values are rounding errors.
        return cls(
            id=sample.id,
            digest=sample.digest,
            mode=row.name,
            tokens=len(kl),
            kl=float(kl.mean()),
            first_kl=float(kl[0]),
            agreement=float(agrees.double().mean()),
            recipe=row.digest,
        )

    @classmethod
    def compared(cls, sample: Sample, row: Row, logits: Tensor, expected: Tensor) -> FidelityRecord:
        """Compare a row's ``logits`` with full mode's log-probabilities ``expected`` (from
        ``full_answer``), both ``[answer tokens, vocab]``."""
        found = _log_probabilities(logits)
        kl = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        return cls.of(sample, row, kl, found.argmax(-1) == expected.argmax(-1))


@dataclass(frozen=True, slots=True)
class FidelityResult:
    """Summary of one row, with 95 % bootstrap intervals over questions.

    ``recovery`` is the fraction of plain block mode's divergence that the recipe removes: (KL of
    the row ``none`` minus KL of this row) / (KL of ``none`` minus KL of the floor). It is None for
    the rows ``none``, ``floor`` and ``closed-book``, if ``none`` was not run, and if ``none``
    differs from full mode only by rounding. ``identical``: Fraction of identical answers.
    """

    mode: str
    samples: int
    kl: Interval
    first_kl: Interval
    agreement: Interval
    identical: Interval
    recovery: Interval | None

    def to_dict(self) -> dict[str, Any]:
        return plain_figures({name: getattr(self, name) for name in self.__slots__})


FidelityReport = Report[FidelityRecord, FidelityResult]
"""Result of ``measure_fidelity``: a record for each sample and row, and a summary of each row."""


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """Logged prompt: its id, and its blocks with the final block last."""

    id: str
    texts: tuple[str, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.texts)


def read_log(path: str | Path) -> list[LoggedPrompt]:
    """Read logged prompts from a JSON Lines file. The default id is the line number."""

    def parse(record: JsonRecord, number: int) -> LoggedPrompt:
        texts = enumerate(list_of(record, "prompt"))
        return LoggedPrompt(
            id_of(record.get("id", number)),
            tuple(not_blank(text, f"'prompt[{index}]'") for index, text in texts),
        )

    return read_distinct(path, parse)


def measure_fidelity(
    engine: BlockAttentionEngine,
    samples: Sequence[EvaluationSample] | Sequence[LoggedPrompt],
    recipes: Recipes = ("auto",),
    *,
    closed_book: bool = False,
    max_new_tokens: int = 24,
    records_path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> FidelityReport:
    """Compare block mode with full mode on every sample.

    Args:
        samples: Evaluation data (reference answers are not used) or logged prompts.
        recipes: Recipes to compare. Every run also has the row ``"floor"``: full attention that is
            computed in two steps (``FLOOR``).
        closed_book: Whether to also compare full mode without passages. Only for evaluation data.
        max_new_tokens: Maximum length of full mode's answers in tokens.
        records_path: JSON Lines file with a record per sample and row. Recorded samples are
            skipped.
        settings: Additional settings for the report and the records file.

    Raises:
        ValueError: A recipe, its name, ``closed_book`` or ``samples`` is invalid.
        DataError: ``records_path`` contains records of another run, or is not a record file.
        ContextOverflowError: A prompt does not fit in the context window.
    """
    if not samples:
        raise ValueError("Expected at least one sample, found none")
    if closed_book and isinstance(samples[0], LoggedPrompt):
        raise ValueError("Found closed_book=True with logged prompts; expected evaluation data")
    rows = rows_of(engine, FLOOR, recipes, closed_book)
    form = format_for(AUTO_FORMAT, engine.model.name)
    kind: dict[str, str | None] = {"measured": "fidelity", "prompt_format": form.name}
    if isinstance(samples[0], LoggedPrompt):
        kind = {"measured": "log", "prompt_format": None}
    noted = settings_of(engine, settings, max_new_tokens=max_new_tokens, **kind)

    def compare(
        sample: EvaluationSample | LoggedPrompt, missing: Sequence[Row]
    ) -> list[FidelityRecord]:
        if isinstance(sample, LoggedPrompt):
            prompt = bare = BlockPrompt.from_texts(sample.texts)
        else:
            prompt = make_prompt(engine, form, sample)
            bare = make_prompt(engine, form, sample, closed_book=True)
        answer, expected = full_answer(engine, prompt, max_new_tokens)
        records = []
        for row in missing:
            if row is FLOOR:
                logits = _in_two_steps(engine.model, prompt, answer)
            else:
                shown = bare if row.name == CLOSED_BOOK else prompt
                logits = engine.answer_logits(shown, answer, **row.options)
            records.append(FidelityRecord.compared(sample, row, logits, expected))
        return records

    return compare_each([*samples], rows, compare, noted, records_path, on_progress)


def compare_each(
    samples: Sequence[S],
    rows: Sequence[Row],
    compare: Callable[[S, Sequence[Row]], list[FidelityRecord]],
    noted: Mapping[str, Any],
    records_path: str | Path | None,
    on_progress: Callable[[int, int], None] | None,
) -> FidelityReport:
    """Compare each row with full mode on each sample, unless ``records_path`` has the result."""
    file = RecordFile(
        records_path, noted, lambda line: FidelityRecord(**line), samples=samples, rows=rows
    )
    notify = on_progress or (lambda *_: None)
    for number, sample in enumerate(samples):
        notify(number, len(samples))
        if missing := [row for row in rows if (sample.id, row.name) not in file.records]:
            file.append(compare(sample, missing))
    notify(len(samples), len(samples))
    return file.report(_result)


def full_answer(
    engine: BlockAttentionEngine, prompt: BlockPrompt, max_new_tokens: int
) -> tuple[list[int], Tensor]:
    """Return full mode's greedy answer, and its log-probabilities ``[answer tokens, vocab]`` in
    float64."""
    model = engine.model
    ids = model.tokenizer.prompt_ids(prompt).flat
    limit = model.room_for(len(ids), Sampling(max_new_tokens=max_new_tokens))
    with model.lock:
        run = model.hf_model, model.tokenizer.tokenizer
        ((answer, logits),) = greedy_answers(*run, [ids], limit)
    return answer.tolist(), _log_probabilities(logits)


def _log_probabilities(logits: Tensor) -> Tensor:
    # Use float64, because float32 rounding would cause a divergence of about 1e-12.
    return F.log_softmax(logits.double(), dim=-1)


def _in_two_steps(model: BlockModel, prompt: BlockPrompt, answer: Sequence[int]) -> Tensor:
    """Logits of full attention, with the complete context computed first as one block."""
    ids = model.tokenizer.prompt_ids(prompt)
    context = [token for block in ids.context for token in block]
    requests = [EncodeRequest(context, "", "")] if context else []
    blocks = [kv for batch in model.encode(requests) for kv in batch]
    return model.answer_logits(context, ids.final, answer, model.cache_for(place(blocks)))


def _result(name: str, by_row: Mapping[str, Sequence[FidelityRecord]]) -> FidelityResult:
    rows, recovery = by_row[name], None
    if name not in (PLAIN, FLOOR.name, CLOSED_BOOK) and PLAIN in by_row:
        plain, found = (np.array([row.kl for row in by_row[mode]]) for mode in (PLAIN, name))
        measured = [row.kl for row in by_row.get(FLOOR.name, ())]
        floor = np.array(measured) if measured else np.full_like(plain, _UNMEASURED_FLOOR)
        if plain.mean() > _ROUNDING * floor.mean():
            recovery = bootstrap_ratio(plain - found, plain - floor)
    return FidelityResult(
        mode=name,
        samples=len(rows),
        kl=bootstrap_mean([row.kl for row in rows]),
        first_kl=bootstrap_mean([row.first_kl for row in rows]),
        agreement=bootstrap_mean([row.agreement for row in rows]),
        identical=bootstrap_mean([float(row.agreement == 1) for row in rows]),
        recovery=recovery,
    )
