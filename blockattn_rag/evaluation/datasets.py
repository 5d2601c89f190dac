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
from typing import Any

from blockattn_rag.errors import DataError
from blockattn_rag.files.jsonl import numbered_lines, parse_line


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
        """Of all that an answer and its scores depend on; the same in every process."""
        told = [self.question, self.answers, [(p.title, p.text) for p in self.passages]]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def with_passages(self, num_passages: int) -> EvaluationSample:
        """The same with at most ``num_passages`` passages, order kept: the gold ones, then the
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


def _sample(record: Any) -> EvaluationSample:
    _expect(record, dict, "a JSON object", "the line")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # \ud800 and the like, which no file could hold again
        raise DataError(f"found half of a surrogate pair ({error}); write whole ones") from error
    passages = _get(record, "passages", list, "a list of passages")
    return EvaluationSample(
        id=str(_get(record, "id", (str, int), "a string")),
        question=_text(record, "question"),
        answers=_answers(record),
        passages=tuple(_passage(p, f"passages[{i}]") for i, p in enumerate(passages)),
        kind=_get(record, "kind", str, "a string") if "kind" in record else "",
    )


def _answers(record: dict[str, Any]) -> tuple[str, ...]:
    answers = _get(record, "answers", list, "a list of strings")
    if not answers:
        raise DataError('"answers" must hold at least one answer, found an empty list')
    for i, answer in enumerate(answers):
        _expect(answer, str, "a string", f"answers[{i}]")
        if not answer.strip():
            raise DataError(f"answers[{i}] is empty: every output would be right")
    return tuple(answers)


def _passage(record: Any, where: str) -> EvaluationPassage:
    _expect(record, dict, "an object with title and text", where)
    gold = _get(record, "gold", bool, "true or false", where) if "gold" in record else False
    title = _get(record, "title", str, "a string", where)
    return EvaluationPassage(title, _text(record, "text", where), gold)


def _text(record: dict[str, Any], key: str, where: str = "") -> str:
    text: str = _get(record, key, str, "a string", where)
    if not text.strip():
        raise DataError(f"{_name(key, where)} is empty")
    return text


def _get(
    record: dict[str, Any], key: str, kind: type | tuple[type, ...], expected: str, where: str = ""
) -> Any:
    if key not in record:
        raise DataError(f"{_name(key, where)} is missing; expected {expected}")
    return _expect(record[key], kind, expected, _name(key, where))


def _name(key: str, where: str) -> str:
    return f"{where}.{key}" if where else f'"{key}"'


def _expect(value: Any, kind: type | tuple[type, ...], expected: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"{where} must be {expected}, found {type(value).__name__}")
    return value
