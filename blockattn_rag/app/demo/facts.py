"""Short general-knowledge articles, and questions that are each answered by one article.

``data/facts`` contains the texts and the rules for writing them. The demo ingests the articles and
asks 12 of the questions. ``benchmarks/facts.py`` in the repository asks all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from blockattn_rag.app.demo.corpus import records


@dataclass(frozen=True, slots=True)
class Article:
    """Short article. Articles in the same cluster are about similar subjects."""

    id: str
    cluster: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """Question about an article that contains ``answers[0]``. ``demo``: Asked in the demo."""

    id: str
    question: str
    answers: tuple[str, ...]
    article: str
    demo: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Complete test set: articles by ID, and questions in file order."""

    articles: dict[str, Article]
    questions: tuple[FactQuestion, ...]


@cache
def load() -> Facts:
    articles = [Article(**record) for record in records("facts/articles")]
    questions = [
        FactQuestion(**record | {"answers": tuple(record["answers"])})
        for record in records("facts/questions")
    ]
    return Facts({article.id: article for article in articles}, tuple(questions))


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an accepted string occurs in the answer as whole words, ignoring case.

    A number does not match within a longer number: "330" matches neither "1330" nor "1,330".
    """
    text = " ".join(answer.split())
    return any(
        re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(expected)}(?!\w|[.,]\d)", text, re.IGNORECASE)
        for expected in accepted
    )
