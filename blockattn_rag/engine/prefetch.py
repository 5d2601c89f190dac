"""Prefetching: passages are read from the store while a retriever's later stages still run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from blockattn_rag.engine.threads import start_thread

logger = logging.getLogger("blockattn_rag")

MOST_WAITING = 64
"""Calls that wait to be read; further ones are dropped, because their answers come first."""


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """What prefetching did so far, in passages.

    Args:
        ready: read, or in memory already.
        absent: not in the store, so that their answer computes them.
        dropped: not looked for, because too many calls were waiting, or those before them in one
            call filled the memory for blocks.
        failed: of calls that raised; the first error is logged.
    """

    ready: int = 0
    absent: int = 0
    dropped: int = 0
    failed: int = 0


class Prefetched(NamedTuple):
    """How many passages of a call were read, and how many were not looked for."""

    ready: int
    dropped: int


class _Call(NamedTuple):
    """``read`` reads so many ``passages``; those that it does not tell of are not in the store."""

    passages: int
    read: Callable[[], Prefetched]


class Prefetcher:
    """Reads for prompts that do not exist yet, in a thread that lasts while there is work.

    Calls return at once and raise nothing: an answer reads whatever was not prefetched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._is_working = False
        self._stats = PrefetchStats()

    @property
    def stats(self) -> PrefetchStats:
        return self._stats

    def submit(self, passages: int, read: Callable[[], Prefetched]) -> None:
        """Call ``read``, which reads so many passages, when its turn comes."""
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self._stats = replace(self._stats, dropped=self._stats.dropped + passages)
                return
            self._waiting.append(_Call(passages, read))
            if self._is_working:
                return
            self._is_working = True
        try:
            start_thread(self._work, "blockattn-prefetch", self._give_up)
        except RuntimeError as error:  # the system has no thread to give
            self._is_working = False
            self._note_failure(self._give_up(), error)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                ready, dropped = call.read()
            except Exception as error:  # noqa: BLE001 -- the answer meets it again and raises it
                self._note_failure(call.passages, error)
            else:
                self._note(ready, call.passages - ready - dropped, dropped)

    def _next(self) -> _Call | None:
        with self._lock:
            self._is_working = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _give_up(self) -> int:
        """Forget what waits; how many passages that were."""
        with self._lock:
            passages = sum(call.passages for call in self._waiting)
            self._waiting.clear()
        return passages

    def _note(self, ready: int, absent: int, dropped: int) -> None:
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                ready=now.ready + ready,
                absent=now.absent + absent,
                dropped=now.dropped + dropped,
            )

    def _note_failure(self, passages: int, error: Exception) -> None:
        with self._lock:
            is_first = not self._stats.failed
            self._stats = replace(self._stats, failed=self._stats.failed + passages)
        if is_first:
            logger.warning(
                "prefetching failed: %s. Answers are not affected: they read or compute what they "
                "need. Further failures are only counted (engine.prefetches).",
                error,
            )
