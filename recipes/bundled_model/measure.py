"""Measure the accuracies in the model card: ``python -m recipes.bundled_model.measure bundled``.

The package's engine answers new questions about test entities greedily in the chat format, by
recipe, question type and number of passages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.files import write_json
from blockattn_rag.lab.evaluation.accuracy import evaluate
from blockattn_rag.lab.evaluation.datasets import read_samples
from blockattn_rag.model.loading import load_config
from blockattn_rag.store import MemoryStore
from recipes.bundled_model.corpus import evaluation_record, generate_samples, write_jsonl
from recipes.bundled_model.scenes import QUESTION_KINDS

SIZES = (2, 5, 10)


RECIPES = {"block": Recipe(), "block-composite": Recipe(positions="composite")}
"""Block mode as published, and its ablation without position re-encoding."""


def measure(model: str, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """Measure a model, and yield a row for each question type, number of passages, and full mode
    or recipe: ``kind``, ``passages``, ``mode``, ``samples``, ``accuracy`` with ``low`` and ``high``
    (95 % bootstrap interval), and ``difference`` from full mode.

    Args:
        model: Name or folder of the model.
        samples: Number of questions per cell.
        seed: Seed of the questions.
    """
    for kind in QUESTION_KINDS:
        for passages in SIZES:
            # Each cell uses a new store, because passages do not recur in other cells.
            engine = BlockAttentionEngine.from_pretrained(
                model, store=MemoryStore(1 << 30), recipe="none"
            )
            drawn = generate_samples(seed, "test", kind, passages, samples)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "questions.jsonl"
                write_jsonl(file, (evaluation_record(s, str(i)) for i, s in enumerate(drawn)))
                report = evaluate(
                    engine, read_samples(file), RECIPES, max_new_tokens=80, batch_size=32
                )
            cell = {"model": model, "kind": kind, "passages": passages}
            yield from ({**cell, **_figures(result)} for result in report.results)


def _figures(result: Any) -> dict[str, Any]:
    return {
        "mode": result.mode,
        "samples": result.samples,
        "accuracy": result.accuracy.mean,
        "low": result.accuracy.low,
        "high": result.accuracy.high,
        "difference": result.difference.mean,
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table with a line per model and mode: percent ± half the interval."""
    columns = [(kind, size) for kind in QUESTION_KINDS for size in SIZES]
    heads = [f"{kind}, {size}" for kind, size in columns]
    lines = [f"| model | mode | {' | '.join(heads)} |", "|---|---|" + "---|" * len(columns)]
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in rows):
        cells = {
            (row["kind"], row["passages"]): row
            for row in rows
            if (row["model"], row["mode"]) == (model, mode)
        }
        shown = [_cell(cells[column]) if column in cells else "-" for column in columns]
        lines.append(f"| {Path(model).name} | {mode} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['accuracy'] * 100:.1f} ± {(row['high'] - row['low']) * 50:.1f}"


def main(
    models: Annotated[list[str], typer.Argument(help="Names or folders of models.")],
    samples: Annotated[int, typer.Option(min=1, help="Questions per cell.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the rows to this new JSON file.")
    ] = None,
) -> None:
    """Print the table of accuracies by mode, question kind and number of passages."""
    torch.set_num_threads(threads)
    if output:
        if output.exists():
            raise typer.BadParameter(f"{output} exists; name another --output, or move the file")
        output.parent.mkdir(parents=True, exist_ok=True)
    for model in models:
        load_config(model)  # report a mistyped name before any measurement
    rows: list[dict[str, Any]] = []
    for row in (row for model in models for row in measure(model, samples, seed)):
        rows.append(row)
        typer.echo(f"{row['model']} {row['kind']} at {row['passages']}, {row['mode']}", err=True)
        if output:  # keep the results if a run of several hours is interrupted
            write_json(output, rows)
    print(markdown(rows))


if __name__ == "__main__":
    typer.run(main)
