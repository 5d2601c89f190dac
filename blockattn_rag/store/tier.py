"""Tier of a ``TieredStore``: a store that may be slow or down, behind a circuit breaker."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from blockattn_rag.errors import StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import KVStore, ReadResult, TierStats, is_damage
from blockattn_rag.store.concurrency import Readers, check_seconds, deadline, outcome
from blockattn_rag.store.memory import MemoryStore

logger = logging.getLogger("blockattn_rag")

T = TypeVar("T")

_READERS = 8


class CircuitBreaker:
    """Circuit breaker for calls to a service that may be down.

    The breaker starts closed and allows every call. After ``failures`` consecutive failures, it
    opens and allows one call every ``pause_s`` seconds. The first success closes it.
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
        """Whether a call is allowed now. If it is, the caller must report its outcome."""
        with self._lock:
            if self._failures < self._most:
                return True
            now = self._clock()
            if now < self._next_try:
                return False
            self._next_try = now + self.pause_s
            return True

    def succeeded(self) -> bool:
        """Report a success. Returns whether this closed the breaker."""
        with self._lock:
            was_open = self._failures >= self._most
            self._failures = 0
            return was_open

    def failed(self) -> bool:
        """Report a failure. Returns whether this opened the breaker."""
        with self._lock:
            self._failures += 1
            self._next_try = self._clock() + self.pause_s
            return self._failures == self._most


class Tier:
    """Store with a deadline per call, which is skipped while its circuit breaker is open.

    Args:
        deadline_s: Timeout of a call in seconds. Does not apply to writes or to in-memory stores.
    """

    def __init__(self, store: KVStore, deadline_s: float, breaker: CircuitBreaker) -> None:
        self.store = store
        self.is_in_memory = isinstance(store, MemoryStore)
        self._deadline_s = deadline_s
        self._breaker = breaker
        self._readers = Readers(_READERS, "blockattn-rag-tier")
        self._lock = threading.Lock()
        self._stats = TierStats(repr(store))

    def read(self, keys: Sequence[str]) -> list[ReadResult]:
        try:
            entries = self.ask(lambda: self.store.get_many(keys), len(keys))
        except StoreError as error:
            return [error] * len(keys)
        blocks = [entry for entry in entries if isinstance(entry, BlockKV)]
        self.count(
            hits=len(blocks),
            read_tokens=sum(kv.num_tokens for kv in blocks),
            read_bytes=sum(kv.nbytes for kv in blocks),
            misses=sum(entry is None or is_damage(entry) for entry in entries),
        )
        return entries

    def write(self, key: str, kv: BlockKV) -> None:
        self._guarded(lambda: self.store.put(key, kv), 1)
        self.count(written=1)

    def ask(self, question: Callable[[], T], entries: int = 1) -> T:
        """Call ``question``, which queries the store, with the tier's deadline."""
        if self.is_in_memory:
            return self._guarded(question, entries)
        until = deadline(self._deadline_s)
        doing = f"ask {self._stats.name}"
        return self._guarded(lambda: outcome(self._readers.start(question), until, doing), entries)

    def count(self, **more: int) -> None:
        """Add to counters, by their names in ``TierStats``."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + number for name, number in more.items()}
            self._stats = replace(self._stats, **sums)

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats, is_open=self._breaker.is_open)

    def _guarded(self, call: Callable[[], T], entries: int) -> T:
        """Make a call unless the breaker is open, and report the outcome to the breaker."""
        if not self._breaker.allows():
            self.count(skipped=entries)
            raise StoreUnavailableError(
                f"{self._stats.name} is skipped because it failed several times in a row; it is "
                f"retried every {self._breaker.pause_s:g} s"
            )
        try:
            answer = call()
        except StoreError as error:
            if not is_damage(error):
                self._note_failure(error)
            raise
        results = answer if isinstance(answer, list) else []
        failures = (entry for entry in results if isinstance(entry, StoreError))
        failure = next((error for error in failures if not is_damage(error)), None)
        if failure is not None:
            self._note_failure(failure)
        elif self._breaker.succeeded():
            logger.info("%s is responding again.", self._stats.name)
        return answer

    def _note_failure(self, error: StoreError) -> None:
        self.count(failures=1)
        if self._breaker.failed():
            logger.warning(
                "%s. The tier is skipped because it failed several times in a row, and retried "
                "every %g s; until it responds, blocks that are stored only there count as misses.",
                error,
                self._breaker.pause_s,
            )
