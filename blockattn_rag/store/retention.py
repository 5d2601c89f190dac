"""Pins and times to live of entries, and the decision which entries ``gc`` deletes.

Pins and times to live are marks: empty files beside the entries (``KVStore.sidecar``), named after
a key and a time, so one listing reads all marks of a kind. Size limits and ``shrink`` honour them,
too. A pinned entry is not deleted. An expired entry that is not pinned is deleted by the next
``gc``, and before all others if a store makes room. Until then it is used like any other. Its mark
is deleted with it; an entry that is deleted earlier and stored again keeps its time to live.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Container, Iterator
from typing import Literal, NamedTuple

from blockattn_rag.store.base import EntryInfo, KVStore, Sidecar
from blockattn_rag.store.checks import is_key
from blockattn_rag.store.namespaces import is_of

_PINS, _EXPIRIES = "pins-1", "expiries-1"  # with the version of the format
_NEVER = 0


class Retention(NamedTuple):
    """Keys of the entries of a store that are pinned, and of those that have expired and are not
    pinned."""

    pinned: frozenset[str]
    expired: frozenset[str]


class Judgement(NamedTuple):
    """Decision of ``GarbageRule`` on an entry.

    Args:
        outcome: ``other``: it belongs to another namespace. ``kept``: it is referenced or pinned.
            ``young``: it was used within the grace period. ``expired``: it is referenced, but
            to be deleted. ``dead``: it is unreferenced, and to be deleted.
        reason: Why it is to be deleted. Empty if it is not.
    """

    outcome: Literal["other", "kept", "young", "expired", "dead"]
    reason: str = ""


class GarbageRule(NamedTuple):
    """Decides which entries ``gc`` deletes.

    Args:
        marks: Pins and times to live.
        live_handles, grace_s, ttl_s, namespaces: See ``maintenance.gc``.
    """

    marks: Retention
    live_handles: Container[str] | None
    grace_s: float
    ttl_s: float | None
    namespaces: Collection[str] | None

    def judge(self, key: str, info: EntryInfo) -> Judgement:
        """Judge the entry of a key."""
        if self.namespaces is not None and not is_of(info.header.namespace, self.namespaces):
            return Judgement("other")
        live, named = self.live_handles, info.handles  # none for entries that a server encoded
        is_live = live is None or not named or any(one in live for one in named)
        is_unused = self.ttl_s is not None and info.age_s >= self.ttl_s
        has_expired = key in self.marks.expired
        if key in self.marks.pinned or (is_live and not is_unused and not has_expired):
            return Judgement("kept")
        if info.age_s < self.grace_s and not has_expired:
            return Judgement("young")
        reason = "nothing refers to it"
        if has_expired or is_unused:
            reason = "its time to live has ended" if has_expired else "not used for ttl_s"
        return Judgement("expired" if is_live else "dead", reason)


def retention(store: KVStore) -> Retention:
    """Read the marks of a store: two listings."""
    if store.sidecar is None:
        return Retention(frozenset(), frozenset())
    now_s = time.time()
    pins = {key for key, end_s in _ends(store.sidecar, _PINS).items() if end_s > now_s}
    expired = {key for key, end_s in _ends(store.sidecar, _EXPIRIES).items() if end_s <= now_s}
    return Retention(frozenset(pins), frozenset(expired - pins))


def pin(store: KVStore, keys: Collection[str], until_s: float | None = None) -> None:
    """Keep entries until they are unpinned.

    Args:
        until_s: Time at which the pins end, in seconds since 1970. None: never.

    Raises:
        StoreError: A pin cannot be written.
        ValueError: The store cannot keep pins.
    """
    _mark(_sidecar(store), _PINS, keys, _NEVER if until_s is None else int(until_s))


def unpin(store: KVStore, keys: Collection[str]) -> int:
    """Remove pins. Returns the number of entries that were pinned."""
    return _unmark(_sidecar(store), _PINS, keys)


def expire(store: KVStore, keys: Collection[str], at_s: float) -> None:
    """Let entries expire at a time, in seconds since 1970, even if passages refer to them.

    Raises:
        StoreError: A mark cannot be written.
        ValueError: The store cannot keep times to live.
    """
    _mark(_sidecar(store), _EXPIRIES, keys, max(1, int(at_s)))


def keep_forever(store: KVStore, keys: Collection[str]) -> int:
    """Undo ``expire``. Returns the number of entries that had a time to live."""
    return _unmark(_sidecar(store), _EXPIRIES, keys)


def forget_expired(store: KVStore, keys: Collection[str]) -> None:
    """Delete the marks of expired entries that were deleted. A time to live that has not ended is
    kept."""
    now_s, wanted = time.time(), set(keys)
    if wanted and (sidecar := store.sidecar) is not None:
        for name, key, end_s in [*_marks(sidecar, _EXPIRIES)]:
            if key in wanted and end_s <= now_s:
                sidecar.delete(f"{_EXPIRIES}/{name}")


def _ends(sidecar: Sidecar, folder: str) -> dict[str, float]:
    """Latest end of the marks of each key: an extension may be interrupted between its two steps,
    the new mark and the deletion of the old one."""
    ends: dict[str, float] = {}
    for _, key, end_s in _marks(sidecar, folder):
        ends[key] = max(ends.get(key, 0.0), math.inf if end_s == _NEVER else end_s)
    return ends


def _mark(sidecar: Sidecar, folder: str, keys: Collection[str], end_s: int) -> None:
    """Write the marks of entries, and delete their earlier ones."""
    wanted, old = set(keys), [*_marks(sidecar, folder)]
    new = {f"{key}-{end_s}" for key in wanted}
    for name in new:
        sidecar.write(f"{folder}/{name}", b"\n")
    for name, key, _ in old:
        if key in wanted and name not in new:
            sidecar.delete(f"{folder}/{name}")


def _unmark(sidecar: Sidecar, folder: str, keys: Collection[str]) -> int:
    wanted = set(keys)
    found = [(name, key) for name, key, _ in _marks(sidecar, folder) if key in wanted]
    for name, _ in found:
        sidecar.delete(f"{folder}/{name}")
    return len({key for _, key in found})


def _marks(sidecar: Sidecar, folder: str) -> Iterator[tuple[str, str, int]]:
    """Name, key and time of each mark of a kind."""
    for name in sidecar.names(folder):
        key, _, end_s = name.partition("-")
        if is_key(key) and end_s.isdecimal():
            yield name, key, int(end_s)


def _sidecar(store: KVStore) -> Sidecar:
    if store.sidecar is None:
        raise ValueError(
            f"{store!r} cannot keep pins and times to live: it is a cache. Use the store behind it"
        )
    return store.sidecar
