"""Store with several tiers, such as memory, a local disk, and shared storage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from blockattn_rag.errors import StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import KVStore, ReadResult, Sidecar, StoreStats, TierStats, is_damage
from blockattn_rag.store.checks import check_entry, check_finite
from blockattn_rag.store.concurrency import (
    CircuitBreaker,
    Readers,
    SingleFlight,
    WriteQueue,
    check_seconds,
    deadline,
    outcome,
)
from blockattn_rag.store.memory import MemoryStore
from blockattn_rag.store.opening import open_spec

logger = logging.getLogger("blockattn_rag")

T = TypeVar("T")

_READERS = 8


class _Tier:
    """Store with a deadline per call and a circuit breaker, which skips calls while it is open. The
    deadline does not apply to writes or to in-memory stores."""

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
        if self.is_in_memory:
            return self._guarded(question, entries)
        until = deadline(self._deadline_s)
        doing = f"query {self._stats.name}"
        return self._guarded(lambda: outcome(self._readers.start(question), until, doing), entries)

    def count(self, **more: int) -> None:
        with self._lock:
            sums = {name: getattr(self._stats, name) + number for name, number in more.items()}
            self._stats = replace(self._stats, **sums)

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats, is_open=self._breaker.is_open)

    def _guarded(self, call: Callable[[], T], entries: int) -> T:
        """Make a call, and report its outcome to the breaker. Raises if the breaker is open."""
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
        for entry in answer if isinstance(answer, list) else []:
            if isinstance(entry, StoreError) and not is_damage(entry):
                self._note_failure(entry)
                return answer
        if self._breaker.succeeded():
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


class TieredStore(KVStore):
    """Store with several tiers, from the fastest to the *home*, which has all entries.

    A read queries the tiers in order, with one call per tier for all entries that are still
    missing, and copies hits to the faster tiers. A write goes to all tiers: immediately to memory
    and the home, in the background to others. After ``failures`` consecutive failures, a tier is
    skipped and retried every ``pause_s`` seconds, and a warning is logged.

    Args:
        tiers: Stores, or paths and addresses as in ``open_store``. ``"memory:4GiB"`` keeps copies
            in host memory, page-locked if CUDA is available.
        queue_bytes: Size limit in bytes of the queue of blocks to copy to faster tiers. When it is
            full, further blocks are not copied. Default: 1 GiB.
        deadline_s: Timeout of a call to a tier, in seconds, except for writes.

    Raises:
        TypeError, ValueError: There is no tier, or a tier or another argument is invalid.
    """

    def __init__(
        self,
        *tiers: KVStore | str | Path,
        queue_bytes: int = 1 << 30,
        deadline_s: float = 10.0,
        failures: int = 3,
        pause_s: float = 30.0,
    ) -> None:
        if not tiers:
            raise ValueError("Expected at least one tier, found none")
        self._deadline_s = check_seconds("deadline_s", deadline_s)
        self._tiers = [
            _Tier(_opened(tier), deadline_s, CircuitBreaker(failures, pause_s)) for tier in tiers
        ]
        self._copies, self._home = self._tiers[:-1], self._tiers[-1]
        self._flights = SingleFlight()
        self._queue = WriteQueue(queue_bytes)

    def __repr__(self) -> str:
        return f"TieredStore({', '.join(repr(tier.store) for tier in self._tiers)})"

    @property
    def sidecar(self) -> Sidecar | None:
        return self._home.store.sidecar

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        """Read several entries. A result is None if no responding tier has the entry, and an error
        if the home's entry is damaged and no other tier has it, or if a shared read times out."""
        most_s = self._deadline_s * (len(self._tiers) + 1)
        return self._flights.read(keys, self._read, most_s)

    def touch(self, key: str) -> bool:
        """Mark an entry as used now in all tiers. Returns whether it appears intact in the home."""
        list(self._ask_copies(lambda store: store.touch(key)))
        return self._home.ask(lambda: self._home.store.touch(key))

    def mark_used(self, key: str) -> None:
        for tier in self._tiers:
            if tier.store.records_use:  # A call that sends no request must not close the breaker.
                with suppress(StoreError):
                    tier.ask(partial(tier.store.mark_used, key))

    def claim(self, key: str, handles: Collection[str]) -> bool:
        list(self._ask_copies(lambda store: store.touch(key)))
        return self._home.ask(lambda: self._home.store.claim(key, handles))

    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry in all tiers. Returns once it is in the home.

        Raises:
            ValueError: See ``KVStore.put``.
            StoreError: The block contains NaN or infinity, or the home cannot store it. In the
                latter case, faster tiers may have stored the block.
        """
        check_entry(key, kv)
        check_finite(kv, f"to {self!r}")  # Checked here, so that no tier counts a failure.
        self._flights.forget(key)
        self._copy(key, kv, self._copies)
        self._home.write(key, kv)

    def __contains__(self, key: object) -> bool:
        is_copied = any(self._ask_copies(lambda store: key in store))
        return is_copied or self._home.ask(lambda: key in self._home.store)

    def delete(self, key: str) -> bool:
        self._flights.forget(key)
        # A write that finished after the deletion would restore the entry.
        was_queued = self._queue.discard(key, self._deadline_s)
        was_copied = any([*self._ask_copies(lambda store: store.delete(key))])
        return self._home.ask(lambda: self._home.store.delete(key)) or was_queued or was_copied

    def keys(self) -> Iterator[str]:
        return self._home.store.keys()

    def stats(self) -> StoreStats:
        """Return stats of the home and of all tiers. Counting the home's entries may be slow."""
        return replace(self._home.store.stats(), tiers=self.tier_stats())

    def tier_stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self._tiers)

    def flush(self, wait_s: float | None = None) -> bool:
        """Wait at most ``wait_s`` seconds until no copies are pending. Returns whether none are."""
        return self._queue.flush(wait_s)

    def close(self) -> None:
        self._queue.close()

    def _read(self, keys: Sequence[str]) -> list[ReadResult]:
        entries: dict[str, ReadResult] = dict.fromkeys(keys)
        lacking: dict[str, list[_Tier]] = {key: [] for key in keys}
        for tier in self._tiers:
            absent = [key for key in keys if not isinstance(entries[key], BlockKV)]
            if not absent:
                break
            for key, entry in zip(absent, tier.read(absent), strict=True):
                entries[key] = entry
                if isinstance(entry, BlockKV):
                    self._copy(key, entry, lacking[key])
                elif entry is None or is_damage(entry):
                    lacking[key].append(tier)
        return [
            entry if isinstance(entry, BlockKV) or is_damage(entry) else None
            for entry in (entries[key] for key in keys)
        ]

    def _ask_copies(self, question: Callable[[KVStore], bool]) -> Iterator[bool]:
        """Query each faster tier, skipping tiers that fail."""
        for tier in self._copies:
            with suppress(StoreError):
                yield tier.ask(partial(question, tier.store))

    def _copy(self, key: str, kv: BlockKV, tiers: Sequence[_Tier]) -> None:
        """Write to faster tiers: immediately to memory, and in the background to others."""
        _write_to([tier for tier in tiers if tier.is_in_memory], key, kv)
        others = [tier for tier in tiers if not tier.is_in_memory]
        if others and not self._queue.add(key, kv, partial(_write_to, others)):
            for tier in others:
                tier.count(dropped=1)


def _write_to(tiers: Sequence[_Tier], key: str, kv: BlockKV) -> None:
    for tier in tiers:
        try:
            tier.write(key, kv)
        except StoreError:  # The tier counts failures, and logs them when its breaker opens.
            tier.count(dropped=1)
        except Exception as error:
            tier.count(dropped=1)
            logger.exception("%r could not store a block: %s", tier.store, error)


def _opened(tier: KVStore | str | Path) -> KVStore:
    if isinstance(tier, (str, Path)):
        return open_spec(tier, on_host=True)
    if isinstance(tier, KVStore):
        return tier
    raise TypeError(f"A tier must be a KVStore, an address or a path, found {type(tier).__name__}")
