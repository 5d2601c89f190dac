"""A store on disk of bounded size: the least recently used goes first, by many and over time."""

from __future__ import annotations

import logging
import os
import pickle
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn_rag.errors import StoreError
from blockattn_rag.store import DirectoryStore, shrink, verify
from blockattn_rag.store.eviction import StoredFile
from blockattn_rag.store.eviction import shrink as shrink_files
from blockattn_rag.store.format import encode
from tests.store.kvs import key_of, make_kv, same
from tests.store.writers import PROCESSES, fill_bounded

KV = [make_kv(f"passage {i}") for i in range(6)]
KEYS = [key_of(kv) for kv in KV]
SIZE = sum(buffer.nbytes for buffer in encode(KV[0]))
BIG = make_kv("big", tokens=30)
BIG_SIZE = sum(buffer.nbytes for buffer in encode(BIG))
MINUTE_NS = 60 * 10**9


def bounded(path: Path, entries: float) -> DirectoryStore:
    return DirectoryStore(path, fsync=False, max_bytes=int(entries * SIZE))


def put(store: DirectoryStore, *numbers: int) -> None:
    for number in numbers:
        store.put(KEYS[number], KV[number])


def held(store: DirectoryStore) -> list[int]:
    """Numbers of the entries, least recently used first."""
    files = sorted(store.files(), key=lambda file: file.used_ns)
    return [KEYS.index(file.path.stem) for file in files]


def grow_old(store: DirectoryStore) -> None:
    """Every entry was last used two minutes earlier than it was; the order stays."""
    for file in store.files():
        used_ns = file.used_ns - 2 * MINUTE_NS
        os.utime(file.path, ns=(used_ns, used_ns))


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = bounded(tmp_path, 3)
    put(store, 0, 1, 2)
    assert held(store) == [0, 1, 2]
    grow_old(store)
    assert same(store.get(KEYS[0]) or BIG, KV[0])
    assert store.touch(KEYS[1])
    put(store, 3)
    assert held(store) == [0, 1, 3]
    stats = store.stats()
    assert (stats.entries, stats.total_bytes, stats.evictions) == (3, 3 * SIZE, 1)


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), 0, 1, 2)
    store = DirectoryStore(tmp_path)
    grow_old(store)
    store.get(KEYS[0])
    put(bounded(tmp_path, 3), 3)
    assert held(store) == [2, 0, 3]


def test_a_store_that_is_larger_than_its_bound_shrinks_when_it_is_written(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), 0, 1, 2, 3)
    store = bounded(tmp_path, 2)
    assert held(store) == [0, 1, 2, 3]
    put(store, 4)
    assert held(store) == [3, 4]
    assert store.stats().evictions == 3


def test_one_large_block_takes_the_place_of_several(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=max(BIG_SIZE, 3 * SIZE))
    put(store, 0, 1, 2)
    store.put(key_of(BIG), BIG)
    assert key_of(BIG) in store
    assert store.stats().total_bytes <= max(BIG_SIZE, 3 * SIZE)


def test_putting_again_replaces_and_evicts_nothing(tmp_path: Path) -> None:
    store = bounded(tmp_path, 1)
    put(store, 0, 0, 0)
    stats = store.stats()
    assert (stats.entries, stats.evictions, stats.refused) == (1, 0, 0)


