"""``verify`` and ``gc`` of stores on disk and in buckets."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import (
    DirectoryStore,
    MaintainedStore,
    ObjectStore,
    describe_all,
    gc,
    verify,
)
from tests.store.conftest import Raw, objects_in_memory
from tests.store.kvs import make_kv

DAY_S = 86400.0
MANY = [make_kv(f"passage {i}") for i in range(12)]
KV = MANY[:4]
KEYS = [kv.key for kv in KV]
HANDLES = [kv.handle for kv in KV]
OTHERS = {"0" * 32}  # live handles that match no block in these stores
TENANTS = ["a", "a/private", "ab", "b"]


@pytest.fixture
def new(maintained: Raw[MaintainedStore]) -> Raw[MaintainedStore]:
    """A store of twelve new entries, on disk or in a bucket."""
    for kv in MANY:
        maintained.store.put(kv.key, kv)
    return maintained


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A store of four entries that are a day old."""
    store = DirectoryStore(tmp_path)
    for key, kv in zip(KEYS, KV, strict=True):
        store.put(key, kv)
        make_old(store.entry_path(key))
    return store


def make_old(path: Path) -> None:
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - DAY_S))


def leftover(folder: Path, name: str = "x") -> Path:
    """Create the temporary file of a writer that was killed a day ago."""
    path = folder / f".{name}.0123456789abcdef.tmp"
    path.write_bytes(b"half")
    make_old(path)
    return path


