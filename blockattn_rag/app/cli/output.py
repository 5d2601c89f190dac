"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from blockattn_rag.app.cli.figures import duration

_PATIENCE_S = 2.0
"""Waits that are longer are reported, and how long they took."""
_LEAST_SHARE = 0.05
"""Share of a stage after which its remaining time is reported."""

_EVERY_S = 20.0
"""How often a long stage is reported in a file or pipe."""

_NAME_WIDTH = 24
"""Characters of a table's first column that are never folded."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
KVDtypeName = Literal["model", "int8"]
"""``kv.KVDtype``, which would load torch."""
KVDtypeHelp = (
    "What keys and values of passages are kept in: model (its own type) or int8, in half the bytes "
    "of 16 bits, at nearly the same answers."
)
ServerOption = Annotated[
    str | None,
    typer.Option(
        help="Address of a server that has the model and the store, such as http://gpu:8000 (its "
        "key: BLOCKATTN_RAG_API_KEY); --model is then where its tokenizer is found here. Default: "
        "the database's, or none."
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="Recipe of block mode: auto, none, a sink such as head:4, or the folder of a recipe. "
        "Default: the database's, or auto."
    ),
]
ModelArgument = "Model name or folder; [bold]bundled[/bold] is the model inside this package."


def _width() -> int | None:
    """Columns where nothing tells them: rich would take 80, and break numbers in two."""
    told = any(map(os.isatty, range(3))) or os.environ.get("COLUMNS", "").isdigit()
    return None if told else 160


stderr = Console(stderr=True)
stdout = Console(width=_width())

# Control characters but tab and newline; what turns the direction of writing around; halves of
# surrogate pairs, which no terminal's encoding has and names of files can hold.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """A text for a terminal: what the terminal would obey is written out, ESC as ``\\x1b``.

    Passages, answers, names of files, and errors about them come from others. All that is printed
    below goes through here; JSON has escapes of its own.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def fail(message: str) -> None:
    """One line of error on stderr."""
    typer.echo(plain(f"error: {message}"), err=True)


def note(message: str) -> None:
    """One line on stderr that is no result."""
    stderr.print(plain(message), markup=False, highlight=False, soft_wrap=True)


def piece(text: str) -> None:
    """A part of an answer on stdout, as it comes."""
    typer.echo(plain(text), nl=False)


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """While this is open, a terminal shows what is waited for, and for how long."""
    if not stderr.is_terminal:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as shown:
        shown.add_task(text, total=None)
        yield


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner, and a line on how long a wait took that was longer than ``_PATIENCE_S``; where
    there is no terminal, another line as soon as it is."""
    started = time.monotonic()
    timer = threading.Timer(_PATIENCE_S, note, [f"{text} ..."])
    timer.daemon = True
    if not stderr.is_terminal:
        timer.start()
    try:
        with spinner(text):
            yield
    finally:
        timer.cancel()
    if (seconds := time.monotonic() - started) > _PATIENCE_S:
        note(f"{text}: {duration(seconds)}")


def working(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """While this is open and JSON is wanted, what libraries print goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def emit(as_json: bool, data: dict[str, Any], *shown: RenderableType) -> None:
    """The result: ``data`` as one JSON object, paths as strings, or what is shown to people."""
    if as_json:
        # ASCII: a terminal's encoding must not be able to break the output.
        typer.echo(json.dumps(data, ensure_ascii=True, allow_nan=False, default=os.fspath))
        return
    for renderable in shown:
        # Square brackets in passages, names and answers are text, not markup.
        if isinstance(renderable, str):
            stdout.print(plain(renderable), highlight=False, markup=False, soft_wrap=True)
        else:
            stdout.print(renderable, highlight=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, left: Sequence[int] = (0,)
) -> RenderableType:
    """A title and a table; the columns in ``left`` are aligned left, the others right."""
    # As narrow as can be: many columns have to fit into a terminal.
    result = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    # Short names stay whole. A path is folded, or it would take the place of the other columns.
    are_short = all(len(row[0]) <= _NAME_WIDTH for row in cells)
    for i, column in enumerate(columns):
        is_whole = i == 0 and are_short
        side: Literal["left", "right"] = "left" if i in left else "right"
        result.add_column(column, justify=side, overflow="fold", no_wrap=is_whole)
    for row in cells:
        result.add_row(*map(escape, row))
    # A table's own title is folded to its width.
    return Group(Text(plain(title), style="italic"), result)


@contextlib.contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of one stage, as ``stages`` shows it; yields a function of (done, total)."""
    with stages() as tell:
        yield lambda done, total: tell(description, done, total)


@contextlib.contextmanager
def counter(description: str) -> Iterator[Callable[[int], None]]:
    """Progress of what has no known end, on stderr; yields a function of the number done."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:,.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=False) as shown:
        task = shown.add_task(description, total=None)
        yield lambda done: shown.update(task, completed=done)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Progress of several stages, on stderr; yields a function of (stage, done, total).

    A terminal shows a bar for each stage, with the remaining time. Elsewhere, each stage is a line
    when it starts; if it lasts longer, a line every ``_EVERY_S`` and one at its end.
    """
    if not stderr.is_terminal:
        yield _Lines()
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=False) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


class _Lines:
    """Progress of stages as lines, for files and pipes."""

    def __init__(self) -> None:
        self._stage, self._first, self._done = "", 0, 0
        self._started_s = self._told_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done < self._done:
            self._stage, self._first, self._done = stage, done, done
            self._started_s = self._told_s = now
            note(f"{stage} ({total:,})")
            return
        seconds, is_new = now - self._started_s, done > self._done
        self._done = done
        if done >= total:
            if is_new and seconds > _PATIENCE_S:
                note(f"{stage}: {total:,} of {total:,} in {duration(seconds)}")
        elif now - self._told_s > _EVERY_S and done > self._first:
            self._told_s = now
            passed = f"{stage}: {done:,} of {total:,} after {duration(seconds)}"
            # The first of many take longer: they warm up caches.
            is_early = done - self._first < _LEAST_SHARE * total
            left_s = seconds * (total - done) / (done - self._first)
            note(passed if is_early else f"{passed}, about {duration(left_s)} left")
