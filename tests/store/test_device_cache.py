"""DeviceCache: what was read is not read again, and the store behind it is told of every use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.errors import CorruptEntryError, StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, ObjectStore, TieredStore
from blockattn_rag.store.base import Found
from blockattn_rag.store.device_cache import DeviceCache, with_device_cache
from tests.store.kvs import make_kv

KV, OTHER = make_kv("first"), make_kv("other")
KEY = KV.key


class Recorded(DirectoryStore):
    """Records what it is asked for."""

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
def cache(store: Recorded) -> DeviceCache:
    return DeviceCache(store, 1 << 20)


def test_stores_in_memory_and_caches_of_no_size_are_not_wrapped(store: Recorded) -> None:
    memory = MemoryStore(1 << 20)
    assert with_device_cache(memory, 1 << 20) is memory
    assert with_device_cache(store, 0) is store
    assert isinstance(with_device_cache(store, 1), DeviceCache)


def test_what_is_put_is_stored_and_what_is_kept_is_not(cache: DeviceCache, store: Recorded) -> None:
    cache.put(KEY, KV)
    cache.keep(OTHER.key, OTHER)
    assert (cache.get(KEY), cache.get(OTHER.key)) == (KV, OTHER)
    assert list(store.keys()) == list(cache.keys()) == [KEY]
    assert "get" not in store.asked
    assert OTHER.key not in cache
    assert cache.stats() == store.stats()


def test_the_store_learns_once_in_a_while_of_uses_that_are_no_reads(
    cache: DeviceCache, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    store.put(KEY, KV)
    for _ in range(3):
        cache.get(KEY)
    assert store.asked == ["get"]
    now_s += 100
    for _ in range(3):
        cache.get(KEY)
    assert store.asked == ["get", "touch"]


def test_a_use_that_cannot_be_recorded_is_a_warning_and_no_error(
    cache: DeviceCache,
    store: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(key: str) -> bool:
        raise StoreError("the disk is gone")

    cache.keep(KEY, KV)
    monkeypatch.setattr(store, "touch", fail)
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        assert cache.get(KEY) is KV
    assert "the disk is gone. The answer is not affected." in caplog.text


def test_a_store_that_hangs_is_told_of_no_further_uses_for_a_while(
    cache: DeviceCache, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    told: list[str] = []

    def fail(key: str) -> bool:
        told.append(key)
        raise StoreError("no answer before the deadline")

    monkeypatch.setattr(store, "touch", fail)
    for kv in (KV, OTHER):
        cache.keep(kv.key, kv)
    for _ in range(2):
        cache.get_many([KEY, OTHER.key])
    assert told == [KEY]
    now_s += 100
    cache.get_many([OTHER.key, KEY])
    assert told == [KEY, OTHER.key]


def test_use_is_recorded_only_if_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore.store")
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    bucket = ObjectStore("memory://kv", backend=obstore.MemoryStore())
    near = Recorded(tmp_path / "near")
    for store in (bucket, TieredStore(near, bucket)):
        cache = DeviceCache(store, 1 << 20)
        cache.keep(KEY, KV)
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "touch", lambda *_: pytest.fail("the bucket was asked"))
            now_s += 100
            assert cache.get(KEY) is KV
    assert near.asked == ["touch"]


def test_what_is_not_the_block_asked_for_is_given_as_it_is_and_not_kept(
    cache: DeviceCache, store: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in (OTHER, replace(KV, keys=KV.keys[:1])):
        monkeypatch.setattr(DirectoryStore, "get", lambda *_, kv=wrong: kv)
        assert cache.get(KEY) is cache.get(KEY) is wrong
    assert store.asked == ["get"] * 4


class Batched(Recorded):
    """Answers for many keys at once, and records which."""

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        self.asked.append(" ".join(keys))
        return KVStore.get_many(self, keys)


def test_the_store_is_asked_once_for_all_that_is_not_in_memory(tmp_path: Path) -> None:
    store = Batched(tmp_path / "kv")
    cache = DeviceCache(store, 1 << 20)
    damaged, absent = make_kv("damaged"), make_kv("absent")
    cache.put(KEY, KV)
    for kv in (OTHER, damaged):
        store.put(kv.key, kv)
    store.entry_path(damaged.key).write_bytes(b"?")
    asked = [OTHER.key, KEY, absent.key, damaged.key, OTHER.key]
    found = cache.get_many(asked)
    assert store.asked[0] == f"{OTHER.key} {absent.key} {damaged.key}"
    assert found[1] is KV
    assert found[0] is found[4]
    assert found[2] is None
    assert isinstance(found[3], CorruptEntryError)
    del store.asked[:]
    assert cache.get_many([OTHER.key, KEY]) == [found[0], KV]
    assert store.asked == []


def test_a_use_that_a_store_which_is_left_alone_does_not_learn_of_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def touch(self: Recorded, key: str) -> bool:
        raise StoreUnavailableError("told before")

    monkeypatch.setattr(Recorded, "touch", touch)
    cache = DeviceCache(Recorded(tmp_path / "kv"), 1 << 20)
    cache.keep(KEY, KV)
    assert cache.get(KEY) is KV
    assert not caplog.records
