"""Pinned entries survive every eviction, and expired ones go first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import (
    DirectoryStore,
    KVStore,
    MemoryStore,
    RedisStore,
    TieredStore,
    gc,
    shrink,
)
from blockattn_rag.store.retention import expire, keep_forever, pin, retention, unpin
from tests.store.conftest import objects_in_memory
from tests.store.kvs import make_kv

KVS = [make_kv(f"passage {n}", tokens=8) for n in range(6)]
KEYS = [kv.key for kv in KVS]


def fill(store: KVStore, kvs: list[BlockKV] = KVS) -> None:
    for kv in kvs:
        store.put(kv.key, kv)


def test_a_size_limit_keeps_pinned_entries(tmp_path: Path) -> None:
    fill(DirectoryStore(tmp_path), KVS[:1])
    nbytes = DirectoryStore(tmp_path).stats().total_bytes
    store = DirectoryStore(tmp_path, max_bytes=3 * nbytes)
    pin(store, KEYS[:1])
    fill(store, KVS[1:])
    assert sorted(store.keys()) == sorted([KEYS[0], *KEYS[4:]])
    assert unpin(store, KEYS) == 1
    fill(store, KVS[1:4])
    assert KEYS[0] not in store


def test_a_store_in_memory_keeps_pinned_entries() -> None:
    store = MemoryStore(3 * KVS[0].nbytes)
    fill(store, KVS[:1])
    pin(store, KEYS[:1])
    fill(store, KVS[1:])
    assert [*store.keys()] == [KEYS[0], *KEYS[4:]]
    pin(store, KEYS[4:])
    fill(store, KVS[1:2])  # no room beside pinned entries
    assert [*store.keys()] == [KEYS[0], *KEYS[4:]]
    assert store.stats().refused == 1


def test_shrink_keeps_pinned_entries(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    fill(store)
    pin(store, KEYS[:2])
    shrink(store, 1)
    assert sorted(store.keys()) == sorted(KEYS[:2])


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_gc_keeps_pinned_entries(kind: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path) if kind == "folder" else objects_in_memory()
    fill(store)
    pin(store, KEYS[:2])
    pin(store, KEYS[2:3], until_s=time.time() - 1)  # has ended
    report = gc(store, set(), grace_s=0, ttl_s=0)
    assert (report.kept, report.deleted.count) == (2, 4)
    assert sorted(store.keys()) == sorted(KEYS[:2])


def test_a_later_pin_replaces_an_earlier_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    fill(store)
    pin(store, KEYS[:2])
    pin(store, KEYS[:1], until_s=time.time() + 0.9)
    assert retention(DirectoryStore(tmp_path)).pinned <= set(KEYS[:2])
    pin(store, KEYS[:1], until_s=1)
    assert retention(store).pinned == {KEYS[1]}
    assert unpin(store, KEYS) == 2
    assert retention(store).pinned == set()


def test_pins_of_tiers_are_those_of_the_home(tmp_path: Path) -> None:
    home = DirectoryStore(tmp_path)
    with TieredStore(MemoryStore(1 << 20), home) as store:
        fill(store)
        pin(store, KEYS[:1])
        gc(home, set(), grace_s=0)
        assert [*home.keys()] == KEYS[:1]


def test_a_cache_keeps_no_pins() -> None:
    pytest.importorskip("redis")
    with pytest.raises(ValueError, match="cannot keep pins and times to live: it is a cache"):
        pin(RedisStore("redis://127.0.0.1:9/0"), KEYS)


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_gc_deletes_expired_entries_even_if_they_are_in_use(kind: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path) if kind == "folder" else objects_in_memory()
    fill(store)
    past = time.time() - 1
    expire(store, KEYS[:3], past)
    expire(store, KEYS[3:4], time.time() + 60)
    pin(store, KEYS[:1])
    assert keep_forever(store, KEYS[1:2]) == 1
    live = {kv.handle for kv in KVS}
    assert gc(store, live, dry_run=True).deleted.first == {KEYS[2]: "its time to live has ended"}
    report = gc(store, live)
    assert (report.kept, report.expired) == (5, 1)
    assert sorted(store.keys()) == sorted([*KEYS[:2], *KEYS[3:]])


def test_an_expired_entry_is_used_until_it_is_deleted_and_may_return(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    fill(store)
    expire(store, KEYS[:1], time.time() - 1)
    assert store.get(KEYS[0]) is not None
    gc(store, None)
    assert store.get(KEYS[0]) is None
    fill(store, KVS[:1])
    assert gc(store, None).expired == 0
    assert KEYS[0] in store


def test_expired_entries_make_room_first(tmp_path: Path) -> None:
    fill(DirectoryStore(tmp_path / "one"), KVS[:1])
    nbytes = DirectoryStore(tmp_path / "one").stats().total_bytes
    limited = DirectoryStore(tmp_path / "limited", max_bytes=3 * nbytes)
    memory = MemoryStore(3 * KVS[0].nbytes)
    for store in (limited, memory):
        fill(store, KVS[:3])
        expire(store, KEYS[2:3], time.time() - 1)
        fill(store, KVS[3:4])
        assert sorted(store.keys()) == sorted([*KEYS[:2], KEYS[3]])
        fill(store, KVS[2:3])  # returns without a time to live
        assert retention(store).expired == set()
        store.delete(KEYS[2])
        fill(store, KVS[:2])
    shrunk = DirectoryStore(tmp_path / "limited")
    expire(shrunk, KEYS[3:4], time.time() - 1)
    assert shrink(shrunk, 2 * nbytes).deleted == (KEYS[3],)


def test_an_interrupted_extension_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    fill(store)
    expire(store, KEYS[:1], time.time() - 1)
    monkeypatch.setattr(type(store.sidecar), "delete", lambda *_: None)
    expire(store, KEYS[:1], time.time() + 60)
    assert retention(store).expired == set()


def test_gc_keeps_a_time_to_live_that_was_set_meanwhile(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    fill(store)
    expire(store, KEYS[:1], time.time() - 1)

    def sets_another(key: str) -> None:
        expire(store, [key], time.time() + 60)

    assert gc(store, None, deleted=sets_another).expired == 1
    assert keep_forever(store, KEYS[:1]) == 1


def test_gc_reports_undeletable_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    fill(store)
    expire(store, KEYS[:1], time.time() - 1)

    def fails(*_: object) -> None:
        raise StoreError("cannot delete the mark")

    monkeypatch.setattr(type(store.sidecar), "delete", fails)
    report = gc(store, None)
    assert (report.expired, report.errors.first) == (1, {"times to live": "cannot delete the mark"})