def test_a_block_larger_than_the_store_is_not_kept_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = bounded(tmp_path, 1)
    put(store, 0)
    with caplog.at_level(logging.WARNING):
        store.put(key_of(BIG), BIG)
        store.put(key_of(BIG), BIG)
    assert store.get(key_of(BIG)) is None
    assert (store.stats().entries, store.stats().refused) == (1, 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "raise max_bytes" in caplog.text


def test_an_entry_that_its_store_has_outgrown_is_dropped_when_it_is_put_anew(
    tmp_path: Path,
) -> None:
    DirectoryStore(tmp_path).put(key_of(BIG), BIG)
    store = bounded(tmp_path, 1)
    store.put(key_of(BIG), BIG)
    assert key_of(BIG) not in store


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_store_of_no_bytes_is_refused_and_not_made(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"must be positive, found {max_bytes}"):
        DirectoryStore(tmp_path / "kv", max_bytes=max_bytes)
    assert not (tmp_path / "kv").exists()


def test_another_process_is_bound_as_well(tmp_path: Path) -> None:
    store = bounded(tmp_path, 2)
    again = pickle.loads(pickle.dumps(store))
    assert again.max_bytes == store.max_bytes == 2 * SIZE
    assert repr(again) == f"DirectoryStore({str(tmp_path)!r}, max_bytes={2 * SIZE})"
    put(again, 0, 1, 2)
    assert held(store) == [1, 2]


def test_a_time_of_use_in_the_future_does_not_keep_an_entry(tmp_path: Path) -> None:
    store = bounded(tmp_path, 2)
    put(store, 0, 1)
    grow_old(store)
    years_ahead = 2 * 10**18
    os.utime(store.entry_path(KEYS[1]), ns=(years_ahead, years_ahead))
    put(store, 2)
    assert held(store) == [0, 2]


def test_what_is_being_written_is_never_deleted(tmp_path: Path) -> None:
    store = bounded(tmp_path, 1)
    put(store, 0)
    unfinished = store.entry_path(KEYS[0]).with_name(".x.0123456789abcdef.tmp")
    unfinished.write_bytes(bytes(10 * SIZE))
    os.utime(unfinished, ns=(0, 0))
    put(store, 1, 2)
    assert held(store) == [2]
    assert unfinished.exists()


def test_what_is_used_while_room_is_made_stays_and_the_next_one_goes(tmp_path: Path) -> None:
    store = bounded(tmp_path, 9)
    put(store, 0, 1, 2)
    files = list(store.files())  # as they were when someone looked
    store.touch(KEYS[0])
    grow_old(store)
    left, deleted = shrink_files(files, 3 * SIZE - 1)
    assert left == 3 * SIZE  # all were marked meanwhile
    assert deleted == ()
    files = sorted(store.files(), key=lambda file: file.used_ns)
    store.get(files[0].path.stem)
    left, deleted = shrink_files(files, 3 * SIZE - 1)
    assert (left, deleted) == (2 * SIZE, (files[1],))


def test_what_others_deleted_meanwhile_counts_as_room(tmp_path: Path) -> None:
    store = bounded(tmp_path, 9)
    put(store, 0, 1, 2)
    files = sorted(store.files(), key=lambda file: file.used_ns)
    store.delete(files[0].path.stem)
    assert shrink_files(files, 2 * SIZE) == (2 * SIZE, ())


def test_a_large_store_is_not_looked_through_for_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    files = DirectoryStore.files

    def look(self: DirectoryStore) -> Iterator[StoredFile]:
        nonlocal looks
        looks += 1  # when the first file is asked for
        yield from files(self)

    monkeypatch.setattr(DirectoryStore, "files", look)
    store = bounded(tmp_path, 256)
    for number in range(400):
        kv = make_kv(f"passage {number:03}")
        store.put(key_of(kv), kv)
    assert store.stats().total_bytes <= 256 * SIZE
    assert store.stats().entries >= 256 * 63 // 64
    assert looks <= 400 / 4 + 3  # a 64th of the store is four entries


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("gptd"), st.integers(0, 5))))
@settings(deadline=None, max_examples=60)
def test_it_behaves_as_a_list_in_order_of_use(room: int, steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as path:
        store, expected, evictions = bounded(Path(path), room), list[int](), 0
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
        assert store.stats().evictions == evictions


def test_many_threads_stay_within_the_bound(tmp_path: Path) -> None:
    store = bounded(tmp_path, 3)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(15):
            i = choose.randrange(len(KV))
            match choose.choice(["put", "get", "touch", "delete"]):
                case "put":
                    put(store, i)
                case "get":
                    kv = store.get(KEYS[i])
                    assert kv is None or same(kv, KV[i])
                case "touch":
                    store.touch(KEYS[i])
                case "delete":
                    store.delete(KEYS[i])

    with ThreadPoolExecutor(4) as pool:
        for seed in range(0, 16, 4):
            list(pool.map(work, range(seed, seed + 4)))
            # Not while others write: a listing may count a file that is deleted before it ends.
            assert store.stats().total_bytes <= 3 * SIZE
    assert not verify(store).damaged
    assert not list(store.leftovers())


def test_many_processes_bound_one_folder_and_damage_nothing(tmp_path: Path) -> None:
    writers = [
        PROCESSES.Process(target=fill_bounded, args=(tmp_path, 4 * SIZE, seed)) for seed in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    store = bounded(tmp_path, 4)
    report = verify(store)
    assert [t.count for t in (report.damaged, report.unread, report.leftovers)] == [0, 0, 0]
    assert report.total_bytes <= (4 + 2) * SIZE  # each further writer may exceed it by an entry
    put(store, 0)
    assert store.stats().total_bytes <= 4 * SIZE


def test_shrink_does_once_what_a_bound_does_always(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, 0, 1, 2, 3)
    told = shrink(store, 2 * SIZE, dry_run=True)
    assert held(store) == [0, 1, 2, 3]
    assert (told.deleted, told.freed_bytes, told.left_bytes) == (
        (KEYS[0], KEYS[1]), 2 * SIZE, 2 * SIZE,
    )  # fmt: skip
    done = shrink(store, 2 * SIZE)
    assert (done.deleted, done.freed_bytes) == (told.deleted, told.freed_bytes)
    assert held(store) == [2, 3]
    assert shrink(store, 2 * SIZE).deleted == ()
    with pytest.raises(ValueError, match="must be positive"):
        shrink(store, 0)


def test_an_entry_that_shrink_cannot_delete_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    put(store, 0)

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(StoreError, match=r"cannot delete from .*Permission denied"):
        shrink(store, 1)
