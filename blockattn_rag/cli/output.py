"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
ModelArgument = "Model name or folder; [bold]bundled[/bold] is the model inside this package."


def _width() -> int | None:
    """Columns where nothing tells them: rich would take 80, and break numbers in two."""
    told = any(map(os.isatty, range(3))) or os.environ.get("COLUMNS", "").isdigit()
    return None if told else 160


stderr = Console(stderr=True)
stdout = Console(width=_width())


def fail(message: str) -> None:
    """One line of error on stderr."""
    typer.echo(f"error: {message}", err=True)


def note(message: str) -> None:
    """One line on stderr that is no result."""
    stderr.print(message, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def working(as_json: bool) -> Iterator[None]:
    """While this is open and JSON is wanted, what libraries print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def emit(as_json: bool, data: dict[str, Any], *shown: RenderableType) -> None:
    """The result: ``data`` as one JSON object, or what is shown to people."""
    if as_json:
        # ASCII: a terminal's encoding must not be able to break the output.
        typer.echo(json.dumps(data, ensure_ascii=True, allow_nan=False))
        return
    for renderable in shown:
        # Square brackets in passages, names and answers are text, not markup.
        plain = isinstance(renderable, str)
        stdout.print(renderable, highlight=False, markup=not plain, soft_wrap=plain)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Sequence[int] = (0,)
) -> RenderableType:
    """A title and a table; the columns in ``left`` are aligned left, the others right."""
    # As narrow as can be: many columns have to fit into a terminal.
    result = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        result.add_column(
            column, justify="left" if i in left else "right", overflow="fold", no_wrap=i == 0
        )
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    return Group(Text(title, style="italic"), result)  # a table's own title is folded to its width


@contextlib.contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; yields a function of (done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=False) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(count: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def duration(seconds: float | None) -> str:
    """Seconds for people: ``45 ms``, ``1.20 s``, ``3.5 h``."""
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, length_s, most in (("s", 1, 300), ("min", 60, 300), ("h", 3600, 72)):
        if (count := seconds / length_s) < most:
            return f"{count:.2f} {unit}" if unit == "s" else f"{count:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def percent(share: float | None) -> str:
    """A share in 0..1 as ``97.5``."""
    return "-" if share is None else f"{share * 100:.1f}"
