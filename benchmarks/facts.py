"""Factual questions about short general-knowledge articles: a test set for block mode.

The data and its rules are in ``blockattn_rag/app/demo/data/facts``. Each question comes with six
passages. Most of them are about similar subjects, so an answer from the wrong passage is
incorrect::

    from blockattn_rag.app.demo.facts import is_right, load

    for question in load().questions:
        passages = passages_for(question, seed=0)
        ...
        is_right(answer, question.answers)

As a data set for ``blockattn-rag eval``::

    python benchmarks/facts.py > facts.jsonl
    blockattn-rag eval --model smollm2 --data facts.jsonl --recipes none,head:4,auto
"""

from __future__ import annotations

import json
import random
from typing import Any

from blockattn_rag.app.demo.facts import FactQuestion, load

SAME_CLUSTER = 3
"""Number of distractors from the cluster of the gold article."""

OTHER_CLUSTERS = 2
"""Number of distractors from all other clusters."""


def passages_for(question: FactQuestion, seed: int) -> list[tuple[str, str]]:
    """Draw the six passages of a question.

    Args:
        question: A question from ``load()``.
        seed: Random seed. The same question and seed give the same passages in every process.

    Returns:
        Titles and texts of the gold article, of three others from its cluster and of two articles
        from other clusters, in random order.
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


def eval_records(seed: int = 0) -> list[dict[str, Any]]:
    """Return the questions with their passages, in the format of ``blockattn-rag eval --data``."""
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
