"""BlockCache keeps blocks in memory and reports their uses to the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from blockattn_rag.engine.fetcher import BlockCache
from blockattn_rag.errors import CorruptEntryError, StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, ObjectStore, TieredStore
from blockattn_rag.store.base import ReadResult
from tests.store.kvs import make_kv

KV, OTHER = make_kv("first"), make_kv("other")
KEY = KV.key


class Recorded(DirectoryStore):
    """Store that records its calls."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[str] = []

    def get(self, key: str) -> BlockKV | None:
        self.asked.append("get")
        return super().get(key)

    def touch(self, key: str) -> bool:
        self.asked.append("touch")
        return super().touch(key)


@pytest.fixture
def store(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "kv")


@pytest.fixture
def cache(store: Recorded) -> BlockCache:
    return BlockCache(store, 1 << 20)


def test_blocks_of_a_memory_store_are_not_cached_twice() -> None:
    memory = MemoryStore(1 << 20)
    cache = BlockCache(memory, 1 << 20)
    cache.keep(KEY, KV)
    cache.keep(KEY, replace(KV, handle=""))
    assert cache.get_many([KEY]) == [KV]
    assert memory.get(KEY) is KV
    memory.delete(KEY)
    assert cache.get_many([KEY]) == [None]


def test_read_only_cache_leaves_a_memory_store_unchanged() -> None:
    memory = MemoryStore(1 << 20)
    cache = BlockCache(memory, 1 << 20, read_only=True)
    cache.keep(KEY, KV)
    assert cache.get_many([KEY]) == [KV]
    assert KEY not in memory


def test_put_writes_to_the_store_and_keep_does_not(cache: BlockCache, store: Recorded) -> None:
    cache.put(KEY, KV)
    cache.keep(OTHER.key, OTHER)
    assert cache.get_many([KEY, OTHER.key]) == [KV, OTHER]
    assert list(store.keys()) == [KEY]
    assert "get" not in store.asked


@pytest.mark.parametrize("max_bytes", [0, 1])
def test_large_blocks_are_not_cached(
    store: Recorded, caplog: pytest.LogCaptureFixture, max_bytes: int
) -> None:
    cache = BlockCache(store, max_bytes)
    cache.put(KEY, KV)
    for _ in range(2):
        assert isinstance(cache.get_many([KEY])[0], BlockKV)
    assert store.asked == ["get", "get"]
    assert not caplog.records
    with pytest.raises(ValueError, match="Invalid resident_bytes -1: expected 0 or more"):
        BlockCache(store, -1)


def test_uses_of_cached_blocks_are_reported_once_a_minute(
    cache: BlockCache, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    store.put(KEY, KV)
    for _ in range(3):
        cache.get_many([KEY])
    assert store.asked == ["get"]
    now_s += 100
    for _ in range(3):
        cache.get_many([KEY])
    assert store.asked == ["get", "touch"]


@pytest.mark.parametrize("error", [StoreError, StoreUnavailableError])
def test_failed_report_is_logged_once_and_pauses_reports_for_a_minute(
    cache: BlockCache,
    store: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[StoreError],
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    touch = Mock(side_effect=error("the disk is gone"))
    monkeypatch.setattr(store, "touch", touch)
    for kv in (KV, OTHER):
        cache.keep(kv.key, kv)
    for _ in range(2):
        assert cache.get_many([KEY, OTHER.key]) == [KV, OTHER]
    assert touch.mock_calls == [call(KEY)]
    # The store has already logged that it is unavailable.
    logged = int(error is StoreError)
    assert caplog.text.count("the disk is gone. The answer is not affected.") == logged
    now_s += 100
    cache.get_many([OTHER.key, KEY])
    assert touch.mock_calls == [call(KEY), call(OTHER.key)]


def test_no_uses_are_reported_to_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore.store")
    bucket = ObjectStore("memory://kv", backend=obstore.MemoryStore())
    near = Recorded(tmp_path / "near")
    monkeypatch.setattr(ObjectStore, "touch", lambda *_: pytest.fail("The bucket was accessed"))
    for store in (bucket, TieredStore(near, bucket)):
        cache = BlockCache(store, 1 << 20)
        cache.keep(KEY, KV)
        assert cache.get_many([KEY]) == [KV]
    assert near.asked == ["touch"]


def test_foreign_entry_is_returned_and_not_cached(
    cache: BlockCache, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (OTHER, replace(KV, keys=KV.keys[:1])):
        monkeypatch.setattr(DirectoryStore, "get", lambda *_, kv=wrong: kv)
        for _ in range(2):
            assert cache.get_many([KEY]) == [wrong]
    assert store.asked == ["get"] * 4


class Batched(Recorded):
    """Store that records the keys of each batched read."""

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        self.asked.append(" ".join(keys))
        return KVStore.get_many(self, keys)


def test_store_is_read_once_for_all_blocks_that_are_not_cached(tmp_path: Path) -> None:
    store = Batched(tmp_path / "kv")
    cache = BlockCache(store, 1 << 20)
    damaged, absent = make_kv("damaged"), make_kv("absent")
    cache.put(KEY, KV)
    for kv in (OTHER, damaged):
        store.put(kv.key, kv)
    store.entry_path(damaged.key).write_bytes(b"?")
    found = cache.get_many([OTHER.key, KEY, absent.key, damaged.key, OTHER.key])
    assert store.asked[0] == f"{OTHER.key} {absent.key} {damaged.key}"
    assert found[1] is KV
    assert found[0] is found[4]
    assert found[2] is None
    assert isinstance(found[3], CorruptEntryError)
    del store.asked[:]
    assert cache.get_many([OTHER.key, KEY]) == [found[0], KV]
    assert store.asked == []