def damage(store: DirectoryStore, key: str) -> None:
    path = store.entry_path(key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_verify_reports_and_deletes_damage(new: Raw[MaintainedStore]) -> None:
    store, found, seen = new.store, list[str](), list[int]()
    report = verify(store, seen.append)
    assert (report.ok, report.deleted) == (12, 0)
    assert [t.count for t in (report.damaged, report.unread, report.leftovers)] == [0, 0, 0]
    assert report.total_bytes == store.stats().total_bytes
    assert seen == list(range(1, 13))
    new.flip_last_bit(KEYS[3])
    report = verify(store, on_damage=lambda key, why: found.append(f"{key}: {why}"))
    assert (report.ok, report.damaged.count, report.unread.count) == (11, 1, 0)
    assert list(report.damaged.first) == [KEYS[3]]
    assert len(found) == 1
    assert "checksum" in found[0]
    assert verify(store, delete_damaged=True).deleted == 1
    assert sorted(store.keys()) == sorted(kv.key for kv in MANY if kv.key != KEYS[3])


def test_samples_cover_all_entries(new: Raw[MaintainedStore]) -> None:
    store = new.store
    new.flip_last_bit(KEYS[0])
    reports = [verify(store, sample=0.25, seed=seed) for seed in range(4)]
    assert sum(report.ok + report.damaged.count for report in reports) == 12
    assert sum(report.damaged.count for report in reports) == 1
    assert all(report.skipped == 12 - report.ok - report.damaged.count for report in reports)
    assert sum(report.skipped for report in reports) == 36
    again = verify(store, sample=0.25, seed=5)
    assert again == reports[1]


@pytest.mark.parametrize("sample", [0.0, -0.5, 1.5, float("nan")])
def test_invalid_sample_is_refused(sample: float) -> None:
    with pytest.raises(ValueError, match="more than 0 and at most 1"):
        verify(objects_in_memory(), sample=sample)


def test_verify_names_foreign_entries_and_leftovers(store: DirectoryStore) -> None:
    damage(store, KEYS[0])
    os.replace(store.entry_path(KEYS[1]), store.entry_path(KEYS[2]))
    path = leftover(store.entry_path(KEYS[3]).parent)
    report = verify(store)
    assert report.ok == 1
    assert set(report.damaged.first) == {KEYS[0], KEYS[2]}
    assert "checksum" in report.damaged.first[KEYS[0]]
    assert "another text, model or tenant" in report.damaged.first[KEYS[2]]
    assert list(report.leftovers.first) == [str(path)]
    assert store.stats().entries == 3


def test_verify_keeps_new_entry(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(store, KEYS[0])
    peek = DirectoryStore.peek

    def mend_then(self: DirectoryStore, key: str) -> BlockKV | None:
        try:
            return peek(self, key)
        finally:
            if key == KEYS[0]:
                store.put(key, KV[0])

    monkeypatch.setattr(DirectoryStore, "peek", mend_then)
    report = verify(store, delete_damaged=True)
    assert (list(report.damaged.first), report.deleted) == ([KEYS[0]], 0)
    monkeypatch.undo()
    assert verify(store).ok == 4


def test_verify_survives_errors(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS[:2]:
        damage(store, key)
    discard = DirectoryStore.discard

    def refuse(self: DirectoryStore, key: str, used_ns: int) -> bool | None:
        if key == min(KEYS[:2]):
            raise StoreError("cannot delete it")
        return discard(self, key, used_ns)

    monkeypatch.setattr(DirectoryStore, "discard", refuse)
    report = verify(store, delete_damaged=True)
    assert (report.ok, report.deleted) == (2, 1)
    assert report.errors.first == {min(KEYS[:2]): "cannot delete it"}


def test_verify_and_gc_continue_after_odd_files(store: DirectoryStore) -> None:
    pipe, loop, folder, sound = (store.entry_path(key) for key in KEYS)
    for path in (pipe, loop, folder):
        path.unlink()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    folder.mkdir()
    report = verify(store, delete_damaged=True)
    assert (report.ok, list(report.damaged.first), report.deleted) == (1, [KEYS[0]], 1)
    assert set(report.unread.first) == {KEYS[1], KEYS[2]}
    assert not pipe.exists()
    collected = gc(store, OTHERS)
    assert list(collected.deleted.first) == [sound.stem]
    assert collected.errors.count == 2


def test_future_modification_time_does_not_protect(store: DirectoryStore) -> None:
    path = leftover(store.path)
    for odd in (path, store.entry_path(KEYS[0])):
        os.utime(odd, (4e9, 4e9))
    seconds_ahead = time.time() + 20  # like a clock difference between machines
    os.utime(store.entry_path(KEYS[1]), (seconds_ahead, seconds_ahead))
    report = gc(store, set(HANDLES[2:]))
    assert (list(report.deleted.first), report.kept_young) == ([KEYS[0]], 1)
    assert list(report.leftovers.first) == [str(path)]


def test_gc_deletes_unreferenced_entries(new: Raw[MaintainedStore]) -> None:
    store = new.store
    live = {kv.handle for kv in MANY[:5]}
    young, seen = gc(store, live), list[int]()
    assert (young.kept, young.kept_young, young.deleted.count) == (5, 7, 0)
    told = gc(store, live, grace_s=0, dry_run=True)
    assert (told.deleted.count, len(list(store.keys()))) == (7, 12)
    done = gc(store, live, seen.append, grace_s=0)
    assert (done.deleted, done.freed_bytes) == (told.deleted, told.freed_bytes)
    assert sorted(done.deleted.first) == sorted(kv.key for kv in MANY[5:])
    assert seen == list(range(1, 13))
    assert sorted(store.keys()) == sorted(kv.key for kv in MANY[:5])


def test_gc_refuses_an_empty_set_unless_forced(new: Raw[MaintainedStore]) -> None:
    store = new.store
    for empty in (set[str](), frozenset[str](), list[str]()):
        with pytest.raises(ValueError, match=r"live_handles is empty, .*force=True"):
            gc(store, empty, grace_s=0)
    assert gc(store, None, grace_s=0).kept == len(list(store.keys())) == 12
    assert gc(store, set(), grace_s=0, force=True).deleted.count == 12


def test_gc_ignores_other_namespaces(store: DirectoryStore) -> None:
    others = [make_kv(f"passage {n}", namespace=name) for n, name in enumerate(TENANTS)]
    for one in others:
        store.put(one.key, one)
    report = gc(store, OTHERS, grace_s=0, namespaces={"a"})
    assert set(report.deleted.first) == {others[0].key, others[1].key}
    assert (report.other, report.deleted.count) == (4 + 2, 2)
    assert gc(store, OTHERS, grace_s=0, namespaces={""}).deleted.count == 4
    assert gc(store, OTHERS, grace_s=0).deleted.count == 2


def test_entries_without_a_handle_expire_by_ttl(store: DirectoryStore) -> None:
    unnamed = replace(make_kv("of a server"), handle="")
    store.put(unnamed.key, unnamed)
    make_old(store.entry_path(unnamed.key))
    assert (gc(store, OTHERS).kept, list(store.keys())) == (1, [unnamed.key])
    assert gc(store, OTHERS, ttl_s=2 * DAY_S).kept == 1
    assert gc(store, OTHERS, ttl_s=DAY_S / 2).deleted.count == 1


def test_gc_removes_old_leftovers_and_leaves_new_ones(store: DirectoryStore) -> None:
    shard = store.entry_path(KEYS[0]).parent
    old, new = leftover(shard, "old"), leftover(shard, "new")
    os.utime(new)
    told = gc(store, set(HANDLES), dry_run=True)
    assert set(store.leftovers()) == {old, new}
    report = gc(store, set(HANDLES))
    assert told == replace(report, dry_run=True)
    assert list(report.leftovers.first) == [str(old)]
    assert report.freed_bytes == len(b"half")
    assert list(store.leftovers()) == [new]


def test_gc_survives_errors(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old = leftover(store.path)
    rename, unlink = os.rename, Path.unlink

    def refuse_entry(source: Path, target: Path) -> None:
        if KEYS[0] in source.name:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    def refuse_leftover(path: Path, missing_ok: bool = False) -> None:
        if path == old:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "rename", refuse_entry)
    monkeypatch.setattr(Path, "unlink", refuse_leftover)
    report = gc(store, OTHERS)
    assert sorted(report.deleted.first) == sorted(KEYS[1:])
    assert not report.leftovers
    assert [error.split(":")[0] for error in report.errors.first.values()] == [
        f"Cannot delete {store.entry_path(KEYS[0])}",
        f"Cannot delete {old}",
    ]


def test_gc_ignores_vanished_entry(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    discard = DirectoryStore.discard

    def vanish(self: DirectoryStore, key: str, used_ns: int) -> bool | None:
        self.delete(key)
        return discard(self, key, used_ns)

    monkeypatch.setattr(DirectoryStore, "discard", vanish)
    report = gc(store, OTHERS)
    assert (report.deleted.count, report.errors.count) == (0, 0)


def test_listing_error_is_raised(store: DirectoryStore) -> None:
    (store.path / "objects" / "00").touch()
    for look in (verify, lambda store: gc(store, OTHERS)):
        with pytest.raises(StoreError, match="Cannot list"):
            look(store)


def test_expired_entries_are_deleted_even_if_referenced(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for age_days, kv in enumerate(KV[:4]):
        store.put(kv.key, kv)
        used = time.time() - age_days * 86400
        os.utime(store.entry_path(kv.key), (used, used))
    live = {kv.handle for kv in KV[:3]}
    report = gc(store, live, ttl_s=1.5 * 86400)
    assert (report.kept, report.deleted.count, report.expired) == (2, 2, 1)
    assert report.deleted.first[KV[2].key] == "not used for ttl_s"
    by_age = gc(store, None, ttl_s=0.5 * 86400)
    assert (by_age.kept, list(by_age.deleted.first)) == (1, [KV[1].key])


def test_ttl_shorter_than_grace_period_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than the grace period"):
        gc(objects_in_memory(), OTHERS, ttl_s=60)


def test_entries_are_read_lazily_and_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the first entries of an endless listing, which must be read concurrently."""
    store, waiting, listed = objects_in_memory(), threading.Barrier(8, timeout=10), list[str]()

    def endless(_self: ObjectStore):  # type: ignore[no-untyped-def]
        while True:
            listed.append(KV[0].key)
            yield KV[0].key

    def slow(_self: ObjectStore, _key: str) -> None:
        waiting.wait()

    monkeypatch.setattr(ObjectStore, "keys", endless)
    monkeypatch.setattr(ObjectStore, "describe", slow)
    entries = describe_all(store)
    assert [next(entries)[1] for _ in range(8)] == [None] * 8
    waiting.abort()
    assert len(listed) <= 50
