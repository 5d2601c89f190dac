"""Write the demo's data files: ``python -m recipes.bundled_model.freeze [FOLDER]``.

The default folder is that of the package (``blockattn_rag/app/demo/data``). If the generator did
not change, its files are reproduced byte for byte.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

import blockattn_rag.app.demo.corpus
from blockattn_rag.app.demo.corpus import CorpusQuestion
from recipes.bundled_model.catalog import KINDS
from recipes.bundled_model.corpus import generate_samples, write_jsonl
from recipes.bundled_model.names import Split
from recipes.bundled_model.scenes import Article, QuestionKind, SceneWriter, turns_of

DATA = Path(blockattn_rag.app.demo.corpus.__file__).with_name("data")
ARTICLES_PER_KIND = 30

#: Questions for each entity type: the first article, the number of articles, and the question type.
QUESTIONS: tuple[tuple[int, int, QuestionKind], ...] = (
    (0, 1, "one-passage"),
    (1, 1, "one-passage"),
    (2, 2, "comparison"),
)

#: Seeds and samples per seed, by split, question type and number of passages.
SAMPLES: dict[tuple[Split, QuestionKind, int], tuple[tuple[int, int], ...]] = {
    ("train", "one-passage", 3): ((1, 160),),
    ("test", "one-passage", 3): ((2, 40), (3, 60)),
    ("test", "one-passage", 5): ((3, 60),),
    ("test", "order", 5): ((3, 60),),
}


@cache
def articles() -> tuple[Article, ...]:
    """Generate the articles of the encyclopedia: 30 for each entity type, in order of type."""
    # With this seed, the first entity, Halden Tower, is 214 metres tall, as in the documentation.
    # Names of one type do not rhyme, because the bundled model confuses such names (model card).
    writer = SceneWriter(random.Random("bundled 4917"), "test", rhymes=False)
    return tuple(
        writer.article(kind, "Halden Tower" if (kind.word, i) == ("tower", 0) else None)
        for kind in KINDS
        for i in range(ARTICLES_PER_KIND)
    )


def questions() -> list[CorpusQuestion]:
    """Generate questions about the encyclopedia: two lookups and a comparison per entity type."""
    rng = random.Random("bundled questions")
    turns: list[CorpusQuestion] = []
    for start in range(0, len(articles()), ARTICLES_PER_KIND):
        for first, count, kind in QUESTIONS:
            scene = articles()[start + first :][:count]
            turn = turns_of(scene, rng, kind)[0]
            turns.append(replace(turn, gold=tuple(start + first + i for i in turn.gold)))
    return turns


def write_data(folder: Path) -> None:
    """Write all data files of the demo to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "encyclopedia.jsonl", (asdict(a.passage) for a in articles()))
    write_jsonl(folder / "questions.jsonl", map(_record, questions()))
    for (split, kind, num_passages), drawn in SAMPLES.items():
        samples = [
            _record(sample)
            for seed, n in drawn
            for sample in generate_samples(seed, split, kind, num_passages, n)
        ]
        write_jsonl(folder / f"{split}-{kind}-{num_passages}.jsonl", samples)


def _record(question: CorpusQuestion) -> dict[str, Any]:
    """Convert a question to a JSON record, without the field ``passages`` if it is empty."""
    record = asdict(question)
    if not question.passages:
        del record["passages"]
    return record


def main(folder: Annotated[Path, typer.Argument(help="Output folder.")] = DATA) -> None:
    """Write the demo's data files."""
    write_data(folder)


if __name__ == "__main__":
    typer.run(main)
