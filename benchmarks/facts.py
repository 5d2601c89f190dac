"""Factual questions over short articles of general knowledge: a test set for block mode.

The data and its rules are in ``data/facts``. Each question is asked over six passages, most of them
about the same kind of subject, so an answer from the wrong passage is wrong::

    for question in load().questions:
        passages = passages_for(question, seed=0)
        ...
        is_right(answer, question.answers)

As a data set of ``blockattn-rag eval``::

    python benchmarks/facts.py > facts.jsonl
    blockattn-rag eval --model smollm2 --data facts.jsonl --recipes none,head:4,auto
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "facts"

SAME_CLUSTER = 3
"""Distractors from the cluster of the right article."""

OTHER_CLUSTERS = 2
"""Distractors from all other clusters."""


@dataclass(frozen=True, slots=True)
class Article:
    """A short article. Articles of one cluster are about the same kind of subject."""

    id: str
    cluster: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one article.

    Attributes:
        id: Unique name.
        question: The question. It names its subject.
        answers: Accepted answers. The first one is in the article as it is spelled here.
        article: ID of the only article that answers the question.
        demo: Whether the demo asks the question, too.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    article: str
    demo: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The complete test set: articles by ID, and questions in file order."""

    articles: dict[str, Article]
    questions: tuple[Question, ...]


@cache
def load() -> Facts:
    """Reads the articles and questions, once per process."""
    articles = [Article(**record) for record in _records("articles.jsonl")]
    questions = [
        Question(**record | {"answers": tuple(record["answers"])})
        for record in _records("questions.jsonl")
    ]
    return Facts({article.id: article for article in articles}, tuple(questions))


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether one of the accepted strings occurs in the answer, as whole words, in any case.

    A number does not match inside a longer one: "330" occurs neither in "1330" nor in "1,330".
    """
    text = " ".join(answer.split())
    return any(
        re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(one)}(?!\w|[.,]\d)", text, re.IGNORECASE)
        for one in accepted
    )


def passages_for(question: Question, seed: int) -> list[tuple[str, str]]:
    """Draws the six passages of a question.

    Args:
        question: A question from ``load()``.
        seed: Random seed. The same question and seed give the same passages in every process.

    Returns:
        Title and text of the right article, of three others of its cluster and of two articles
        of other clusters, in random order.
    """
    articles = load().articles
    right = articles[question.article]
    others = sorted((a for a in articles.values() if a is not right), key=lambda a: a.id)
    draw = random.Random(f"{seed}/{question.id}")
    near = draw.sample([a for a in others if a.cluster == right.cluster], SAME_CLUSTER)
    far = draw.sample([a for a in others if a.cluster != right.cluster], OTHER_CLUSTERS)
    shown = [right, *near, *far]
    draw.shuffle(shown)
    return [(article.title, article.text) for article in shown]


def _records(name: str) -> list[dict[str, Any]]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def eval_records(seed: int = 0) -> list[dict[str, Any]]:
    """The questions with their drawn passages, as ``blockattn-rag eval --data`` reads them."""
    return [
        {
            "id": one.id,
            "question": one.question,
            "answers": list(one.answers),
            "passages": [
                {"title": title, "text": text, "gold": title == load().articles[one.article].title}
                for title, text in passages_for(one, seed)
            ],
        }
        for one in load().questions
    ]


if __name__ == "__main__":
    print(*(json.dumps(record, ensure_ascii=False) for record in eval_records()), sep="\n")
