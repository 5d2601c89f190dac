"""Behavior that is common to all stores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import KVStore
from tests.store.kvs import call_at_random, make_kv, same

KVS = [make_kv(f"passage {i}", tokens=2 + i) for i in range(5)]
KEYS = [kv.key for kv in KVS]


def got(store: KVStore, key: str) -> BlockKV:
    kv = store.get(key)
    assert kv is not None
    return kv


def test_put_blocks_are_read_listed_and_counted(any_store: KVStore) -> None:
    for key, kv in zip(KEYS, KVS, strict=True):
        any_store.put(key, kv)
    assert all(same(got(any_store, key), kv) for key, kv in zip(KEYS, KVS, strict=True))
    assert sorted(any_store.keys()) == sorted(KEYS)
    stats = any_store.stats()
    assert stats.entries == len(KEYS)
    assert stats.total_bytes >= sum(kv.nbytes for kv in KVS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_every_dtype_is_preserved(any_store: KVStore, dtype: torch.dtype) -> None:
    int8 = dtype == torch.int8
    kv = make_kv(dtype=torch.float32 if int8 else dtype, quantized=int8, more_heads=1)
    any_store.put(kv.key, kv)
    assert same(got(any_store, kv.key), kv)


def test_an_absent_key_returns_none(any_store: KVStore) -> None:
    assert any_store.get(KEYS[0]) is None
    assert KEYS[0] not in any_store
    assert None not in any_store
    assert not any_store.touch(KEYS[0])
    assert not any_store.delete(KEYS[0])
    assert list(any_store.keys()) == []
    assert any_store.stats().entries == 0


def test_get_many_returns_results_in_order(any_store: KVStore) -> None:
    for i in (0, 2, 3):
        any_store.put(KEYS[i], KVS[i])
    asked = [4, 3, 0, 1, 2, 0]
    found = any_store.get_many([KEYS[i] for i in asked])
    assert len(found) == len(asked)
    for i, one in zip(asked, found, strict=True):
        if i in (1, 4):
            assert one is None
        else:
            assert isinstance(one, BlockKV)
            assert same(one, KVS[i])
    assert any_store.get_many([]) == []


def test_touch_and_delete_report_whether_the_key_exists(any_store: KVStore) -> None:
    any_store.put(KEYS[0], KVS[0])
    assert KEYS[0] in any_store
    assert any_store.touch(KEYS[0])
    assert any_store.delete(KEYS[0])
    assert not any_store.delete(KEYS[0])
    assert KEYS[0] not in any_store
    assert any_store.get(KEYS[0]) is None


def test_put_replaces_an_existing_entry(any_store: KVStore) -> None:
    old, new = make_kv(tokens=3), make_kv(tokens=8)
    assert old.key == new.key
    for kv in (old, new):
        any_store.put(kv.key, kv)
    assert same(got(any_store, new.key), new)
    assert any_store.stats().entries == 1


def test_put_refuses_wrong_keys_and_malformed_blocks(any_store: KVStore) -> None:
    with pytest.raises(ValueError, match=r"expected .*kv\.key"):
        any_store.put(KEYS[1], KVS[0])
    empty = make_kv(layers=0)
    with pytest.raises(ValueError, match="1 to 4096; found 0 and 0"):
        any_store.put(empty.key, empty)


def test_threads_read_complete_blocks(any_store: KVStore) -> None:
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(partial(call_at_random, any_store, KVS), range(6)))
