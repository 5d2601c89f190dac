"""What a recipe is fitted to: questions, each with passages in an order drawn with a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from blockattn_rag.errors import DataError
from blockattn_rag.prompts.formats import Passage


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the passages that it may be shown with, at least one.

    The first passage is always shown: the one that the question is about, or the best hit. The
    others are those that a retriever would find with it.

    Args:
        text: The question.
        passages: The passages.
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
class Sample:
    """A question, its passages in the order of the prompt, and its right answers."""

    question: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...] = ()


def distinct(questions: Sequence[Question], seed: int) -> list[Question]:
    """Each question once, whatever its case, in an order that texts and seed alone decide."""
    by_text = {question.text.casefold(): question for question in questions}
    found = sorted(by_text.values(), key=_order)
    random.Random(seed).shuffle(found)
    return found


def _order(question: Question) -> str:
    return hashlib.sha256(question.text.encode("utf-8", "surrogatepass")).hexdigest()


def draw_samples(
    questions: Sequence[Question], count: int, fewest: int, most: int, seed: int
) -> list[Sample]:
    """``count`` samples: each question in turn, with ``fewest`` to ``most`` of its passages.

    A question that comes again comes with another draw of passages.

    Args:
        questions: at least one.
        fewest, most: passages of a sample, the first one among them; all that there are where a
            question has fewer.
    """
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        question = questions[index % len(questions)]
        first, *others = question.passages
        wanted = rng.randint(min(fewest, len(others) + 1), min(most, len(others) + 1))
        shown = [first, *rng.sample(others, wanted - 1)]
        rng.shuffle(shown)
        samples.append(Sample(question.text, tuple(shown), question.answers))
    return samples
