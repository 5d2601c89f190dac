"""Stores one behind the other: memory, a local disk, and a home that many machines share."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import Found, KVStore, StoreStats, check_key_of, touch
from blockattn_rag.store.breaker import CircuitBreaker
from blockattn_rag.store.checks import check_finite, check_storable
from blockattn_rag.store.claims import claim, claimed
from blockattn_rag.store.deadlines import check_seconds
from blockattn_rag.store.objects import ObjectStore
from blockattn_rag.store.single_flight import SingleFlight
from blockattn_rag.store.specs import open_spec
from blockattn_rag.store.tier import Tier, TierStats, is_damage
from blockattn_rag.store.write_queue import WriteQueue

logger = logging.getLogger("blockattn_rag")

Write = Literal["through", "behind"]
"""``through``: ``put`` returns when the home has the block. ``behind``: the home gets it later."""


@dataclass(frozen=True, slots=True)
class TieredStats(StoreStats):
    """Figures of a ``TieredStore``: those of its home, and ``tiers``, fastest first."""

    tiers: tuple[TierStats, ...] = ()


class TieredStore:
    """``KVStore`` of several stores: fast and small ones first, the home of all entries last.

    A read asks one tier after the other, each once for all that is still missing, and what is
    found goes to the faster tiers as well. Several threads that read one entry at once cause one
    read. A write goes to all tiers; each keeps within its own size.

    A tier that fails costs speed, never an answer: its entries are looked for in the next one, and
    computed where none has them. After ``failures`` in a row it is left alone, tried again every
    ``pause_s``, and told of once in the log. ``stats().tiers`` counts what happened.

    Args:
        tiers: stores, or what ``open_store`` takes. ``"memory:4GiB"`` holds copies in the memory
            of the host, page-locked where there is CUDA.
        write: ``"through"`` or ``"behind"``.
        queue_bytes: blocks that wait to be written behind, at most. ``put`` waits for room, for
            ``deadline_s`` at most, and drops the block then.
        deadline_s: seconds that a tier may take to answer a read.

    Raises:
        ValueError: no tiers, or an argument out of range.
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
            raise ValueError("expected at least one tier, found none")
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
        self._told_of_drops = False

    def __repr__(self) -> str:
        return f"TieredStore({', '.join(repr(tier.store) for tier in self._tiers)})"

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if no tier that answers has it.

        Raises:
            CorruptEntryError: the home's is damaged, and no other tier has it.
            FingerprintMismatchError: the home's is of another text or model, and so on.
        """
        (found,) = self.get_many([key])
        if isinstance(found, StoreError):
            raise found
        return found

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key; every tier is asked once."""
        most_s = self._deadline_s * (len(self._tiers) + 1)
        return self._flights.read(keys, self._read, most_s)

    def touch(self, key: str) -> bool:
        """Mark an entry as used now in every tier; True if the home has it, or will.

        Raises:
            StoreError: the home does not say.
        """
        self._touch_copies(key)
        if self._queue.pending(key) is not None and self.write == "behind":
            return True
        return self._home.ask(partial(touch, self._home.store, key))

    def claim(self, key: str, handles: Collection[str]) -> bool:
        """As ``store.claims.claim``, of the entry in the home.

        Raises:
            StoreError: the home does not answer, or cannot write the entry.
        """
        self._touch_copies(key)
        waiting = self._queue.pending(key) if self.write == "behind" else None
        if waiting is None:
            return self._home.ask(partial(claim, self._home.store, key, handles))
        if (kv := claimed(waiting, handles)).handle != waiting.handle:
            self.put(key, kv)
        return True

    def mark_used(self, key: str) -> None:
        """Mark an entry as used now in every tier that answers and records use."""
        for tier in self._tiers:
            if not isinstance(tier.store, ObjectStore):
                with suppress(StoreError):
                    tier.ask(partial(mark_used, tier.store, key))

    def put(self, key: str, kv: BlockKV) -> None:
        """Store an entry in all tiers, in the home at once or later (``write``).

        Raises:
            ValueError: as ``KVStore.put``.
            StoreError: the block holds NaN or infinity; or, with ``write="through"``, the home
                cannot store it, and faster tiers have it.
        """
        check_key_of(key, kv)
        check_storable(kv)
        check_finite(kv, f"to {self!r}")  # here, for no tier is to blame for it
        self._flights.forget(key)
        if self.write == "through":
            self._fill(key, kv, self._tiers[:-1])
            self._home.write(key, kv)
            return
        self._fill(key, kv, [tier for tier in self._tiers if tier.is_resident])
        others = [tier for tier in reversed(self._tiers) if not tier.is_resident]
        write = partial(self._write_to, others)
        if others and not self._queue.add(key, kv, write, self._deadline_s):
            self._note_drop(others)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str) and self._queue.pending(key) is not None:
            return True
        for tier in self._tiers[:-1]:
            with suppress(StoreError):
                if tier.ask(partial(operator.contains, tier.store, key)):
                    return True
        return self._home.ask(partial(operator.contains, self._home.store, key))

    def delete(self, key: str) -> bool:
        self._flights.forget(key)
        was_there = self._queue.discard(key)
        for tier in self._tiers[:-1]:
            with suppress(StoreError):
                was_there |= tier.ask(partial(tier.store.delete, key))
        return self._home.ask(partial(self._home.store.delete, key)) or was_there

    def keys(self) -> Iterator[str]:
        """Keys in the home. What waits to be written may be missing: see ``flush``."""
        return self._home.store.keys()

    def stats(self) -> TieredStats:
        """The home's figures, which may take it long to count, and ``tier_stats``."""
        home = self._home.store.stats()
        return TieredStats(
            home.entries, home.total_bytes, home.evictions, home.refused, self.tier_stats()
        )

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Figures of each tier, fastest first, without asking any."""
        return tuple(tier.stats() for tier in self._tiers)

    def flush(self, wait_s: float | None = None) -> bool:
        """Wait until all that waits is written, for ``wait_s`` at most; whether it is."""
        return self._queue.flush(wait_s)

    def close(self) -> None:
        """Write what waits. What is put afterwards goes to no tier that is written behind."""
        self._queue.close()

    def _read(self, keys: Sequence[str]) -> list[Found]:
        """What the tiers say. That one fails is no answer: the entry counts as absent."""
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

    def _touch_copies(self, key: str) -> None:
        for tier in self._tiers[:-1]:
            with suppress(StoreError):
                tier.ask(partial(touch, tier.store, key))

    def _fill(self, key: str, kv: BlockKV, tiers: Sequence[Tier]) -> None:
        """Write to faster tiers: to memory at once, to others when there is time."""
        self._write_to([tier for tier in tiers if tier.is_resident], key, kv)
        others = [tier for tier in tiers if not tier.is_resident]
        write = partial(self._write_to, others)
        if others and not self._queue.add(key, kv, write, unless_waiting=True):
            self._count_drop(others)

    def _write_to(self, tiers: Sequence[Tier], key: str, kv: BlockKV) -> None:
        for tier in tiers:
            try:
                tier.write(key, kv)
            except StoreError:  # counted; and told of when the breaker opens
                tier.count(dropped=1)
            except Exception as error:
                tier.count(dropped=1)
                logger.exception("%r could not store a block: %s", tier.store, error)

    def _count_drop(self, tiers: Sequence[Tier]) -> None:
        for tier in tiers:
            tier.count(dropped=1)

    def _note_drop(self, tiers: Sequence[Tier]) -> None:
        """Count a block that the home does not get, and tell of the first one."""
        self._count_drop(tiers)
        with self._lock:
            told, self._told_of_drops = self._told_of_drops, True
        if not told and self._queue.is_closed:
            logger.warning(
                "%r is closed, and takes no more blocks to be written behind: they are computed "
                "anew each time. Further ones are only counted (tier_stats())",
                self,
            )
        elif not told:
            logger.warning(
                "%r is written more slowly than blocks are computed: a block was not stored and "
                "is computed anew each time. Raise queue_bytes, or use write='through'. Further "
                "ones are only counted (tier_stats())",
                self,
            )


def mark_used(store: KVStore, key: str) -> None:
    """Mark an entry as used now, if the store records use.

    Raises:
        StoreError: as ``touch``.
    """
    if isinstance(store, TieredStore):
        store.mark_used(key)
    elif not isinstance(store, ObjectStore):  # it would be asked, far away, for nothing
        touch(store, key)


def _opened(tier: KVStore | str | Path) -> KVStore:
    if isinstance(tier, (str, Path)):
        return open_spec(tier, on_host=True)
    if isinstance(tier, KVStore):
        return tier
    raise TypeError(f"a tier must be a KVStore, an address or a path, found {type(tier).__name__}")
