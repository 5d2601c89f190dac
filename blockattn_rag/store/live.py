"""Sets of live handles, which identify the blocks that ``gc`` keeps, in memory or in a file.

Use a file to run ``gc`` on another machine than the vector store's, or with a vector store that
this package cannot read. It is a text file with one handle per line. ``lines`` adds the time at
which the handles were looked up, and their number, so that a truncated file is rejected::

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

_DIGEST_BYTES = 16
_DIGEST = f"S{_DIGEST_BYTES}"
_HANDLE = re.compile(r"[0-9a-f]{32}")
_HEAD = re.compile(r"# blockattn-rag live handles, looked up at (\d{1,12}\.\d{1,9})")
_END = re.compile(r"# end of (\d+) handles")


class LiveHandles:
    """Sorted set of handles (``BlockKV.handle``), which takes 16 bytes for each.

    Args:
        handles: Handles of 32 hex digits each, in any order. Duplicates are allowed.
        looked_up: Time at which the handles were looked up, in seconds since 1970. Default: now.

    Raises:
        ValueError: An item is not a handle.
    """

    def __init__(self, handles: Iterable[str], looked_up: float | None = None) -> None:
        self.looked_up = time.time() if looked_up is None else looked_up
        digests = bytearray()
        for handle in handles:
            if not is_handle(handle):
                raise ValueError(f"a handle is 32 hex digits, found {handle!r}")
            digests += bytes.fromhex(handle)
        self._digests = np.unique(np.frombuffer(digests, _DIGEST))

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, handle: object) -> bool:
        if not is_handle(handle):
            return False
        digest = np.array(bytes.fromhex(handle), _DIGEST)
        place = int(np.searchsorted(self._digests, digest))
        # Slices are compared, because numpy drops trailing zeros of single items.
        return bool((self._digests[place : place + 1] == digest).any())

    def __iter__(self) -> Iterator[str]:
        content = self._digests.tobytes()
        for start in range(0, len(content), _DIGEST_BYTES):
            yield content[start : start + _DIGEST_BYTES].hex()

    def lines(self) -> Iterator[str]:
        """Lines of the file, without line ends."""
        yield f"# blockattn-rag live handles, looked up at {self.looked_up:.6f}"
        yield from self
        yield f"# end of {len(self)} handles"

    @classmethod
    def read(cls, path: Path) -> LiveHandles:
        """Read a file of ``lines``, or a plain list of handles. A plain list is as old as its file.

        Raises:
            ValueError: See ``parse``.
        """
        with path.open(encoding="utf-8", errors="replace") as file:
            return cls.parse(file, str(path), path.stat().st_mtime)

    @classmethod
    def parse(
        cls, lines: Iterable[str], name: str = "the list", looked_up: float | None = None
    ) -> LiveHandles:
        """Parse ``lines``, or plain handles, one per line. Empty lines are ignored.

        A plain list may also end with ``# end of N handles``, which is checked.

        Args:
            lines: Lines with or without line ends.
            name: Name of the list in messages.
            looked_up: Time at which plain handles were looked up, in seconds since 1970. Default:
                now.

        Raises:
            ValueError: A line is not a handle, or the list was truncated.
        """
        looked_up = time.time() if looked_up is None else looked_up
        rest = iter(lines)
        first = next(rest, "")
        if head := _HEAD.fullmatch(first.strip()):
            return cls(_handles(name, rest, needs_end=True), float(head[1]))
        return cls(_handles(name, chain([first], rest), needs_end=False), looked_up)


def is_handle(text: object) -> TypeGuard[str]:
    """Whether ``text`` has the form of a block's handle."""
    return isinstance(text, str) and _HANDLE.fullmatch(text) is not None


def _handles(name: str, lines: Iterable[str], *, needs_end: bool) -> Iterator[str]:
    number, end = 0, None
    for line in lines:
        text = line.strip()
        if not text:
            continue
        if end is not None:  # ignoring a second list would delete its blocks
            raise ValueError(
                f"{name} continues after its last line, with {text[:80]!r}; pass each file with "
                "its own --handles"
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
            f"{name} is truncated: found {number} handles, expected "
            f"{'a last line with their number' if end is None else end[1]}; create it again"
        )
