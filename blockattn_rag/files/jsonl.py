"""JSON lines, plain or gzip. Lines are read as bytes, because one line that is not UTF-8 must not
stop the reading of the others."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from blockattn_rag.errors import DataError

_GZIP = b"\x1f\x8b"


def require_file(path: Path) -> None:
    """Raises ``DataError`` if ``path`` is no file."""
    if not path.is_file():
        raise DataError(f"found no file {path}; expected a file of JSON lines")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1.

    Raises:
        DataError: no such file; or a damaged gzip file, after its last whole line.
    """
    require_file(path)
    with path.open("rb") as raw:
        zipped = raw.read(2) == _GZIP  # the file's name may lack .gz
    if path.suffix == ".gz" and not zipped:
        raise DataError(f"{path} is named .gz, but is no gzip file; name it .jsonl")
    number = 0
    with gzip.open(path) if zipped else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}, after line {number}: damaged gzip file ({error})") from error


def parse_line(line: bytes) -> object:
    """The JSON value of a line; a byte order mark does not count.

    Raises:
        DataError: no UTF-8, no JSON, nested too deep, or a number of thousands of digits.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"found bytes that are not UTF-8 (byte {error.start}); save the file as "
                        "UTF-8") from error  # fmt: skip
    except RecursionError as error:
        raise DataError("found JSON nested too deep, expected one object a line") from error
    except ValueError as error:
        raise DataError(f"found no valid JSON ({error}), expected one object a line") from error
