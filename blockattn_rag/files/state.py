"""Whether a file is still the one that was read."""

from __future__ import annotations

from pathlib import Path

FileState = tuple[int, ...]


def file_state(path: Path) -> FileState:
    """What changes when a file is written, and when another takes its place.

    Size and time of writing do not tell enough: files of one model's repairs have one size, and
    archives and copies keep times.

    Raises:
        OSError: there is no such file.
    """
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
