"""MemoryStore: least recently used goes first, and every byte is accounted for."""

from __future__ import annotations

import logging
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockattn_rag.store import KVStore, MemoryStore, StoreStats
from blockattn_rag.store.memory import host_copy
from tests.store.kvs import key_of, make_kv, same

KV = [make_kv(f"passage {i}", tokens=3) for i in range(6)]
KEYS = [key_of(kv) for kv in KV]
SIZE = KV[0].nbytes
BIG = make_kv("big", tokens=30)


def test_it_is_a_store() -> None:
    assert isinstance(MemoryStore(1), KVStore)


def test_what_is_put_is_what_is_got_and_not_a_copy() -> None:
    store = MemoryStore(SIZE)
    store.put(KEYS[0], KV[0])
    assert store.get(KEYS[0]) is KV[0]
    assert KEYS[0] in store
    assert store.get(KEYS[1]) is None
    assert KEYS[1] not in store
    assert None not in store


def test_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(3 * SIZE)
    for key, kv in zip(KEYS[:3], KV[:3], strict=True):
        store.put(key, kv)
    store.get(KEYS[0])
    assert list(store.keys()) == [KEYS[1], KEYS[2], KEYS[0]]
    store.put(KEYS[3], KV[3])
    assert list(store.keys()) == [KEYS[2], KEYS[0], KEYS[3]]
    assert store.stats() == StoreStats(entries=3, total_bytes=3 * SIZE, evictions=1)


def test_looking_whether_a_block_is_there_does_not_count_as_use() -> None:
    store = MemoryStore(2 * SIZE)
    store.put(KEYS[0], KV[0])
    store.put(KEYS[1], KV[1])
    assert KEYS[0] in store
    store.put(KEYS[2], KV[2])
    assert list(store.keys()) == [KEYS[1], KEYS[2]]


def test_one_large_block_takes_the_place_of_several() -> None:
    store = MemoryStore(BIG.nbytes)
    for key, kv in zip(KEYS, KV, strict=True):
        store.put(key, kv)
    store.put(key_of(BIG), BIG)
    assert store.stats() == StoreStats(1, BIG.nbytes, evictions=len(KV))


def test_putting_again_replaces_and_evicts_nothing() -> None:
    store = MemoryStore(SIZE)
    for _ in range(2):
        store.put(KEYS[0], KV[0])
    assert store.stats() == StoreStats(1, SIZE)


def test_deleting_frees_the_bytes() -> None:
    store = MemoryStore(SIZE)
    store.put(KEYS[0], KV[0])
    assert store.delete(KEYS[0])
    assert not store.delete(KEYS[0])
    assert store.stats() == StoreStats(0, 0)


def test_a_block_larger_than_the_store_is_not_kept_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore(SIZE)
    store.put(KEYS[0], KV[0])
    with caplog.at_level(logging.WARNING):
        store.put(key_of(BIG), BIG)
        store.put(key_of(BIG), BIG)
    assert store.get(key_of(BIG)) is None
    assert store.stats() == StoreStats(1, SIZE, refused=2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "raise max_bytes" in caplog.text


def test_a_store_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive, found 0"):
        MemoryStore(0)


def test_a_block_under_anothers_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected .*store_key"):
        MemoryStore(SIZE).put(KEYS[1], KV[0])


def test_what_is_no_blocks_kv_is_refused() -> None:
    empty = make_kv(layers=0)
    with pytest.raises(ValueError, match="at least one"):
        MemoryStore(SIZE).put(key_of(empty), empty)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(["get", "put", "delete"]), st.integers(0, 5)), max_size=40),
)
@settings(deadline=None)
def test_it_behaves_as_a_list_in_order_of_use(room: int, steps: list[tuple[str, int]]) -> None:
    store, expected, evictions = MemoryStore(room * SIZE), list[int](), 0
    for step, i in steps:
        known = i in expected
        if step == "get":
            assert (store.get(KEYS[i]) is KV[i]) == known
        elif step == "delete":
            assert store.delete(KEYS[i]) == known
        else:
            store.put(KEYS[i], KV[i])
        if known:
            expected.remove(i)
        if step == "put" or (step == "get" and known):
            expected.append(i)
        if len(expected) > room:
            expected.pop(0)
            evictions += 1
        assert list(store.keys()) == [KEYS[i] for i in expected]
    assert store.stats() == StoreStats(len(expected), len(expected) * SIZE, evictions)


def test_many_threads_leave_the_books_in_order() -> None:
    store = MemoryStore(3 * SIZE)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(500):
            i = choose.randrange(len(KV))
            match choose.choice(["put", "get", "delete", "keys"]):
                case "put":
                    store.put(KEYS[i], KV[i])
                case "get":
                    assert store.get(KEYS[i]) in (None, KV[i])
                case "delete":
                    store.delete(KEYS[i])
                case "keys":
                    assert len(list(store.keys())) <= 3

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stats = store.stats()
    assert stats.total_bytes == SIZE * stats.entries == SIZE * len(list(store.keys()))
    assert stats.total_bytes <= store.max_bytes


@pytest.mark.parametrize("quantised", [False, True])
def test_a_store_on_the_host_holds_copies_in_memory_of_their_own(quantised: bool) -> None:
    kv = make_kv(quantised=quantised)
    store = MemoryStore(kv.nbytes, on_host=True)
    store.put(kv.key, kv)
    held = store.get(kv.key)
    assert held is not None
    assert same(held, kv)
    given = {t.data_ptr() for layer in range(kv.num_layers) for t in kv.tensors(layer)}
    own = {t.data_ptr() for layer in range(kv.num_layers) for t in held.tensors(layer)}
    assert not given & own


def test_memory_of_the_host_is_page_locked_where_that_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[torch.Tensor] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    kv = make_kv(layers=3)
    assert same(host_copy(kv, page_locked=True), kv)
    assert len(locked) == 6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert same(host_copy(kv), kv)
    assert len(locked) == 6
