"""Answers of a stock model in full mode, in block mode with recipes, and with two baselines.

    python benchmarks/quality run smollm2 --nq nq_rag.jsonl.gz
    python benchmarks/quality table

``run`` answers questions of all sets in turn, in every row, and appends one line per answer to
``benchmarks/results/quality/MODEL.csv``. It stops after ``--minutes`` and continues where it left
off when it runs again. ``table`` writes ``MODEL.md`` next to each CSV file.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).parents[1]))

import sets
from models import model_path
from rows import Answerer, Record
from table import tables

RESULTS = Path(__file__).parents[1] / "results" / "quality"
app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="smollm2, qwen, gemma, or any other model.")],
    nq: Annotated[Path | None, typer.Option(help="Natural Questions with passages.")] = None,
    recipe: Annotated[
        str, typer.Option(help="The recipe row: auto, or a recipe's folder.")
    ] = "auto",
    questions: Annotated[int, typer.Option(help="Questions in all.")] = 200,
    minutes: Annotated[float, typer.Option(help="Stop after the question that is running.")] = 45,
    max_new_tokens: int = 40,
    results: Path = RESULTS,
) -> None:
    """Answer questions in every row."""
    from blockattn_rag import BlockAttentionEngine
    from blockattn_rag.engine.find_recipe import resolve_recipe
    from blockattn_rag.prompts.checkpoints import AUTO, format_for

    engine = BlockAttentionEngine.from_pretrained(
        model_path(model), store="memory:", dtype="float32", recipe="none"
    )
    found = resolve_recipe(recipe, engine.model, engine.store)
    recipes = {"block": resolve_recipe("none", engine.model, engine.store)}
    recipes["sink"] = resolve_recipe("head:4", engine.model, engine.store)
    if found.adapter is not None:
        recipes["recipe"] = replace(found, promote=0)
    if engine.model.supports_relay:
        recipes["recipe, 1 promoted"] = replace([*recipes.values()][-1], promote=1)
    answerer = Answerer(
        engine,
        format_for(AUTO, engine.model.name),
        recipes,
        recomputes=engine.model.supports_relay,
        max_new_tokens=max_new_tokens,
    )
    path = results / f"{Path(model).name}.csv"
    done = {(one.set, one.id) for one in read(path)}
    end = time.monotonic() + 60 * minutes
    for item in _items(nq)[:questions]:
        if time.monotonic() > end:
            break
        if (item.set, item.id) not in done:
            append(path, [*answerer.answer(item)])
            print(f"{item.set} {item.id}", flush=True)


@app.command()
def table(results: Path = RESULTS) -> None:
    """Write the tables of all records."""
    for path in sorted(results.glob("*.csv")):
        path.with_suffix(".md").write_text(tables([*read(path)]), encoding="utf-8")
        print(path.with_suffix(".md"))


def _items(nq: Path | None) -> list[sets.Item]:
    found = [sets.facts(), sets.comparisons(), sets.pairs(), sets.order()]
    if nq is not None:
        found += [sets.natural_questions(nq, count) for count in (5, 10)]
    return sets.mixed(found)


def read(path: Path) -> Iterator[Record]:
    """The records of a file. None if it does not exist."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                yield Record(**{f.name: _KINDS[str(f.type)](line[f.name]) for f in fields(Record)})


_KINDS = {"str": str, "int": int, "float": float}


def append(path: Path, records: list[Record]) -> None:
    """Append the records of one question, in one write, so that a stopped run leaves whole ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Record)])
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(record) for record in records)


if __name__ == "__main__":
    app()
