"""Evaluation data: questions with passages, in plain or gzip-compressed JSON Lines files.

One JSON object per line::

    {"id": str, "question": str, "answers": [str, ...],
     "passages": [{"text": str, "title": str (optional), "gold": bool (optional)}, ...]}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blockattn_rag.errors import DataError
from blockattn_rag.lab.json_lines import (
    JsonRecord,
    list_of,
    not_blank,
    of_kind,
    parsed_lines,
    required_text,
    value_of,
)
from blockattn_rag.prompts.formats import Passage


class Sample(Protocol):
    """Question or prompt with an id that is unique within a run, and a digest of its content."""

    @property
    def id(self) -> str: ...
    @property
    def digest(self) -> str: ...


S = TypeVar("S", bound=Sample)


@dataclass(frozen=True, slots=True)
class EvaluationPassage(Passage):
    """Retrieved passage. ``gold``: whether it contains the answer."""

    gold: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationSample:
    """Question, reference answers, and passages in prompt order."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[EvaluationPassage, ...]

    @property
    def digest(self) -> str:
        """Digest of everything that the answer and its scores depend on."""
        return digest_of([self.question, self.answers, [(p.title, p.text) for p in self.passages]])

    def with_passages(self, num_passages: int) -> EvaluationSample:
        """Keep at most ``num_passages`` passages, preferring gold passages, without reordering."""
        if num_passages < 1:
            raise ValueError(f"Invalid num_passages {num_passages}: expected 1 or more")
        ranked = sorted(range(len(self.passages)), key=lambda i: (not self.passages[i].gold, i))
        kept = sorted(ranked[:num_passages])
        return replace(self, passages=tuple(self.passages[i] for i in kept))


def digest_of(parts: Any) -> str:
    """Return a digest of JSON values (16 hex digits), which is identical in all processes."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_samples(path: str | Path, *, limit: int | None = None) -> list[EvaluationSample]:
    """Read the first ``limit`` samples (default: all) of a plain or gzip JSON Lines file.

    Raises:
        DataError: The file is missing, empty or damaged, a record is invalid, or an id is repeated.
    """
    return read_distinct(path, lambda record, _: _sample(record), limit)


def read_distinct(
    path: str | Path, parse: Callable[[JsonRecord, int], S], limit: int | None = None
) -> list[S]:
    """Read samples with ``parse``, a function of a record and its line number. Raises the errors of
    ``read_samples``."""
    samples: dict[str, S] = {}
    for number, sample in islice(parsed_lines(path, parse), limit):
        if sample.id in samples:
            raise DataError(f"{path}, line {number}: Found a duplicate id, {sample.id!r}")
        samples[sample.id] = sample
    return list(samples.values())


def id_of(value: object) -> str:
    return str(value if isinstance(value, int) else of_kind(value, str, "'id'"))


def _sample(record: JsonRecord) -> EvaluationSample:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # For example, the text contains \ud800.
        raise DataError(f"Found a lone surrogate ({error}); use complete pairs") from error
    return EvaluationSample(
        id=id_of(value_of(record, "id")),
        question=required_text(record, "question"),
        answers=answers_of(record),  # Without answers, no output could be correct.
        passages=passages_of(record, may_be_empty=True),
    )


def answers_of(record: JsonRecord, *, may_be_empty: bool = False) -> tuple[str, ...]:
    items = enumerate(list_of(record, "answers", may_be_empty=may_be_empty))
    return tuple(not_blank(item, f"'answers[{i}]'") for i, item in items)


def passages_of(record: JsonRecord, *, may_be_empty: bool = False) -> tuple[EvaluationPassage, ...]:
    items = enumerate(list_of(record, "passages", may_be_empty=may_be_empty))
    return tuple(
        passage_of(of_kind(item, dict, f"passages[{i}]"), f"passages[{i}].") for i, item in items
    )


def passage_of(record: JsonRecord, where: str = "") -> EvaluationPassage:
    """Read a passage. ``where`` is its path for error messages, such as ``passages[0].``."""
    title = of_kind(record.get("title", ""), str, f"'{where}title'")
    gold = of_kind(record.get("gold", False), bool, f"'{where}gold'")
    return EvaluationPassage(title, required_text(record, "text", where), gold)
