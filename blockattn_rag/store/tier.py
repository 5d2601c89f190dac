"""One tier of a ``TieredStore``: a store that may be slow or down, and the figures of its use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from blockattn_rag.errors import (
    CorruptEntryError,
    FingerprintMismatchError,
    StoreError,
    StoreUnavailableError,
)
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import Found, KVStore, ResidentStore, get_many
from blockattn_rag.store.breaker import CircuitBreaker
from blockattn_rag.store.deadlines import Readers, deadline, outcome

logger = logging.getLogger("blockattn_rag")

T = TypeVar("T")

_READERS = 8


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of one tier since its ``TieredStore`` was made.

    Args:
        name: the tier's store.
        hits: entries that were read there.
        read_tokens, read_bytes: of these entries; bytes of keys, values and scales.
        misses: entries that were looked for there and were not, or were damaged.
        written: entries that were written there, promoted ones included.
        failures: reads and writes that failed, a read of many entries being one.
        skipped: entries that were not looked for or not written because the tier was left alone.
        dropped: entries that were not written: too many waited, or writing failed.
        is_open: whether it is left alone at present, because it failed several times in a row.
    """

    name: str
    hits: int = 0
    read_tokens: int = 0
    read_bytes: int = 0
    misses: int = 0
    written: int = 0
    failures: int = 0
    skipped: int = 0
    dropped: int = 0
    is_open: bool = False


class Tier:
    """A store, asked with a deadline and not at all while it fails again and again.

    Args:
        deadline_s: seconds that a read may take, where blocks are not in this process's memory.
        breaker: decides whether to ask.
    """

    def __init__(self, store: KVStore, deadline_s: float, breaker: CircuitBreaker) -> None:
        self.store = store
        self.is_resident = isinstance(store, ResidentStore)
        self._deadline_s = deadline_s
        self._breaker = breaker
        self._readers = Readers(_READERS, "blockattn-rag-tier")
        self._lock = threading.Lock()
        self._stats = TierStats(repr(store))

    def read(self, keys: Sequence[str]) -> list[Found]:
        """As ``get_many``. Where the tier fails, every answer that it owes is a StoreError."""
        try:
            found = self.ask(lambda: get_many(self.store, keys), len(keys))
        except StoreError as error:
            return [error] * len(keys)
        read = [one for one in found if isinstance(one, BlockKV)]
        self.count(
            hits=len(read),
            read_tokens=sum(one.num_tokens for one in read),
            read_bytes=sum(one.nbytes for one in read),
            misses=sum(one is None or is_damage(one) for one in found),
        )
        return found

    def write(self, key: str, kv: BlockKV) -> None:
        """As ``put``.

        Raises:
            StoreError: as ``put``; or the tier is not asked at present.
        """
        self._guarded(lambda: self.store.put(key, kv), 1)
        self.count(written=1)

    def ask(self, question: Callable[[], T], entries: int = 1) -> T:
        """What the store answers, in time.

        Raises:
            StoreError: it raised that, gave no answer in time, or is not asked at present.
        """
        if self.is_resident:
            return self._guarded(question, entries)
        until = deadline(self._deadline_s)
        doing = f"ask {self._stats.name}"
        return self._guarded(lambda: outcome(self._readers.start(question), until, doing), entries)

    def count(self, **more: int) -> None:
        """Add to figures, by their names in ``TierStats``."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + number for name, number in more.items()}
            self._stats = replace(self._stats, **sums)

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats, is_open=self._breaker.is_open)

    def _guarded(self, call: Callable[[], T], entries: int) -> T:
        """Make a call unless the breaker is open, and tell the breaker what came of it."""
        if not self._breaker.allows():
            self.count(skipped=entries)
            raise StoreUnavailableError(
                f"{self._stats.name} failed several times in a row and is not asked for "
                f"{self._breaker.pause_s:g} s at a time"
            )
        try:
            answer = call()
        except StoreError as error:
            if not is_damage(error):
                self._note_failure(error)
            raise
        failed = [one for one in answer if _is_failure(one)] if isinstance(answer, list) else []
        if failed:
            self._note_failure(failed[0])
        elif self._breaker.succeeded():
            logger.info("%s answers again.", self._stats.name)
        return answer

    def _note_failure(self, error: StoreError) -> None:
        self.count(failures=1)
        if self._breaker.failed():
            logger.warning(
                "%s. It has failed several times in a row, and is tried again every %g s; until "
                "then blocks that only it holds count as absent.",
                error,
                self._breaker.pause_s,
            )


def is_damage(answer: object) -> bool:
    """Whether an answer tells of one bad entry, of which the store itself is not to blame."""
    return isinstance(answer, (CorruptEntryError, FingerprintMismatchError))


def _is_failure(answer: object) -> bool:
    return isinstance(answer, StoreError) and not is_damage(answer)
