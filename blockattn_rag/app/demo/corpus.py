"""Demo encyclopedia for the bundled model: passages, questions and correct answers.

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
    """Question whose answer is in the passages.

    Args:
        kind: ``"one-passage"`` (one passage has the answer), ``"comparison"`` (of two entities)
            or ``"order"`` (two passages describe one entity, and the later passage is correct).
        expected: Words that a correct answer must contain; see ``is_correct``.
        gold: Indices of the passages with the answer, in ``passages`` or else ``bundled_corpus``.
        passages: Passages of the prompt, in order. If empty, passages are retrieved.
    """

    kind: str
    question: str
    answer: str
    expected: str
    gold: tuple[int, ...]
    passages: tuple[Passage, ...] = ()


@cache
def bundled_corpus() -> tuple[Passage, ...]:
    """Return the encyclopedia: 150 passages about fictional entities."""
    return tuple(Passage(**record) for record in records("encyclopedia"))


@cache
def bundled_questions() -> tuple[CorpusQuestion, ...]:
    """Return 15 questions about the corpus: 10 about a single passage, and 5 comparisons."""
    return tuple(_question(record) for record in records("questions"))


@cache
def bundled_samples(
    kind: str, num_passages: int, split: str = "test"
) -> tuple[CorpusQuestion, ...]:
    """Return questions with the passages of their prompts.

    The entities of the ``"test"`` split do not occur in the bundled model's training data. With 5
    passages, there are 60 ``"one-passage"`` and 60 ``"order"`` test questions. With 3 passages,
    there are 100 test and 160 training questions, all ``"one-passage"``.
    """
    return tuple(_question(record) for record in records(f"{split}-{kind}-{num_passages}"))


def is_correct(question: CorpusQuestion, answer: str) -> bool:
    """Whether an answer contains the expected words in sequence, ignoring case and punctuation."""
    return f" {_normalize(question.expected)} " in f" {_normalize(answer)} "


def _normalize(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def records(name: str) -> list[dict[str, Any]]:
    """Read a JSON Lines file in ``data``, named without its suffix."""
    lines = (_DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _question(record: dict[str, Any]) -> CorpusQuestion:
    passages = tuple(Passage(**passage) for passage in record.get("passages", ()))
    return CorpusQuestion(**{**record, "gold": tuple(record["gold"]), "passages": passages})
