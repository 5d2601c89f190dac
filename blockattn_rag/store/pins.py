"""Pinned entries, which no eviction deletes: size limits, ``gc`` and ``shrink``.

A pin is an empty file beside the entries (``store.sidecar``), named after the key and the time at
which it ends, so one listing reads all pins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from functools import cache

from blockattn_rag.store.base import KVStore, is_key
from blockattn_rag.store.sidecar import Sidecar

_FOLDER = "pins-1"  # with the version of the format
_FOREVER = 0


def pin(store: KVStore, keys: Collection[str], until_s: float | None = None) -> None:
    """Keep entries until they are unpinned.

    Args:
        until_s: Time at which the pins end, in seconds since 1970. None: never.

    Raises:
        StoreError: A pin cannot be written.
        ValueError: The store cannot keep pins.
    """
    sidecar, until = _sidecar(store), _FOREVER if until_s is None else int(until_s)
    old = [name for name, key, _ in _pins(sidecar) if key in set(keys)]
    new = [f"{key}-{until}" for key in keys]
    for name in new:
        sidecar.write(f"{_FOLDER}/{name}", b"\n")
    for name in set(old) - set(new):
        sidecar.delete(f"{_FOLDER}/{name}")


def unpin(store: KVStore, keys: Collection[str]) -> int:
    """Remove pins. Returns the number of entries that were pinned."""
    sidecar, wanted = _sidecar(store), set(keys)
    found = [(name, key) for name, key, _ in _pins(sidecar) if key in wanted]
    for name, _ in found:
        sidecar.delete(f"{_FOLDER}/{name}")
    return len({key for _, key in found})


def pinned(store: KVStore) -> set[str]:
    """Keys of the entries that are pinned now. Reads one listing."""
    if store.sidecar is None:
        return set()
    now_s = time.time()
    return {key for _, key, until in _pins(store.sidecar) if until == _FOREVER or until > now_s}


def unless_pinned(
    store: KVStore, remove: Callable[[str, int], bool | None]
) -> Callable[[str, int], bool | None]:
    """A ``files.Remove`` that keeps pinned entries. Reads the pins at its first call."""
    pins = cache(lambda: pinned(store))
    return lambda key, used_ns: False if key in pins() else remove(key, used_ns)


def _pins(sidecar: Sidecar) -> Iterator[tuple[str, str, int]]:
    """Name, key and end of each pin."""
    for name in sidecar.names(_FOLDER):
        key, _, until = name.partition("-")
        if is_key(key) and until.isdecimal():
            yield name, key, int(until)


def _sidecar(store: KVStore) -> Sidecar:
    if store.sidecar is None:
        raise ValueError(
            f"{store!r} cannot keep pins: it is a cache. Pin entries in the store behind it"
        )
    return store.sidecar
