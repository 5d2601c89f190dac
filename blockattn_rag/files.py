"""File utilities: the state folder, atomic writes and file locks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger("blockattn_rag")

LOCK_WARNING_S, LOCK_TIMEOUT_S = 10.0, 60.0
"""Seconds to wait for a lock before logging a warning, and before giving up."""


def state_folder() -> Path:
    """Folder for this package's state: ``$BLOCKATTN_RAG_HOME`` if set, else ``blockattn_rag`` in
    the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).

    Raises:
        RuntimeError: Neither variable is set, and the user has no home folder.
    """
    if home := os.environ.get("BLOCKATTN_RAG_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockattn_rag"


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def temporary_name(path: Path) -> Path:
    """Path of an unused, hidden file next to ``path``, whose name ``is_temporary`` recognizes."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def is_temporary(name: str) -> bool:
    """Whether ``name`` is one that ``temporary_name`` creates. Its file is still being written, or
    was left behind by a process that died while writing it."""
    return _TEMPORARY.fullmatch(name) is not None


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, fsync: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for writing, and replace ``path`` with it when the ``with`` block ends.

    If the ``with`` block raises, the new file is deleted and ``path`` stays unchanged.

    Args:
        mode: Permissions of the new file, before the process's umask is applied.
        fsync: Whether to flush the file, and its folder after the rename, to disk. False is faster,
            but ``path`` may be missing or truncated after a power failure.

    Raises:
        OSError: The file cannot be written or renamed.
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
        with contextlib.suppress(OSError):  # Do not mask the original error.
            temporary.unlink()
        raise
    if fsync:
        sync(path.parent)


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float | None = None) -> Iterator[None]:
    """Hold an exclusive lock on a file, which excludes other processes and other threads.

    Waits until the lock is free. The file is created if needed, and never deleted.

    Args:
        timeout_s: Seconds to wait. Default: ``LOCK_TIMEOUT_S``.

    Raises:
        TimeoutError: The lock is still not free after ``timeout_s``.
        OSError: The file cannot be created or locked.
    """
    from filelock import FileLock, Timeout

    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    lock = FileLock(path, poll_interval=0.01)
    try:
        held = lock.acquire(LOCK_WARNING_S)
    except Timeout:
        logger.warning("Waiting for %s, which another process or thread has locked.", path)
        try:
            held = lock.acquire(timeout_s - LOCK_WARNING_S)
        except Timeout as error:
            raise TimeoutError(
                f"{path} is still locked by another process or thread after {timeout_s:.0f} "
                "seconds: wait until it ends, or stop it, and try again."
            ) from error
    with held:
        yield


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's directory entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
