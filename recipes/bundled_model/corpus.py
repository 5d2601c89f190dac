"""Seeded random samples of three types of questions about a fictional encyclopedia.

The names of test entities do not occur in training data (:mod:`recipes.bundled_model.names`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockattn_rag.app.demo.corpus import CorpusQuestion
from recipes.bundled_model.names import Split
from recipes.bundled_model.scenes import QUESTION_KINDS, QuestionKind, turns_of, write_scene


def generate_samples(
    seed: int, split: Split, kind: QuestionKind, num_passages: int, n: int
) -> list[CorpusQuestion]:
    """Generate ``n`` questions of one type, each with ``num_passages`` different passages."""
    if kind not in QUESTION_KINDS:
        raise ValueError(f"Unknown kind {kind!r}: expected one of {', '.join(QUESTION_KINDS)}")
    if num_passages < 2 and kind != "one-passage":
        raise ValueError(f"Questions of kind {kind!r} need at least two passages")
    rng = random.Random(f"{seed}/{split}/{kind}/{num_passages}")
    samples: list[CorpusQuestion] = []
    while len(samples) < n:
        scene = write_scene(rng, split, num_passages, int(kind == "order"))
        passages = tuple(article.passage for article in scene)
        samples += [replace(turn, passages=passages) for turn in turns_of(scene, rng, kind)[:1]]
    return samples


def evaluation_record(sample: CorpusQuestion, name: str) -> dict[str, Any]:
    """Convert a sample to the evaluation schema."""
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
    """Write one JSON object per line, and return their number."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)
