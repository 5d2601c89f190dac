"""Prefetching: reads passages from the store while later stages of a retriever run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import NamedTuple

from blockattn_rag.engine.threads import start_thread

logger = logging.getLogger("blockattn_rag")

MOST_WAITING = 64
"""Maximum number of waiting calls. More are dropped: their answers would not profit."""


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Passage counts of one ``prefetch`` call, or of all so far. Empty passages do not count.

    Args:
        ready: Passages in memory.
        absent: Passages that are not in the store. The answer computes them.
        dropped: Passages that were not looked up, because too many calls were waiting or the memory
            for blocks was full.
        failed: Passages of calls that raised an error. Only the first error is logged.
    """

    ready: int = 0
    absent: int = 0
    dropped: int = 0
    failed: int = 0

    def __add__(self, other: PrefetchStats) -> PrefetchStats:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return PrefetchStats(*(mine + theirs for mine, theirs in pairs))


class _Call(NamedTuple):
    passages: int
    read: Callable[[], PrefetchStats]


class Prefetcher:
    """Reads passages in a background thread, which ends when there is no more work.

    Calls return immediately and never raise. Answers read whatever was not prefetched.
    """

    def __init__(self) -> None:
        self.stats = PrefetchStats()
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._is_working = False

    def submit(self, passages: int, read: Callable[[], PrefetchStats]) -> None:
        """Queue a call to ``read``, which reads this number of passages."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self.stats += PrefetchStats(dropped=passages)
                return
            self._waiting.append(_Call(passages, read))
            if self._is_working:
                return
            self._is_working = True
        try:
            start_thread(self._work, "blockattn-prefetch", self._drop_waiting)
        except RuntimeError as error:  # the system cannot start a thread
            self._is_working = False
            self._fail(self._drop_waiting(), error)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                counts = call.read()
            except Exception as error:  # noqa: BLE001 -- raised again by the answer
                self._fail(call.passages, error)
            else:
                with self._lock:
                    self.stats += counts

    def _next(self) -> _Call | None:
        with self._lock:
            self._is_working = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _drop_waiting(self) -> int:
        """Drop all waiting calls. Returns their number of passages."""
        with self._lock:
            passages = sum(call.passages for call in self._waiting)
            self._waiting.clear()
        return passages

    def _fail(self, passages: int, error: Exception) -> None:
        with self._lock:
            is_first = not self.stats.failed
            self.stats += PrefetchStats(failed=passages)
        if is_first:
            logger.warning(
                "Prefetching failed: %s. Answers are not affected: they read or compute what they "
                "need. Further failures are only counted (engine.prefetches).",
                str(error).rstrip("."),
            )
