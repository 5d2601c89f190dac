"""What is distilled on: questions, each with passages in an order, drawn at random with a seed."""

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
    others are those that a retriever would find beside it.
    """

    text: str
    passages: tuple[Passage, ...]

    def __post_init__(self) -> None:
        if not self.text.strip() or not self.passages:
            raise DataError(
                f"expected a question with at least one passage, found {self.text[:60]!r} with "
                f"{len(self.passages)} passages"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """A question and its passages in the order of the prompt."""

    question: str
    passages: tuple[Passage, ...]


def split(
    questions: Sequence[Question], held_out: float, seed: int
) -> tuple[list[Question], list[Question]]:
    """The questions to train on, and a share of at least one that is not trained on.

    Raises:
        DataError: there are fewer than two distinct questions.
    """
    by_text = {question.text.casefold(): question for question in questions}
    distinct = sorted(by_text.values(), key=_order)
    random.Random(seed).shuffle(distinct)
    count = max(1, round(held_out * len(distinct)))
    if len(distinct) <= count:
        raise DataError(
            f"found {len(distinct)} distinct questions, expected at least 2: some are trained on "
            "and others held out to measure what was learned; give more questions or passages"
        )
    return distinct[count:], distinct[:count]


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
        samples.append(Sample(question.text, tuple(shown)))
    return samples
