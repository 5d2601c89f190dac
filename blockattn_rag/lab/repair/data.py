"""Data that a recipe is fitted to: questions and passages from JSON lines, drawn as samples.

Files are plain or gzip. A question is ``{"question": str}``. Optional keys are
``"answers": [str, ...]``, the right answers, and
``"passages": [{"title": str, "text": str, "gold": bool}, ...]``, as in evaluation data; title and
gold are optional. A passage is ``{"title": str, "text": str}``. Other keys are ignored.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import DataError
from blockattn_rag.files import Record, text_of
from blockattn_rag.lab.evaluation.datasets import (
    EvaluationPassage,
    answers_of,
    digest_of,
    parsed_lines,
    passage_of,
    passages_of,
)
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.store.base import KVStore

Nearest = Callable[[str, int], Sequence[Passage]]
"""Function of a text and a number that returns up to so many nearest passages, best first."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with at least one passage for its prompts.

    The first passage is in every prompt. It is the passage that the question is about, or the best
    hit of a retriever. The others are passages that a retriever would also return.

    Args:
        text: Text of the question.
        passages: Passages for prompts.
        answers: Right answers, if they are known.
    """

    text: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip() or not self.passages:
            raise DataError(
                f"expected a question with at least one passage, found {self.text[:60]!r} with "
                f"{len(self.passages)} passages"
            )


@dataclass(frozen=True, slots=True)
class Material:
    """Data that a recipe is fitted to.

    Args:
        prompt: Function that makes a prompt from a question and passages, as in real use.
        prompt_format: Name of the format of these prompts.
        passages: Passages to write questions about.
        nearest: Function that finds the passages for a question. None: questions have their own.
        questions: Real questions. None: the model writes questions.
        lender: Store that may already have the KV of the passages. It is only read.
        namespace: Namespace of the passages in ``lender``.
        in_use: Current recipe of the model, if it has an adapter. It is kept unless another recipe
            is better.
    """

    prompt: Callable[[str, Sequence[Passage]], BlockPrompt]
    prompt_format: str
    passages: Sequence[Passage] = ()
    nearest: Nearest | None = None
    questions: Sequence[Question] | None = None
    lender: KVStore | None = None
    namespace: str = ""
    in_use: Recipe | None = None

    def inputs(self) -> dict[str, str]:
        """Counts and digests of the data, to compare runs."""
        found = {
            "passages": _digest(self.passages, [[p.title, p.text] for p in self.passages]),
            "prompt format": self.prompt_format,
            "questions": "written by the model",
            "recipe in use": str(self.in_use or "none with an adapter"),
        }
        if self.questions is not None:
            parts = [[q.text, q.answers, [p.text for p in q.passages]] for q in self.questions]
            found["questions"] = _digest(self.questions, parts)
        return found


def _digest(counted: Sequence[Any], parts: Any) -> str:
    return f"{len(counted)} (sha256 {digest_of(parts)[:12]})"


def distinct(questions: Sequence[Question], seed: int) -> list[Question]:
    """Return each question once, ignoring case, in an order that depends only on texts and seed."""

    def digest(question: Question) -> str:
        return hashlib.sha256(question.text.encode("utf-8", "surrogatepass")).hexdigest()

    by_text = {question.text.casefold(): question for question in questions}
    found = sorted(by_text.values(), key=digest)
    random.Random(seed).shuffle(found)
    return found


def draw_samples(
    questions: Sequence[Question], count: int, fewest: int, most: int, seed: int
) -> list[Question]:
    """Draw ``count`` samples: each question in turn, each time with other passages.

    A sample has the passages in the order of its prompt.

    Args:
        questions: At least one question.
        fewest, most: Bounds of the number of passages in a sample, including the question's first
            passage. A question with fewer passages uses all of them.
    """
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        question = questions[index % len(questions)]
        first, *others = question.passages
        wanted = rng.randint(min(fewest, len(others) + 1), min(most, len(others) + 1))
        shown = [first, *rng.sample(others, wanted - 1)]
        rng.shuffle(shown)
        samples.append(replace(question, passages=tuple(shown)))
    return samples


def read_passages(path: Path) -> list[Passage]:
    """Read the distinct passages of a file.

    Raises:
        DataError: The file is missing, damaged or empty, or a line is not a passage.
    """
    lines = parsed_lines(path, lambda record, _: _stripped(passage_of(record)))
    found = (passage for _, passage in lines)
    return list(dict.fromkeys(found))


def read_questions(path: Path, nearest: Nearest | None, num_passages: int) -> list[Question]:
    """Read the questions of a file, with their own passages (gold first) or the nearest passages.

    Args:
        nearest: Function that finds passages for questions without any. None: all questions must
            have passages.
        num_passages: Number of passages to find for a question.

    Raises:
        DataError: The file is missing, damaged or empty, a line is not a question, or a question
            has no passages and none can be found.
    """

    def question(record: Record, _: int) -> Question:
        text = text_of(record, "question").strip()
        answers = answers_of(record, may_be_empty=True) if "answers" in record else ()
        if "passages" in record:
            gold_first = sorted(passages_of(record), key=lambda passage: not passage.gold)
            return Question(text, tuple(dict.fromkeys(map(_stripped, gold_first))), answers)
        if nearest is None:
            raise DataError(
                'found a question without passages; add "passages" to it, or pass a database '
                "(--db) or passages (--passages)"
            )
        return Question(text, tuple(nearest(text, num_passages)), answers)

    return [found for _, found in parsed_lines(path, question)]


def _stripped(found: EvaluationPassage) -> Passage:
    return Passage(found.title.strip(), found.text.strip())
