"""Reading JSON Lines files, and validating their records.

The argument ``where`` of a check is the record's path within its line, with a trailing dot:
``passages[0].``. Lines are read as bytes, so that invalid UTF-8 affects only its own line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from blockattn_rag.errors import DataError

JsonRecord = Mapping[str, Any]
_Kind = TypeVar("_Kind")
T = TypeVar("T")

_GZIP = b"\x1f\x8b"
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def parsed_lines(
    path: str | Path, parse: Callable[[JsonRecord, int], T], *, may_be_empty: bool = False
) -> Iterator[tuple[int, T]]:
    """Parse a plain or gzip JSON Lines file with ``parse``. Yields line numbers and results."""
    number = 0
    for number, line in numbered_lines(Path(path)):
        try:
            yield number, parse(of_kind(parse_line(line), dict, "a record"), number)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    if not number and not may_be_empty:
        raise DataError(f"{path} is empty: expected one JSON object per line")


def require_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"No such file: {path}")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield all non-blank lines with their line numbers, starting at 1."""
    require_file(path)
    with path.open("rb") as raw:
        zipped = raw.read(2) == _GZIP  # A gzip file may be named without .gz.
    if path.suffix == ".gz" and not zipped:
        raise DataError(f"{path} has the suffix .gz, but is not a gzip file; rename it to .jsonl")
    number = 0
    with gzip.open(path) if zipped else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}, after line {number}: damaged gzip file ({error})") from error


def parse_line(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"Invalid UTF-8 (byte {error.start}); save the file as UTF-8") from error
    except RecursionError as error:
        raise DataError("JSON is nested too deeply, expected one object per line") from error
    except ValueError as error:
        raise DataError(f"Invalid JSON ({error}), expected one object per line") from error


def of_kind(value: object, kind: type[_Kind], name: str) -> _Kind:
    """Return ``value``, or raise DataError if it is not a ``kind``: dict, list, str or bool."""
    if not isinstance(value, kind):
        kind_name = "null" if value is None else _KINDS.get(type(value), "a number")
        raise DataError(f"Found {kind_name} for {name}, expected {_KINDS[kind]}")
    return value


def value_of(record: JsonRecord, key: str, where: str = "") -> Any:
    if key not in record:
        raise DataError(f"Missing key '{where}{key}', found {quoted_names(record)}")
    return record[key]


def required_text(record: JsonRecord, key: str, where: str = "") -> str:
    return not_blank(value_of(record, key, where), f"'{where}{key}'")


def not_blank(value: object, name: str) -> str:
    text = of_kind(value, str, name)
    if not text.strip():
        raise DataError(f"Found an empty {name}, expected text")
    return text


def list_of(record: JsonRecord, key: str, *, may_be_empty: bool = False) -> Sequence[object]:
    items: list[object] = of_kind(value_of(record, key), list, f"'{key}'")
    if not items and not may_be_empty:
        raise DataError(f"Found an empty list '{key}', expected at least one item")
    return items


def quoted_names(keys: Iterable[str]) -> str:
    return ", ".join(repr(key) for key in sorted(keys)) or "none"
