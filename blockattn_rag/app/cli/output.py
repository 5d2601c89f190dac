"""Output of commands: results on stdout, notes and errors on stderr, and formatted numbers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TextIO

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_NAME_WIDTH = 24
"""Width in characters up to which the first column of a table is not folded."""


def output_width() -> int | None:
    """Return the width for files and pipes, in columns. None: rich detects the width."""
    is_known = any(map(os.isatty, range(3))) or os.environ.get("COLUMNS", "").isdigit()
    return None if is_known else 160


_JSON_FILE: ContextVar[TextIO | None] = ContextVar("json_file", default=None)
"""File to write JSON results to. None: results are printed as text."""

# Without emoji codes, because ":smile:" in a passage or a file name is text.
stderr = Console(stderr=True, emoji=False)
stdout = Console(width=output_width(), emoji=False)

# Control characters except tab and newline, characters that change the text direction, and lone
# surrogates, which may occur in file names but cannot be encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Make text safe for a terminal by escaping control characters, such as ESC as ``\\x1b``.

    All output of this module is escaped, except JSON, which has its own escapes.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def fail(message: str) -> None:
    typer.echo(plain(f"error: {message}"), err=True)


def note(message: str) -> None:
    stderr.print(plain(message), markup=False, highlight=False, soft_wrap=True)


def piece(text: str) -> None:
    typer.echo(plain(text), nl=False)


@contextlib.contextmanager
def printing(as_json: bool) -> Iterator[None]:
    """Context manager for a command. With ``as_json``, stdout contains only JSON from ``emit``.

    All other output to stdout, for example from libraries, is redirected to stderr.
    """
    before = _JSON_FILE.set(sys.stdout if as_json else None)
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    finally:
        _JSON_FILE.reset(before)


def json_file() -> TextIO | None:
    """Return the file for JSON results, or None if the command prints text."""
    return _JSON_FILE.get()


def emit(data: dict[str, Any], *shown: RenderableType) -> None:
    """Print a result: with ``--json``, ``data`` as a JSON object, otherwise ``shown``."""
    if file := json_file():
        # ASCII works in all terminal encodings.
        typer.echo(json.dumps(data, ensure_ascii=True, allow_nan=False, default=os.fspath), file)
    else:
        show(*shown)


def show(*shown: RenderableType) -> None:
    for renderable in shown:
        # Square brackets in passages, names and answers are text, not markup.
        if isinstance(renderable, str):
            stdout.print(plain(renderable), highlight=False, markup=False, soft_wrap=True)
        else:
            stdout.print(renderable, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Sequence[int] = (0,)
) -> RenderableType:
    """Create a table with a title. Columns in ``left`` are left-aligned, others right-aligned."""
    # Make tables as narrow as possible, so that wide tables fit in a terminal.
    result = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    # Fold only long names, such as paths, which would squeeze the other columns.
    are_short = all(len(row[0]) <= _NAME_WIDTH for row in cells)
    for i, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if i in left else "right"
        result.add_column(column, justify=side, overflow="fold", no_wrap=i == 0 and are_short)
    for row in cells:
        result.add_row(*map(escape, row))
    # The title is separate, because rich would fold it to the table's width.
    return Group(Text(plain(title), style="italic"), result)


def count(number: int, noun: str) -> str:
    """Format a number with a noun: ``1 block``, ``2,000 blocks``, ``2 entries``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size(number: float) -> str:
    """Format a number of bytes in powers of 1024: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def duration(seconds: float | None) -> str:
    """Format seconds in a readable unit: ``45 ms``, ``1.20 s``, ``3.5 h``."""
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for unit, length_s, most in (("s", 1, 300), ("min", 60, 300), ("h", 3600, 72)):
        if (number := seconds / length_s) < most:
            return f"{number:.2f} {unit}" if unit == "s" else f"{number:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"
