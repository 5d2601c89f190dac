"""Handles that are referred to: what ``gc`` keeps, in 16 bytes each, in memory and as a file.

The file serves to collect on another machine than the one of the vector store. It is text, one
handle a line; what ``write`` makes begins with the time at which the handles were looked up, and
ends with their number, so that one that was cut short is not taken for the whole::

    # blockattn-rag live handles, looked up at 1790000000.25
    00ff00ff00ff00ff00ff00ff00ff00ff
    # end of 1 handles
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

_HANDLE = re.compile(r"[0-9a-f]{32}")
_HEAD = re.compile(r"# blockattn-rag live handles, looked up at (\d{1,12}\.\d{1,9})")
_END = re.compile(r"# end of (\d+) handles")


class LiveHandles:
    """A set of handles (``BlockKV.handle``), each once, in order.

    Args:
        handles: 32 hex digits each; may come one by one, and more than once.
        looked_up: when they were, seconds since 1970. None for now.

    Raises:
        ValueError: one is no handle.
    """

    def __init__(self, handles: Iterable[str], looked_up: float | None = None) -> None:
        self.looked_up = time.time() if looked_up is None else looked_up
        digests = bytearray()
        for handle in handles:
            if not is_handle(handle):
                raise ValueError(f"a handle is 32 hex digits, found {handle!r}")
            digests += bytes.fromhex(handle)
        halves = np.frombuffer(digests, dtype=">u8").reshape(-1, 2)
        halves = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
        first = np.ones(len(halves), dtype=bool)
        first[1:] = (halves[1:] != halves[:-1]).any(axis=1)
        self._high: NDArray[np.uint64] = halves[first, 0].astype(np.uint64)
        self._low: NDArray[np.uint64] = halves[first, 1].astype(np.uint64)

    def __len__(self) -> int:
        return len(self._high)

    def __contains__(self, handle: object) -> bool:
        if not is_handle(handle):
            return False
        high, low = np.uint64(int(handle[:16], 16)), np.uint64(int(handle[16:], 16))
        start, stop = (np.searchsorted(self._high, high, side) for side in ("left", "right"))
        return bool((self._low[start:stop] == low).any())

    def __iter__(self) -> Iterator[str]:
        for high, low in zip(self._high, self._low, strict=True):
            yield f"{high:016x}{low:016x}"

    def lines(self) -> Iterator[str]:
        """The file, line by line, without line ends."""
        yield f"# blockattn-rag live handles, looked up at {self.looked_up:.6f}"
        yield from self
        yield f"# end of {len(self)} handles"

    @classmethod
    def read(cls, path: Path) -> LiveHandles:
        """A file of ``lines``, or a plain list of handles, taken to be as old as the file.

        Raises:
            ValueError: a line is no handle, or the file was cut short; the message says where.
        """
        with path.open(encoding="utf-8", errors="replace") as file:
            head = _HEAD.fullmatch(file.readline().rstrip("\n"))
            looked_up = float(head[1]) if head else path.stat().st_mtime
            if not head:
                file.seek(0)
            return cls(_handles(path, file, has_end=head is not None), looked_up)


def is_handle(text: object) -> TypeGuard[str]:
    """Whether it is spelled as the handle of a block."""
    return isinstance(text, str) and _HANDLE.fullmatch(text) is not None


def _handles(path: Path, lines: Iterable[str], *, has_end: bool) -> Iterator[str]:
    number, end = 0, None
    for line in lines:
        text = line.strip()
        if not text:
            continue
        if end is not None:  # dropping what another file added would delete what it refers to
            raise ValueError(
                f"{path} goes on after its last line, with {text[:80]!r}; give each file by a "
                "--live of its own"
            )
        if has_end and (end := _END.fullmatch(text)) is not None:
            continue
        if not is_handle(text):
            raise ValueError(
                f"{path}: expected a handle, 32 hex digits, found {text[:80]!r} after "
                f"{number} handles"
            )
        number += 1
        yield text
    if has_end and (end is None or int(end[1]) != number):
        raise ValueError(
            f"{path} was cut short: it holds {number} handles and "
            f"{'no last line that tells' if end is None else f'says {end[1]} of'} their number; "
            "write it again with `blockattn-rag store live`"
        )
