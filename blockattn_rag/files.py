"""Files: where this package keeps its state, files that are written whole or not at all, JSON lines
and checks of the records in them.

A check's ``where`` is the path to the record within its line, with a full stop at the end:
``passages[0].``. Lines are read as bytes, because one line that is not UTF-8 must not stop the
reading of the others.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from blockattn_rag.errors import DataError


def state_folder() -> Path:
    """``$BLOCKATTN_RAG_HOME``, or a folder of ours below the user's cache folder
    (``$XDG_CACHE_HOME``, else ``~/.cache``).

    Raises:
        RuntimeError: the user has no home folder.
    """
    if home := os.environ.get("BLOCKATTN_RAG_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockattn_rag"


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def temporary_name(path: Path) -> Path:
    """A name that nothing has yet, in the folder of ``path``: hidden, and known by its form."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether ``temporary_name`` makes names of this form. A file of such a name is being written,
    or was left by a process that died while writing."""
    return _TEMPORARY.fullmatch(name) is not None


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, fsync: bool = True) -> Iterator[BinaryIO]:
    """A new file, open for writing, which takes the place of ``path`` when the block ends.

    If the block raises, the new file is deleted and ``path`` stays as it was.

    Args:
        mode: permissions of the new file, less the process's umask.
        fsync: flush the file, and after the renaming its folder, to the disk. False is faster;
            after a power failure ``path`` may then be missing or cut short.

    Raises:
        OSError: the file cannot be written or renamed.
    """
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised
            temporary.unlink()
        raise
    if fsync:
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON (UTF-8), for programs and people, with ``replacing``."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's own list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


Record = Mapping[str, Any]
Kind = TypeVar("Kind")

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def of_kind(value: object, kind: type[Kind], name: str) -> Kind:
    """``value``, which must be a ``dict``, ``list``, ``str`` or ``bool``, as ``kind`` says."""
    if not isinstance(value, kind):
        found = "null" if value is None else _KINDS.get(type(value), "a number")
        raise DataError(f"found {name} of {found}, expected {_KINDS[kind]}")
    return value


def value_of(record: Record, key: str, where: str = "") -> Any:
    """The value of a key that must be there."""
    if key not in record:
        raise DataError(f"found no '{where}{key}' among the keys {listed(record)}")
    return record[key]


def text_of(record: Record, key: str, where: str = "") -> str:
    """A string that is not blank."""
    return not_blank(value_of(record, key, where), f"'{where}{key}'")


def not_blank(value: object, name: str) -> str:
    """``value``, which must be a string that is not blank."""
    text = of_kind(value, str, name)
    if not text.strip():
        raise DataError(f"found an empty {name}, expected text")
    return text


def list_of(record: Record, key: str, *, may_be_empty: bool = False) -> Sequence[object]:
    """A list, with at least one item unless ``may_be_empty``."""
    items: list[object] = of_kind(value_of(record, key), list, f"'{key}'")
    if not items and not may_be_empty:
        raise DataError(f"found an empty list '{key}'")
    return items


def listed(keys: Iterable[str]) -> str:
    """Keys in quotes, sorted, with commas between."""
    return ", ".join(repr(key) for key in sorted(keys)) or "none"
