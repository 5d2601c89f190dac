"""Handles that are referred to: what ``gc`` keeps, in 16 bytes each, in memory and as a file.

The file serves to collect on another machine than the one of the vector store, or for one that
this package does not read itself. It is text, one handle a line; what ``lines`` makes begins with
the time at which the handles were looked up, and ends with their number, so that one that was cut
short is not taken for the whole::

    # blockattn-rag live handles, looked up at 1790000000.25
    00ff00ff00ff00ff00ff00ff00ff00ff
    # end of 1 handles
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from itertools import chain
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
            ValueError: as ``parse``.
        """
        with path.open(encoding="utf-8", errors="replace") as file:
            return cls.parse(file, str(path), path.stat().st_mtime)

    @classmethod
    def parse(
        cls, lines: Iterable[str], name: str = "the list", looked_up: float | None = None
    ) -> LiveHandles:
        """What ``lines`` gives, or plain handles, one a line; empty lines are left out.

        Plain lists may end with ``# end of N handles`` too, which is then checked.

        Args:
            lines: with line ends or without.
            name: what messages call them.
            looked_up: when plain handles were looked up, seconds since 1970. None for now.

        Raises:
            ValueError: a line is no handle, or the list was cut short; the message says where.
        """
        looked_up = time.time() if looked_up is None else looked_up
        rest = iter(lines)
        first = next(rest, "")
        if head := _HEAD.fullmatch(first.strip()):
            return cls(_handles(name, rest, needs_end=True), float(head[1]))
        return cls(_handles(name, chain([first], rest), needs_end=False), looked_up)


def is_handle(text: object) -> TypeGuard[str]:
    """Whether it is spelled as the handle of a block."""
    return isinstance(text, str) and _HANDLE.fullmatch(text) is not None


def _handles(name: str, lines: Iterable[str], *, needs_end: bool) -> Iterator[str]:
    number, end = 0, None
    for line in lines:
        text = line.strip()
        if not text:
            continue
        if end is not None:  # dropping what another file added would delete what it refers to
            raise ValueError(
                f"{name} goes on after its last line, with {text[:80]!r}; give each file by a "
                "--handles of its own"
            )
        if (end := _END.fullmatch(text)) is not None:
            continue
        if not is_handle(text):
            raise ValueError(
                f"{name}: expected a handle, 32 hex digits, found {text[:80]!r} after "
                f"{number} handles"
            )
        number += 1
        yield text
    if (needs_end and end is None) or (end is not None and int(end[1]) != number):
        raise ValueError(
            f"{name} was cut short: it holds {number} handles and "
            f"{'no last line that tells' if end is None else f'says {end[1]} of'} their number; "
            "make it again"
        )
