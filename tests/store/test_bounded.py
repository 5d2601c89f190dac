"""Stores with a size limit, in memory and on disk, evict the least recently used entries."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, MemoryStore, StoredEntry, shrink, verify
from blockattn_rag.store.format import encode
from blockattn_rag.store.memory import host_copy
from tests.processes import PROCESSES
from tests.store.kvs import call_at_random, make_kv, same
from tests.store.writers import fill_bounded

KV = [make_kv(f"passage {i}") for i in range(6)]
KEYS = [kv.key for kv in KV]
BIG = make_kv("big", tokens=30)
MINUTE_NS = 60 * 10**9

Bounded = MemoryStore | DirectoryStore
KINDS: list[type[Bounded]] = [MemoryStore, DirectoryStore]


def size_of(kind: type[Bounded], kv: BlockKV = KV[0]) -> int:
    """Return the size of a block in a store."""
    return kv.nbytes if kind is MemoryStore else len(encode(kv))


SIZE = size_of(DirectoryStore)


def bounded(kind: type[Bounded], path: Path, entries: int) -> Bounded:
    max_bytes = entries * size_of(kind)
    if kind is MemoryStore:
        return MemoryStore(max_bytes)
    return DirectoryStore(path, fsync=False, max_bytes=max_bytes)


def put(store: Bounded, *numbers: int) -> None:
    for number in numbers:
        store.put(KEYS[number], KV[number])


def held(store: Bounded) -> list[int]:
    """Return the numbers of the entries, least recently used first."""
    if isinstance(store, MemoryStore):
        return [KEYS.index(key) for key in store.keys()]  # noqa: SIM118 - a store is no dict
    entries = sorted(store.entries(), key=lambda entry: entry.used_ns)
    return [KEYS.index(entry.key) for entry in entries]


def grow_old(store: Bounded) -> None:
    """Age entries on disk by two minutes, because uses are recorded at most once a minute."""
    if isinstance(store, DirectoryStore):
        for entry in store.entries():
            used_ns = entry.used_ns - 2 * MINUTE_NS
            os.utime(store.entry_path(entry.key), ns=(used_ns, used_ns))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> type[Bounded]:
    found: type[Bounded] = request.param
    return found


def test_large_block_replaces_several(kind: type[Bounded], tmp_path: Path) -> None:
    most = max(size_of(kind, BIG), 3 * size_of(kind))
    store = kind(most) if kind is MemoryStore else DirectoryStore(tmp_path, max_bytes=most)
    put(store, 0, 1, 2)
    store.put(BIG.key, BIG)
    assert BIG.key in store
    assert store.stats().total_bytes <= most


def test_oversized_block_is_refused_counted_and_logged_once(
    kind: type[Bounded], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = bounded(kind, tmp_path, 1)
    put(store, 0)
    with caplog.at_level(logging.WARNING):
        store.put(BIG.key, BIG)
        store.put(BIG.key, BIG)
    assert store.get(BIG.key) is None
    assert (store.stats().entries, store.stats().refused) == (1, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "raise max_bytes" in caplog.text


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_max_bytes_must_be_positive(kind: type[Bounded], tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be positive, found"):
        bounded(kind, tmp_path / "kv", max_bytes)
    assert not (tmp_path / "kv").exists()


def test_threads_stay_within_the_limit(kind: type[Bounded], tmp_path: Path) -> None:
    store = bounded(kind, tmp_path, 3)

    with ThreadPoolExecutor(4) as pool:
        for seed in range(0, 16, 4):
            list(pool.map(partial(call_at_random, store, KV), range(seed, seed + 4)))
            # Checked after the writers, because a listing may count files being deleted.
            stats = store.stats()
            assert stats.total_bytes == stats.entries * size_of(kind) <= 3 * size_of(kind)
    if isinstance(store, DirectoryStore):
        assert not verify(store).damaged
        assert not list(store.leftovers())


STEPS = st.lists(st.tuples(st.sampled_from("gptd"), st.integers(0, 5)), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 5), STEPS)
@settings(deadline=None, max_examples=60)
def test_store_evicts_like_an_lru_list(
    kind: type[Bounded], room: int, steps: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as path:
        store, expected, evictions = bounded(kind, Path(path), room), list[int](), 0
        for step, i in steps:
            grow_old(store)
            known = i in expected
            if step == "g":
                assert (store.get(KEYS[i]) is not None) == known
            elif step == "t":
                assert store.touch(KEYS[i]) == known
            elif step == "d":
                assert store.delete(KEYS[i]) == known
            else:
                put(store, i)
            if known:
                expected.remove(i)
            if step == "p" or (step in "gt" and known):
                expected.append(i)
            if len(expected) > room:
                expected.pop(0)
                evictions += 1
            assert held(store) == expected
            assert all((key in store) == (n in expected) for n, key in enumerate(KEYS))
            assert store.stats().total_bytes == len(expected) * size_of(kind)
        assert store.stats().evictions == evictions


# In memory


def test_a_store_in_host_memory_keeps_copies() -> None:
    for kv in (make_kv(), make_kv(quantized=True)):
        store, host = MemoryStore(1 << 20), MemoryStore(1 << 20, on_host=True)
        for one in (store, host):
            one.put(kv.key, kv)
        assert store.get(kv.key) is kv
        copy = host.get(kv.key)
        assert copy is not None
        assert same(copy, kv)
        given = {t.data_ptr() for layer in range(kv.num_layers) for t in kv.tensors(layer)}
        own = {t.data_ptr() for layer in range(kv.num_layers) for t in copy.tensors(layer)}
        assert not given & own


def test_host_memory_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[torch.Tensor] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    kv = make_kv(layers=3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert same(host_copy(kv), kv)
    assert len(locked) == 6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert same(host_copy(kv), kv)
    assert len(locked) == 6


# On disk


def on_disk(path: Path, entries: int) -> DirectoryStore:
    return DirectoryStore(path, fsync=False, max_bytes=entries * SIZE)


def test_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), 0, 1, 2)
    store = DirectoryStore(tmp_path)
    grow_old(store)
    store.get(KEYS[0])
    put(on_disk(tmp_path, 3), 3)
    assert held(store) == [2, 0, 3]


def test_put_shrinks_an_oversized_store(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), 0, 1, 2, 3)
    store = on_disk(tmp_path, 2)
    assert held(store) == [0, 1, 2, 3]
    put(store, 4)
    assert held(store) == [3, 4]
    assert store.stats().evictions == 3


def test_put_of_an_oversized_block_deletes_the_old_entry(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put(BIG.key, BIG)
    store = on_disk(tmp_path, 1)
    store.put(BIG.key, BIG)
    assert BIG.key not in store


def test_pickled_store_keeps_its_limit(tmp_path: Path) -> None:
    store = on_disk(tmp_path, 2)
    again = pickle.loads(pickle.dumps(store))
    assert again.max_bytes == store.max_bytes == 2 * SIZE
    assert repr(again) == f"DirectoryStore({str(tmp_path)!r}, max_bytes={2 * SIZE})"
    put(again, 0, 1, 2)
    assert held(store) == [1, 2]


def test_time_of_use_in_the_future_does_not_protect(tmp_path: Path) -> None:
    store = on_disk(tmp_path, 2)
    put(store, 0, 1)
    grow_old(store)
    years_ahead = 2 * 10**18
    os.utime(store.entry_path(KEYS[1]), ns=(years_ahead, years_ahead))
    put(store, 2)
    assert held(store) == [0, 2]


def test_temporary_files_are_not_evicted(tmp_path: Path) -> None:
    store = on_disk(tmp_path, 1)
    put(store, 0)
    unfinished = store.entry_path(KEYS[0]).with_name(".x.0123456789abcdef.tmp")
    unfinished.write_bytes(bytes(10 * SIZE))
    os.utime(unfinished, ns=(0, 0))
    put(store, 1, 2)
    assert held(store) == [2]
    assert unfinished.exists()


def test_folder_in_place_of_an_entry_is_not_evicted(tmp_path: Path) -> None:
    store = on_disk(tmp_path, 1)
    folder = store.entry_path(KEYS[5])
    folder.mkdir(parents=True)
    os.utime(folder, ns=(0, 0))
    put(store, 0, 1)
    assert KEYS[0] not in store
    assert KEYS[1] in store
    assert folder.is_dir()


class Listed(DirectoryStore):
    """Store with an outdated listing of its entries."""

    listing: list[StoredEntry]

    def entries(self) -> Iterator[StoredEntry]:
        return iter(self.listing)


@pytest.fixture
def listed(tmp_path: Path) -> Listed:
    store = Listed(tmp_path, fsync=False)
    put(store, 0, 1, 2)
    now = DirectoryStore.entries(store)
    store.listing = sorted(now, key=lambda entry: entry.used_ns)
    return store


def test_entry_used_during_eviction_is_kept(listed: Listed) -> None:
    put(listed, 0)
    report = shrink(listed, 3 * SIZE - 1)
    assert (report.left_bytes, report.deleted) == (2 * SIZE, (KEYS[1],))
    assert KEYS[0] in listed
    put(listed, 0, 2)
    del listed.listing[1]
    report = shrink(listed, 2 * SIZE - 1)  # all were used after the listing
    assert (report.left_bytes, report.deleted) == (2 * SIZE, ())


def test_entry_deleted_during_eviction_counts_as_room(listed: Listed) -> None:
    listed.delete(KEYS[0])
    report = shrink(listed, 2 * SIZE)
    assert (report.left_bytes, report.deleted) == (2 * SIZE, ())


def test_large_store_is_listed_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    entries = DirectoryStore.entries

    def look(self: DirectoryStore) -> Iterator[StoredEntry]:
        nonlocal looks
        looks += 1  # at the first entry
        yield from entries(self)

    monkeypatch.setattr(DirectoryStore, "entries", look)
    store = on_disk(tmp_path, 256)
    for number in range(400):
        kv = make_kv(f"passage {number:03}")
        store.put(kv.key, kv)
    assert store.stats().total_bytes <= 256 * SIZE
    assert store.stats().entries >= 256 * 63 // 64
    assert looks <= 400 / 4 + 3  # 1/64 of the store is four entries


def test_processes_share_the_limit(tmp_path: Path) -> None:
    writers = [
        PROCESSES.Process(target=fill_bounded, args=(tmp_path, 4 * SIZE, seed)) for seed in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    store = on_disk(tmp_path, 4)
    report = verify(store)
    assert [t.count for t in (report.damaged, report.unread, report.leftovers)] == [0, 0, 0]
    assert report.total_bytes <= (4 + 2) * SIZE  # one entry more per additional writer
    put(store, 0)
    assert store.stats().total_bytes <= 4 * SIZE


def test_shrink_deletes_the_least_recently_used_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    put(store, 0, 1, 2, 3)
    report = shrink(store, 2 * SIZE)
    assert report.deleted == (KEYS[0], KEYS[1])
    assert (report.freed_bytes, report.left_bytes) == (2 * SIZE, 2 * SIZE)
    assert held(store) == [2, 3]
    assert shrink(store, 2 * SIZE).deleted == ()
    with pytest.raises(ValueError, match="must be positive"):
        shrink(store, 0)
    monkeypatch.setattr(os, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(StoreError, match=r"Cannot delete .*Permission denied"):
        shrink(store, 1)
