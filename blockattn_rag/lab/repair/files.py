"""Questions and passages from JSON lines, plain or gzip.

A question is ``{"question": str}``, with ``"answers": [str, ...]`` where right answers are known
and ``"passages": [{"title": str, "text": str, "gold": bool}, ...]`` where it has its own, as in
evaluation data; title and gold are optional. A passage is ``{"title": str, "text": str}``. Other
keys are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from blockattn_rag.errors import DataError
from blockattn_rag.files import (
    Record,
    list_of,
    not_blank,
    numbered_lines,
    of_kind,
    parse_line,
    text_of,
)
from blockattn_rag.lab.repair.questions import Nearest
from blockattn_rag.lab.repair.samples import Question
from blockattn_rag.prompts.formats import Passage

T = TypeVar("T")


def read_passages(path: Path) -> list[Passage]:
    """The passages of a file, each once.

    Raises:
        DataError: the file is missing, damaged or empty, or a line is no passage.
    """
    return list(dict.fromkeys(_read(path, _passage)))


def read_questions(path: Path, nearest: Nearest | None, num_passages: int) -> list[Question]:
    """The questions of a file: with their own passages, gold ones first, or with the nearest ones.

    Args:
        nearest: finds passages for questions that have none; None: all must have their own.
        num_passages: how many to find.

    Raises:
        DataError: the file is missing, damaged or empty, or a line is no question, or a question
            has no passages and there are none to find.
    """

    def question(record: Record) -> Question:
        text = text_of(record, "question").strip()
        items = list_of(record, "answers", may_be_empty=True) if "answers" in record else ()
        answers = tuple(not_blank(item, f"'answers[{i}]'") for i, item in enumerate(items))
        if "passages" in record:
            return Question(text, tuple(_own_passages(record)), answers)
        if nearest is None:
            raise DataError(
                'found a question without passages; add "passages" to it, or give a database '
                "(--db) or passages (--passages)"
            )
        return Question(text, tuple(nearest(text, num_passages)), answers)

    return list(_read(path, question))


def _own_passages(record: Record) -> Sequence[Passage]:
    items = [of_kind(item, dict, "a passage") for item in list_of(record, "passages")]
    golds = [of_kind(item.get("gold", False), bool, "'gold'") for item in items]
    ranked = sorted(range(len(items)), key=lambda index: not golds[index])
    return list(dict.fromkeys(_passage(items[index]) for index in ranked))


def _passage(record: Record) -> Passage:
    title = of_kind(record.get("title", ""), str, "'title'")
    return Passage(title.strip(), text_of(record, "text").strip())


def _read(path: Path, make: Callable[[Record], T]) -> Iterator[T]:
    number = 0
    for number, line in numbered_lines(path):
        try:
            yield make(of_kind(parse_line(line), dict, "a line"))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    if not number:
        raise DataError(f"{path}: expected one JSON object a line, found no line")
