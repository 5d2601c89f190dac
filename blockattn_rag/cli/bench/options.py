"""Options that several measurements take, checked before anything is measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.rag.names import existing_model

Shape = Annotated[str, typer.Option(help="Llama shape with random weights: tiny, 135m, 1b or 8b.")]
Model = Annotated[
    str | None,
    typer.Option(help="Measure this model instead of a shape.", callback=existing_model),
]
Lengths = Annotated[str, typer.Option(help="Context lengths in tokens, with commas between.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")]
CudaGraphs = Annotated[bool, typer.Option("--cuda-graphs", help="On a GPU: replay the question.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens of a block.")]
BatchSizes = Annotated[str, typer.Option(help="Requests at once, with commas between.")]
BlockSizes = Annotated[str, typer.Option(help="Tokens of a block; several sizes with commas.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens of an answer.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens of the question.")]


def _writable(file: Path | None) -> Path | None:
    """Seen before anything is measured, not after."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"no such folder: {file.absolute().parent}")
    return file


def _drawable(file: Path | None) -> Path | None:
    if file is not None and file.suffix not in (".svg", ".png", ".pdf"):
        raise typer.BadParameter(f"expected a name that ends in .svg, .png or .pdf, found {file}")
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("plots need matplotlib: pip install 'blockattn-rag[train]'")
    return _writable(file)


Output = Annotated[
    Path | None, typer.Option(help="Write the JSON object to this file, too.", callback=_writable)
]
Plot = Annotated[
    Path | None,
    typer.Option(help="Draw the rows to this file (svg, png, pdf).", callback=_drawable),
]


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers above 0 with commas between."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers with commas between, found {text!r}", param_hint=option
        ) from None
    if min(counts) < 1:
        raise typer.BadParameter("numbers must be at least 1", param_hint=option)
    return counts
