"""The fictional encyclopedia: seeded samples of three kinds, and the fixed corpus of the demo.

Test entities have names that no training entity has (:mod:`.names`). Pure standard library.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .catalog import KINDS
from .names import Split
from .scenes import (
    QUESTION_KINDS,
    Article,
    Passage,
    QuestionKind,
    SceneWriter,
    Turn,
    turns_of,
    write_scene,
)

__all__ = [
    "QUESTION_KINDS",
    "Passage",
    "QuestionKind",
    "Sample",
    "Split",
    "Turn",
    "bundled_corpus",
    "bundled_questions",
    "evaluation_record",
    "generate_samples",
    "is_correct",
    "write_jsonl",
]

ARTICLES_PER_KIND = 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One question over the passages of one prompt; see :func:`is_correct`."""

    kind: QuestionKind
    passages: tuple[Passage, ...]
    question: str
    answer: str
    expected: str
    gold: tuple[int, ...]


def generate_samples(
    seed: int, split: Split, kind: QuestionKind, num_passages: int, n: int
) -> list[Sample]:
    """``n`` questions of one kind, each over its own ``num_passages`` passages."""
    if kind not in QUESTION_KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(QUESTION_KINDS)}")
    if num_passages < 2 and kind != "one-passage":
        raise ValueError(f"a question of kind {kind!r} needs two passages or more")
    rng = random.Random(f"{seed}/{split}/{kind}/{num_passages}")
    samples: list[Sample] = []
    while len(samples) < n:
        scene = write_scene(rng, split, num_passages, int(kind == "order"))
        for turn in turns_of(scene, rng, kind)[:1]:
            passages = tuple(article.passage for article in scene)
            samples.append(
                Sample(kind, passages, turn.question, turn.answer, turn.expected, turn.gold)
            )
    return samples


def normalize(text: str) -> str:
    """Lower case, letters and digits only, single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def is_correct(sample: Sample | Turn, answer_text: str) -> bool:
    """Whether the expected value, or the winner's clause, occurs in the answer as whole words."""
    return f" {normalize(sample.expected)} " in f" {normalize(answer_text)} "


def evaluation_record(sample: Sample, name: str) -> dict[str, Any]:
    """A sample in the evaluation schema."""
    return {
        "id": name,
        "kind": sample.kind,
        "question": sample.question,
        "answers": [sample.expected],
        "passages": [
            {"title": p.title, "text": p.text, "gold": i in sample.gold}
            for i, p in enumerate(sample.passages)
        ],
    }


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write one JSON object a line; returns how many."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


@cache
def _bundled_articles() -> tuple[Article, ...]:
    # Of this seed, Halden Tower, which leads, is as tall as the documentation says: 214 metres.
    # Names of one kind do not rhyme: those are what the bundled model mixes up (its card).
    writer = SceneWriter(random.Random("bundled 4917"), "test", rhymes=False)
    return tuple(
        writer.article(kind, "Halden Tower" if (kind.word, i) == ("tower", 0) else None)
        for kind in KINDS
        for i in range(ARTICLES_PER_KIND)
    )


def bundled_corpus() -> tuple[Passage, ...]:
    """The encyclopedia that the demo ingests: 150 passages on test entities."""
    return tuple(article.passage for article in _bundled_articles())


@cache
def bundled_questions() -> tuple[Turn, ...]:
    """Fifteen questions about the bundled corpus: ten on one passage, five comparisons."""
    rng = random.Random("bundled questions")
    articles = _bundled_articles()
    turns: list[Turn] = []
    for start in range(0, len(articles), ARTICLES_PER_KIND):
        for i in (start, start + 1):
            turns += turns_of(articles[i : i + 1], rng, "one-passage")[:1]
        turns += turns_of(articles[start + 2 : start + 4], rng, "comparison")[:1]
    return tuple(turns)
