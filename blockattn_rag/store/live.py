"""Sets of live handles: the blocks that ``gc`` keeps, 16 bytes each, in memory and as a file.

A file serves to collect on another machine than the vector store's, or for a vector store that this
package does not read itself. It is text, one handle a line. ``lines`` adds the time at which the
handles were looked up, and their number, so that a truncated file is refused::

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
    """Sorted set of handles (``BlockKV.handle``).

    Args:
        handles: 32 hex digits each, in any order. Duplicates are allowed.
        looked_up: When they were looked up, seconds since 1970. Default: now.

    Raises:
        ValueError: One is not a handle.
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
        """Read a file of ``lines``, or a plain list of handles, which is as old as the file.

        Raises:
            ValueError: As ``parse``.
        """
        with path.open(encoding="utf-8", errors="replace") as file:
            return cls.parse(file, str(path), path.stat().st_mtime)

    @classmethod
    def parse(
        cls, lines: Iterable[str], name: str = "the list", looked_up: float | None = None
    ) -> LiveHandles:
        """Parse ``lines``, or plain handles, one a line. Empty lines are ignored.

        A plain list may also end with ``# end of N handles``, which is checked.

        Args:
            lines: With or without line ends.
            name: Name of the list for messages.
            looked_up: When plain handles were looked up, seconds since 1970. Default: now.

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
        if end is not None:  # ignoring a second list would delete what it refers to
            raise ValueError(
                f"{name} goes on after its last line, with {text[:80]!r}; pass each file by a "
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
            f"{name} is truncated: found {number} handles, expected "
            f"{'a last line with their number' if end is None else end[1]}; make it again"
        )
