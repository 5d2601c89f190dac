"""Questions of one kind in the evaluation schema: ``python -m recipes.bundled_model.questions``.

For what needs a file of questions: ``blockattn-rag eval`` and ``repair``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipes.bundled_model.corpus import evaluation_record, generate_samples, write_jsonl
from recipes.bundled_model.names import Split
from recipes.bundled_model.scenes import QuestionKind


def main(
    output: Annotated[Path, typer.Argument(dir_okay=False, help="File of JSON lines.")],
    kind: Annotated[QuestionKind, typer.Option(help="Of the questions.")] = "order",
    passages: Annotated[int, typer.Option(min=1, help="Of each question.")] = 5,
    samples: Annotated[int, typer.Option(min=1, help="Questions.")] = 500,
    split: Annotated[Split, typer.Option(help="Whose entities: train or test.")] = "test",
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 1,
) -> None:
    """Write fresh questions, each over passages of its own."""
    drawn = generate_samples(seed, split, kind, passages, samples)
    records = (evaluation_record(sample, f"{kind}-{i}") for i, sample in enumerate(drawn))
    typer.echo(f"{write_jsonl(output, records)} questions in {output}")


if __name__ == "__main__":
    typer.run(main)
