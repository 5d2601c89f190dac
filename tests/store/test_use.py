"""Times of last use, deletion of unused entries, and file modes."""

from __future__ import annotations

import errno
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from blockattn_rag.store import DirectoryStore, files, gc
from tests.store.kvs import make_kv, same

DAY_NS = 86400 * 10**9
KV = make_kv()
KEY = KV.key


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A store of one entry that was last used a day ago."""
    store = DirectoryStore(tmp_path / "kv")
    store.put(KEY, KV)
    age(store, DAY_NS)
    return store


def age(store: DirectoryStore, by_ns: int) -> int:
    """Set the time of last use to ``by_ns`` ago. Returns that time."""
    used_ns = time.time_ns() - by_ns
    os.utime(store.entry_path(KEY), ns=(used_ns, used_ns))
    return used_ns


def used_ns(store: DirectoryStore) -> int:
    return store.entry_path(KEY).stat().st_mtime_ns


# Times of use


def test_reads_count_once_a_minute(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than this test can take on any machine.
    monkeypatch.setattr("blockattn_rag.store.directory._MARK_READ_S", 3600.0)
    before = time.time_ns()
    store.get(KEY)
    marked = used_ns(store)
    assert marked >= before
    store.get(KEY)
    assert used_ns(store) == marked
    long_ago = age(store, 3601 * 10**9)
    store.get(KEY)
    assert used_ns(store) > long_ago


def test_listing_and_peek_record_no_use(store: DirectoryStore) -> None:
    before = used_ns(store)
    assert KEY in store
    store.describe(KEY)
    list(store.entries())
    assert same(store.peek(KEY), KV)
    assert used_ns(store) == before


def test_touch_records_a_use(store: DirectoryStore) -> None:
    before = time.time_ns()
    assert store.touch(KEY)
    assert used_ns(store) >= before
    second_ago = age(store, 2 * 10**9)
    assert store.touch(KEY)
    assert used_ns(store) > second_ago


def test_use_corrects_a_time_in_the_future(store: DirectoryStore) -> None:
    age(store, -DAY_NS)
    store.get(KEY)
    assert used_ns(store) <= time.time_ns()


@pytest.mark.parametrize("error", [errno.EROFS, errno.EPERM, errno.EACCES])
def test_a_store_without_write_access_can_be_read(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(os, "utime", Mock(side_effect=OSError(error, os.strerror(error))))
    assert same(store.get(KEY), KV)
    assert store.touch(KEY)


# Deletion of unused entries


@pytest.mark.parametrize("how", ["touch", "get", "put"])
def test_a_use_during_gc_protects_an_entry(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    describe = DirectoryStore.describe
    arguments = (KEY, KV) if how == "put" else (KEY,)

    def use_then(self: DirectoryStore, key: str) -> object:
        info = describe(self, key)
        getattr(store, how)(*arguments)
        return info

    monkeypatch.setattr(DirectoryStore, "describe", use_then)
    report = gc(store, set(), grace_s=3600, force=True)
    assert (report.deleted.count, report.errors.count) == (0, 0)
    assert same(store.get(KEY), KV)
    assert not list(store.leftovers())


def test_late_touch_is_refused(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is deleted for its age after the file was opened, but before it is marked."""
    mark_used = files.mark_used

    def delete_first(descriptor: int, at_most_every_s: float = 0.0) -> None:
        assert store.discard(KEY, used_ns(store))
        mark_used(descriptor, at_most_every_s)

    monkeypatch.setattr("blockattn_rag.store.files.mark_used", delete_first)
    assert not store.touch(KEY)


def test_touched_entry_survives_concurrent_discard(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fsync=False)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(150):
            store.put(KEY, KV)
            discarded = pool.submit(store.discard, KEY, age(store, DAY_NS))
            touched = store.touch(KEY)
            discarded.result()
            assert KEY in store or not touched
    assert not list(store.leftovers())


# File modes


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_ignore_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    modes: set[int] = set()
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        modes.add(stat.S_IMODE(source.stat().st_mode))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    before = os.umask(umask)
    try:
        store = DirectoryStore(tmp_path / "new" / "kv")
        store.put(KEY, KV)
        store.sidecar.write("index/namespace/file", b"")
    finally:
        os.umask(before)
    assert modes == {0o600}  # temporary files
    for path in [store.path.parent, *store.path.parent.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert {path.name for path in store.path.iterdir()} == {"format.json", "objects", "sidecar"}


def test_existing_files_keep_their_mode(store: DirectoryStore) -> None:
    path = store.entry_path(KEY)
    folders = (store.path, store.path / "objects", path.parent)
    kept = {path: 0o644, store.path / "format.json": 0o644, **dict.fromkeys(folders, 0o755)}
    for place, mode in kept.items():
        place.chmod(mode)
    again = DirectoryStore(store.path)
    again.get(KEY)
    other = make_kv("other")
    again.put(other.key, other)
    assert {place: stat.S_IMODE(place.stat().st_mode) for place in kept} == kept
    assert stat.S_IMODE(again.entry_path(other.key).stat().st_mode) == 0o600
