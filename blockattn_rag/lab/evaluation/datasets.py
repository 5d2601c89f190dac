"""Question-answering data with passages: reading and checking.

One JSON object a line, plain or gzip::

    {"id": str, "question": str, "answers": [str, ...], "kind": str (optional),
     "passages": [{"title": str, "text": str, "gold": bool (optional)}, ...]}
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from blockattn_rag.errors import DataError
from blockattn_rag.files import (
    list_of,
    not_blank,
    numbered_lines,
    of_kind,
    parse_line,
    text_of,
    value_of,
)


@dataclass(frozen=True, slots=True)
class EvaluationPassage:
    """A retrieved passage; ``gold``: it holds the answer."""

    title: str
    text: str
    gold: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationSample:
    """A question, the answers that are right, and the passages in prompt order."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[EvaluationPassage, ...]
    kind: str = ""

    @property
    def digest(self) -> str:
        """Hash of all that an answer and its scores depend on; the same in every process."""
        told = [self.question, self.answers, [(p.title, p.text) for p in self.passages]]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def with_passages(self, num_passages: int) -> EvaluationSample:
        """This sample with at most ``num_passages`` passages, order kept: the gold ones, then the
        first of the others."""
        if num_passages < 1:
            raise ValueError(f"num_passages must be at least 1, found {num_passages}")
        ranked = sorted(range(len(self.passages)), key=lambda i: (not self.passages[i].gold, i))
        kept = sorted(ranked[:num_passages])
        return replace(self, passages=tuple(self.passages[i] for i in kept))


def read_samples(path: str | Path, *, limit: int | None = None) -> list[EvaluationSample]:
    """Read evaluation data from a ``.jsonl`` or ``.jsonl.gz`` file.

    Args:
        path: the file. Blank lines are skipped.
        limit: read no more than this many samples.

    Raises:
        DataError: a line is malformed or an id comes twice (the message names file and line), or
            the file is missing, damaged, or holds no sample.
    """
    samples: dict[str, EvaluationSample] = {}
    for number, line in numbered_lines(Path(path)):
        if limit is not None and len(samples) >= limit:
            break
        try:
            sample = _sample(parse_line(line))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if sample.id in samples:
            raise DataError(f"{path}, line {number}: the id {sample.id!r} was used before")
        samples[sample.id] = sample
    if not samples:
        raise DataError(f"{path}: expected one JSON object a line, found no line")
    return list(samples.values())


def _sample(value: object) -> EvaluationSample:
    record = of_kind(value, dict, "a record")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # \ud800 and the like, which no file could hold again
        raise DataError(f"found half of a surrogate pair ({error}); write whole ones") from error
    name = value_of(record, "id")
    answers = enumerate(list_of(record, "answers"))  # of an empty one, every output would be right
    passages = enumerate(list_of(record, "passages", may_be_empty=True))
    return EvaluationSample(
        id=str(name if isinstance(name, int) else of_kind(name, str, "'id'")),
        question=text_of(record, "question"),
        answers=tuple(not_blank(answer, f"'answers[{i}]'") for i, answer in answers),
        passages=tuple(_passage(passage, f"passages[{i}]") for i, passage in passages),
        kind=of_kind(record.get("kind", ""), str, "'kind'"),
    )


def _passage(value: object, where: str) -> EvaluationPassage:
    record = of_kind(value, dict, where)
    title = of_kind(value_of(record, "title", f"{where}."), str, f"'{where}.title'")
    gold = of_kind(record.get("gold", False), bool, f"'{where}.gold'")
    return EvaluationPassage(title, text_of(record, "text", f"{where}."), gold)
