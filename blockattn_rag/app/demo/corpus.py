"""Demo encyclopedia of the bundled model: passages, questions and correct answers.

``recipes/bundled_model`` in the repository generated the files in ``data``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blockattn_rag.prompts.formats import Passage

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    """A question with the answer in the passages.

    Args:
        kind: ``"one-passage"`` (one passage states the value), ``"comparison"`` (of two entities)
            or ``"order"`` (two passages describe one entity, and the later passage is right).
        expected: Words that a right answer must contain; see :func:`is_correct`.
        gold: Indices of the passages with the answer, in ``passages``, or in
            :func:`bundled_corpus` if ``passages`` is empty.
        passages: Passages of the prompt, in order. Empty: passages are retrieved.
    """

    kind: str
    question: str
    answer: str
    expected: str
    gold: tuple[int, ...]
    passages: tuple[Passage, ...] = ()


@cache
def bundled_corpus() -> tuple[Passage, ...]:
    """The encyclopedia: 150 passages on invented entities."""
    return tuple(Passage(**record) for record in _records("encyclopedia"))


@cache
def bundled_questions() -> tuple[CorpusQuestion, ...]:
    """Fifteen questions about the bundled corpus: ten on one passage, five comparisons."""
    return tuple(_question(record) for record in _records("questions"))


@cache
def bundled_samples(
    kind: str, num_passages: int, split: str = "test"
) -> tuple[CorpusQuestion, ...]:
    """Questions with the passages of their prompts.

    The bundled model was trained only on the split ``"train"``. With 5 passages, there are 60 test
    questions of the kind ``"one-passage"`` and 60 of the kind ``"order"``. With 3 passages, there
    are 100 test and 160 training questions of the kind ``"one-passage"``.
    """
    return tuple(_question(record) for record in _records(f"{split}-{kind}-{num_passages}"))


def is_correct(question: CorpusQuestion, answer: str) -> bool:
    """Whether the answer contains the expected words in sequence, ignoring case."""
    return f" {_normalize(question.expected)} " in f" {_normalize(answer)} "


def _normalize(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _records(name: str) -> list[dict[str, Any]]:
    lines = (_DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _question(record: dict[str, Any]) -> CorpusQuestion:
    passages = tuple(Passage(**passage) for passage in record.get("passages", ()))
    return CorpusQuestion(**{**record, "gold": tuple(record["gold"]), "passages": passages})
