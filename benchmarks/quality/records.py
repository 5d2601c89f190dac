"""CSV files of records. Runs append records, and resume where the previous run stopped."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TypeVar

from choices import Choice
from diagnosis import Change
from rows import EARLIER, Record
from sets import Item
from system_prompts import SystemRecord

T = TypeVar("T", bound=Record | Change | Choice | SystemRecord)


def measure(
    path: Path,
    kind: type[T],
    items: Iterable[Item],
    answer: Callable[[Item, Sequence[str]], Iterable[T]],
    names: Sequence[str],
    minutes: float,
    known: Sequence[str] = EARLIER,
) -> None:
    """Append the records that are missing in a file, until ``minutes`` have passed.

    Args:
        answer: Function that measures some of the names for a question.
        names: Names of the rows or changes to measure for each question.
        known: Other names that the file may contain.
    """
    done = {(one.set, one.id, one.name) for one in read(path, kind)}
    if others := sorted({name for *_, name in done} - {*names, *known}):
        raise SystemExit(f"{path} has {others}, this run {[*names]}: choose different --results")
    end = time.monotonic() + 60 * minutes
    for item in items:
        if time.monotonic() > end:
            break
        if missing := [name for name in names if (item.set, item.id, name) not in done]:
            append(path, [*answer(item, missing)])
            print(f"{item.set} {item.id}", flush=True)


def read(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records of a file, or nothing if the file does not exist."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                yield kind(**{f.name: _KINDS[str(f.type)](line[f.name]) for f in fields(kind)})


_KINDS = {"str": str, "int": int, "float": float}


def append(path: Path, records: Sequence[Record | Change | Choice | SystemRecord]) -> None:
    """Append the records of a question in a single write, so that an interrupted run leaves no
    partial record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(records[0])])
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(record) for record in records)
