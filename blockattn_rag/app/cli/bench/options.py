"""Options of the measurements, each declared once, and checked before anything is measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag.app.cli.files import drawable, writable
from blockattn_rag.app.cli.output import JsonOption
from blockattn_rag.app.rag.model_names import existing_model

Lengths = Annotated[str, typer.Option(help="Context lengths in tokens, with commas between.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens of a block.")]
BatchSizes = Annotated[str, typer.Option(help="Requests at once, with commas between.")]
BlockSizes = Annotated[str, typer.Option(help="Tokens of a block; several sizes with commas.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens of an answer.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens of the question.")]


@dataclass(frozen=True, slots=True)
class Bench:
    """The options that every measurement takes: what runs, where, and where the figures go."""

    shape: Annotated[
        str, typer.Option(help="Llama shape with random weights: tiny, 135m, 1b or 8b.")
    ] = "135m"
    model: Annotated[
        str | None,
        typer.Option(help="Measure this model instead of a shape.", callback=existing_model),
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto"
    output: Annotated[
        Path | None,
        typer.Option(help="Write the JSON object to this file, too.", callback=writable),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the rows to this file (svg, png, pdf).", callback=drawable),
    ] = None
    as_json: JsonOption = False


def measurement(command: Callable[..., None]) -> Callable[..., None]:
    """``command``, whose first parameter is a ``Bench``, as typer takes it: the fields of ``Bench``
    are options beside the command's own.

    In ``--help``, the command's options without ``*`` follow ``--model``, the keyword-only ones
    ``--device``.
    """
    common = inspect.signature(Bench, eval_str=True).parameters

    @wraps(command)
    def run(**options: Any) -> None:
        command(Bench(**{name: options.pop(name) for name in common}), **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    early, late = ([p for p in own if (p.kind == keyword) == late] for late in (False, True))
    shape, model, dtype, device, *results = common.values()
    order = [shape, model, *early, dtype, device, *late, *results]
    signature = inspect.Signature([parameter.replace(kind=keyword) for parameter in order])
    vars(run)["__signature__"] = signature
    return run


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
