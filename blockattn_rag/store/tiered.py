"""Store in several tiers, such as memory, a local disk, and a home that many machines share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import (
    Found,
    KVStore,
    Sidecar,
    StoreStats,
    TierStats,
    is_damage,
    with_handles,
)
from blockattn_rag.store.checks import check_entry, check_finite
from blockattn_rag.store.concurrency import SingleFlight, WriteQueue, check_seconds
from blockattn_rag.store.opening import open_spec
from blockattn_rag.store.tier import CircuitBreaker, Tier

logger = logging.getLogger("blockattn_rag")

Write = Literal["through", "behind"]
"""``through``: ``put`` returns when the home has the block. ``behind``: the home gets it later."""


class TieredStore(KVStore):
    """Store in several tiers: small and fast ones first, the *home* of all entries last.

    A read queries the tiers in order, each once for all entries that are still missing, and copies
    hits to the faster tiers. Concurrent reads of one entry are merged. A write goes to all tiers.

    A failing tier makes answers slower but never fails them: its entries come from the next tier or
    are computed. After ``failures`` failures in a row, a tier is skipped and retried every
    ``pause_s`` seconds; this is logged once.

    Args:
        tiers: Stores, or paths and addresses as for ``open_store``. ``"memory:4GiB"`` keeps copies
            in host memory, page-locked if CUDA is available.
        write: ``"through"`` or ``"behind"``.
        queue_bytes: Size limit of the blocks queued with ``"behind"``. ``put`` waits up to
            ``deadline_s`` for room, then drops the block.
        deadline_s: Seconds that a tier may take to answer a read.

    Raises:
        ValueError: No tiers, or an argument is out of range.
    """

    def __init__(
        self,
        *tiers: KVStore | str | Path,
        write: Write = "through",
        queue_bytes: int = 1 << 30,
        deadline_s: float = 10.0,
        failures: int = 3,
        pause_s: float = 30.0,
    ) -> None:
        if not tiers:
            raise ValueError("Expected at least one tier, found none")
        if write not in get_args(Write):
            raise ValueError(f"write must be one of {get_args(Write)}, found {write!r}")
        self.write = write
        self._deadline_s = check_seconds("deadline_s", deadline_s)
        self._tiers = [
            Tier(_opened(tier), deadline_s, CircuitBreaker(failures, pause_s)) for tier in tiers
        ]
        self._home = self._tiers[-1]
        self._flights = SingleFlight()
        self._queue = WriteQueue(queue_bytes)
        self._lock = threading.Lock()
        self._has_warned = False

    def __repr__(self) -> str:
        return f"TieredStore({', '.join(repr(tier.store) for tier in self._tiers)})"

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def sidecar(self) -> Sidecar | None:
        """Files beside the entries of the home."""
        return self._home.store.sidecar

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """Read several entries, with one call to each tier.

        The result is None if no responding tier has the entry, and an error if the entry is damaged
        in the home and absent from all other tiers.
        """
        most_s = self._deadline_s * (len(self._tiers) + 1)
        return self._flights.read(keys, self._read, most_s)

    def touch(self, key: str) -> bool:
        """Mark an entry as used now in every tier. Returns whether the home has it, or it is queued
        for the home.

        Raises:
            StoreError: The home does not answer.
        """
        list(self._ask_copies(lambda store: store.touch(key)))
        if self._pending(key) is not None:
            return True
        return self._home.ask(lambda: self._home.store.touch(key))

    def mark_used(self, key: str) -> None:
        for tier in self._tiers:
            if tier.store.records_use:  # a call without a request would close the breaker
                with suppress(StoreError):
                    tier.ask(partial(tier.store.mark_used, key))

    def claim(self, key: str, handles: Collection[str]) -> bool:
        list(self._ask_copies(lambda store: store.touch(key)))
        if (waiting := self._pending(key)) is None:
            return self._home.ask(lambda: self._home.store.claim(key, handles))
        if (kv := with_handles(waiting, handles)).handle != waiting.handle:
            self.put(key, kv)
        return True

    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry in all tiers. ``write`` decides whether the home gets it now or later.

        Raises:
            ValueError: See ``KVStore.put``.
            StoreError: The block contains NaN or infinity; or the home cannot store it with
                ``write="through"``. In the second case, faster tiers have it.
        """
        check_entry(key, kv)
        check_finite(kv, f"to {self!r}")  # checked here, so that no tier counts it as a failure
        self._flights.forget(key)
        if self.write == "through":
            self._fill(key, kv, self._tiers[:-1])
            self._home.write(key, kv)
            return
        self._fill(key, kv, [tier for tier in self._tiers if tier.is_resident])
        others = [tier for tier in reversed(self._tiers) if not tier.is_resident]
        write = partial(self._write_to, others)
        if others and not self._queue.add(key, kv, write, self._deadline_s):
            _count_drop(others)
            self._warn_of_drop()

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str) and self._queue.pending(key) is not None:
            return True
        if any(self._ask_copies(lambda store: key in store)):
            return True
        return self._home.ask(lambda: key in self._home.store)

    def delete(self, key: str) -> bool:
        self._flights.forget(key)
        was_queued = self._queue.discard(key)
        was_copied = any([*self._ask_copies(lambda store: store.delete(key))])
        return self._home.ask(lambda: self._home.store.delete(key)) or was_queued or was_copied

    def keys(self) -> Iterator[str]:
        """Keys of the home. Queued blocks may be missing; see ``flush``."""
        return self._home.store.keys()

    def stats(self) -> StoreStats:
        """Stats of the home and of all tiers. Counting the home's entries may take long."""
        return replace(self._home.store.stats(), tiers=self.tier_stats())

    def tier_stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self._tiers)

    def flush(self, wait_s: float | None = None) -> bool:
        """Wait until the queue is written, at most ``wait_s`` seconds. Returns whether it is."""
        return self._queue.flush(wait_s)

    def close(self) -> None:
        """Write the queued blocks. Later blocks are not written to tiers that use the queue."""
        self._queue.close()

    def _read(self, keys: Sequence[str]) -> list[Found]:
        """Query the tiers in order. Entries in a failing tier count as absent."""
        found: dict[str, Found] = {key: self._queue.pending(key) for key in keys}
        lacking: dict[str, list[Tier]] = {key: [] for key in keys}
        for tier in self._tiers:
            absent = [key for key in keys if not isinstance(found[key], BlockKV)]
            if not absent:
                break
            for key, answer in zip(absent, tier.read(absent), strict=True):
                found[key] = answer
                if isinstance(answer, BlockKV):
                    self._fill(key, answer, lacking[key])
                elif answer is None or is_damage(answer):
                    lacking[key].append(tier)
        answers = (found[key] for key in keys)
        return [one if isinstance(one, BlockKV) or is_damage(one) else None for one in answers]

    def _pending(self, key: str) -> BlockKV | None:
        """The block that is queued for the home, or None."""
        return self._queue.pending(key) if self.write == "behind" else None

    def _ask_copies(self, question: Callable[[KVStore], bool]) -> Iterator[bool]:
        """Query each faster tier, and skip the ones that fail."""
        for tier in self._tiers[:-1]:
            with suppress(StoreError):
                yield tier.ask(partial(question, tier.store))

    def _fill(self, key: str, kv: BlockKV, tiers: Sequence[Tier]) -> None:
        """Write to faster tiers: to memory at once, to others in the background."""
        self._write_to([tier for tier in tiers if tier.is_resident], key, kv)
        others = [tier for tier in tiers if not tier.is_resident]
        write = partial(self._write_to, others)
        if others and not self._queue.add(key, kv, write, unless_waiting=True):
            _count_drop(others)

    def _write_to(self, tiers: Sequence[Tier], key: str, kv: BlockKV) -> None:
        for tier in tiers:
            try:
                tier.write(key, kv)
            except StoreError:  # counted, and logged when the breaker opens
                tier.count(dropped=1)
            except Exception as error:
                tier.count(dropped=1)
                logger.exception("%r could not store a block: %s", tier.store, error)

    def _warn_of_drop(self) -> None:
        """Log the first block that the home does not get."""
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if has_warned:
            return
        why = (
            "is closed and accepts no more blocks to write behind: they are computed again each "
            "time."
            if self._queue.is_closed
            else "is written more slowly than blocks are computed: a block was not stored and is "
            "computed again each time. Raise queue_bytes, or use write='through'."
        )
        logger.warning("%r %s Further ones are only counted (tier_stats())", self, why)


def _count_drop(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.count(dropped=1)


def _opened(tier: KVStore | str | Path) -> KVStore:
    if isinstance(tier, (str, Path)):
        return open_spec(tier, on_host=True)
    if isinstance(tier, KVStore):
        return tier
    raise TypeError(f"A tier must be a KVStore, an address or a path, found {type(tier).__name__}")
