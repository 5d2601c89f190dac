"""Progress on stderr: spinners and bars in a terminal, lines in a file or pipe."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from blockattn_rag.app.cli.output import duration, note, stderr

PATIENCE_S = 2.0
"""Seconds after which a wait is reported."""
_EVERY_S = 20.0
"""Seconds between progress lines of a long stage, in a file or pipe."""
_SPEED_S = 600.0
"""Seconds over which a bar averages the speed, to estimate the remaining time."""
_LEAST_SHARE = 0.05
"""Fraction of a stage after which the remaining time is reported."""


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
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
    """Show a spinner and, after a long wait, a line with the duration.

    Without a terminal, a line is also printed during a long wait.
    """
    started = time.monotonic()
    timer = threading.Timer(PATIENCE_S, note, [f"{text} ..."])
    timer.daemon = True
    if not stderr.is_terminal:
        timer.start()
    try:
        with spinner(text):
            yield
    finally:
        timer.cancel()
    if (seconds := time.monotonic() - started) > PATIENCE_S:
        note(f"{text}: {duration(seconds)}")


@contextlib.contextmanager
def stage_progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a stage. Yields a callback for (done, total)."""
    with stages() as report:
        yield lambda done, total: report(description, done, total)


@contextlib.contextmanager
def counter(description: str) -> Iterator[Callable[[int], None]]:
    """Show a count without a known total. Yields a callback for the count."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:,.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=False) as shown:
        task = shown.add_task(description, total=None)
        yield lambda done: shown.update(task, completed=done)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of several stages. Yields a callback for (stage, done, total).

    In a terminal, each stage has a bar with the remaining time. In a file or pipe, each stage
    prints a line when it starts, every ``_EVERY_S`` seconds, and, if it took long, when it ends.
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
    # By default, the speed is averaged over 30 s, which is less than a batch may take.
    with Progress(*columns, console=stderr, transient=False, speed_estimate_period=_SPEED_S) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


class _Lines:
    """Progress callback that prints lines, for files and pipes."""

    def __init__(self) -> None:
        self._stage, self._first, self._done = "", 0, 0
        self._started_s = self._reported_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage or done < self._done:
            self._stage, self._first, self._done = stage, done, done
            self._started_s = self._reported_s = now
            note(f"{stage} ({total:,})")
            return
        seconds, is_new = now - self._started_s, done > self._done
        self._done = done
        if done >= total:
            if is_new and seconds > PATIENCE_S:
                note(f"{stage}: {total:,} of {total:,} in {duration(seconds)}")
        elif now - self._reported_s > _EVERY_S and done > self._first:
            self._reported_s = now
            passed = f"{stage}: {done:,} of {total:,} after {duration(seconds)}"
            # No estimate yet, because the first items take longer while caches warm up.
            is_early = done - self._first < _LEAST_SHARE * total
            left_s = seconds * (total - done) / (done - self._first)
            note(passed if is_early else f"{passed}, about {duration(left_s)} left")
