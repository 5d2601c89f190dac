"""Files that are there whole or not at all: written under a temporary name beside their place, then
renamed to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
        with contextlib.suppress(OSError):  # the first error is the one to tell
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
