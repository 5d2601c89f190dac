"""Keeping a store on disk within a size: what was not used for the longest time goes first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from blockattn_rag.store.base import check_max_bytes
from blockattn_rag.store.files import age_s, remove_unused

_SHARE = 64

# What is used while room is made stays: then others are looked for, but not for ever.
_LOOKS = 3


class StoredFile(NamedTuple):
    """An entry's file. ``used_ns``: its modification time, nanoseconds since 1970."""

    path: Path
    nbytes: int
    used_ns: int


def shrink(
    files: Iterable[StoredFile],
    max_bytes: int,
    *,
    more_bytes: int = 0,
    remove: Callable[[Path, int], bool | None] = remove_unused,
) -> tuple[int, tuple[StoredFile, ...]]:
    """Delete files, least recently used first, until the others take at most ``max_bytes``.

    Args:
        more_bytes: if anything has to go, let so much more go, in whole files.
        remove: deletes a file unless it was used since; as ``files.remove_unused``.

    Returns:
        What the others take, in bytes, and the files deleted.
    """
    now_ns = time.time_ns()
    known = sorted(files, key=lambda file: -age_s(file.used_ns, now_ns))
    left, spare = sum(file.nbytes for file in known), more_bytes
    deleted: list[StoredFile] = []
    if left <= max_bytes:
        return left, ()
    for file in known:
        if left <= max_bytes:
            spare -= file.nbytes
            if spare < 0:
                break
        removed = remove(file.path, file.used_ns)
        if removed:
            deleted.append(file)
        if removed is not False:  # deleted, or gone before
            left -= file.nbytes
    return left, tuple(deleted)


class SizeBound:
    """Makes room in a store before something is written to it. Not to be used by two at a time.

    Looking at every file for each write would cost more and more as a store grows. So a writer
    looks again only when it has written a 64th of the store's size, or when there is no room; and
    if something must go, up to a 64th goes at once. A store that one process writes never exceeds
    its size; each further process that writes may exceed it by a 64th, or by one entry if that is
    more, until one of them looks again.
    """

    def __init__(self, max_bytes: int) -> None:
        check_max_bytes(max_bytes)
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self.evictions = 0
        self.refused = 0
        self._room = 0  # bytes that may be written before the files are looked at again

    def __reduce__(self) -> tuple[type[SizeBound], tuple[int]]:
        """A lock cannot be pickled, and another process counts for itself."""
        return SizeBound, (self.max_bytes,)

    def make_room(self, nbytes: int, files: Callable[[], Iterable[StoredFile]]) -> None:
        """Delete what was not used for long, if need be, for ``nbytes`` that are now written.

        Args:
            nbytes: at most ``max_bytes``.
            files: lists all others; called only if need be.
        """
        if nbytes > self._room:
            share, most = self.max_bytes // _SHARE, self.max_bytes - nbytes
            for _ in range(_LOOKS):
                left, deleted = shrink(files(), most, more_bytes=share)
                self.evictions += len(deleted)
                if left <= most:
                    break
            self._room = nbytes + min(share, most - left)
        self._room -= nbytes
