"""A circuit breaker: what failed several times in a row is left alone for a while."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from blockattn_rag.store.deadlines import check_seconds


class CircuitBreaker:
    """Says whether something that may be down should be asked.

    It is closed at first: everything passes. After ``failures`` in a row it opens, and nothing
    passes for ``pause_s``. Then one caller passes, to try; the next one after another ``pause_s``.
    The first success closes it.

    Args:
        clock: seconds, such as ``time.monotonic``.
    """

    def __init__(
        self, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if failures < 1:
            raise ValueError(f"failures must be 1 or more, found {failures}")
        self.pause_s = check_seconds("pause_s", pause_s)
        self._most, self._clock = failures, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._next_try = -math.inf

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._failures >= self._most

    def allows(self) -> bool:
        """Whether to ask now. Who is told so must report what came of it."""
        with self._lock:
            if self._failures < self._most:
                return True
            now = self._clock()
            if now < self._next_try:
                return False
            self._next_try = now + self.pause_s
            return True

    def succeeded(self) -> bool:
        """Report a success; True if this closed it."""
        with self._lock:
            was_open = self._failures >= self._most
            self._failures = 0
            return was_open

    def failed(self) -> bool:
        """Report a failure; True if this opened it."""
        with self._lock:
            self._failures += 1
            self._next_try = self._clock() + self.pause_s
            return self._failures == self._most
