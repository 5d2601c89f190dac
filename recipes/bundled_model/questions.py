"""Write a questions file for ``blockattn-rag eval`` and ``repair``.

Usage: ``python -m recipes.bundled_model.questions OUTPUT``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes.bundled_model.corpus import evaluation_record, generate_samples, write_jsonl
from recipes.bundled_model.names import Split
from recipes.bundled_model.scenes import QuestionKind


def main(
    output: Annotated[Path, typer.Argument(dir_okay=False, help="JSON Lines file.")],
    kind: Annotated[QuestionKind, typer.Option(help="Type of the questions.")] = "order",
    passages: Annotated[int, typer.Option(min=1, help="Passages per question.")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 500,
    split: Annotated[Split, typer.Option(help="Split of the entities: train or test.")] = "test",
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 1,
) -> None:
    """Write new questions, each with different passages."""
    drawn = generate_samples(seed, split, kind, passages, samples)
    records = (evaluation_record(sample, f"{kind}-{i}") for i, sample in enumerate(drawn))
    typer.echo(f"{write_jsonl(output, records)} questions in {output}")


if __name__ == "__main__":
    typer.run(main)
