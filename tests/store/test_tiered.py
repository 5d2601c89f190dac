"""TieredStore: reads, copies to faster tiers and failures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from blockattn_rag.errors import CorruptEntryError, StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, StoreStats, TieredStore
from blockattn_rag.store.base import ReadResult
from tests.store.conftest import objects_in_memory
from tests.store.kvs import make_kv, same

KVS = [make_kv(f"passage {i}") for i in range(4)]
KEYS = [kv.key for kv in KVS]
KV, KEY = KVS[0], KEYS[0]
ROOM = 1 << 20


class Remote(KVStore):
    """Store that records calls, and can be slow, fail or return damaged entries."""

    def __init__(self) -> None:
        self._inner = MemoryStore(ROOM)
        self.fails = False
        self.go = threading.Event()
        self.go.set()
        self.asked: list[str] = []
        self.written: list[str] = []
        self.damaged: set[str] = set()

    def get(self, key: str) -> BlockKV | None:
        return self._inner.get(key)

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        self.asked += keys
        self.go.wait(20)
        if self.fails:
            return [StoreError("the remote store is down")] * len(keys)
        return [CorruptEntryError("bad") if k in self.damaged else self.get(k) for k in keys]

    def put(self, key: str, kv: BlockKV) -> None:
        self.go.wait(20)
        self._check()
        self._inner.put(key, kv)
        self.damaged.discard(key)
        self.written.append(key)

    def touch(self, key: str) -> bool:
        self._check()
        return self._inner.touch(key)

    def __contains__(self, key: object) -> bool:
        self._check()
        return key in self._inner

    def delete(self, key: str) -> bool:
        return self._inner.delete(key)

    def keys(self) -> Iterator[str]:
        return self._inner.keys()

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def _check(self) -> None:
        if self.fails:
            raise StoreError("the remote store is down")


@pytest.fixture
def fast() -> MemoryStore:
    return MemoryStore(ROOM)


@pytest.fixture
def near(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "near")


@pytest.fixture
def home() -> Remote:
    return Remote()


@pytest.fixture
def tiers(fast: MemoryStore, near: DirectoryStore, home: Remote) -> TieredStore:
    return TieredStore(fast, near, home)


# Reading


def test_hit_of_the_home_is_copied_to_faster_tiers(
    tiers: TieredStore, fast: MemoryStore, near: DirectoryStore, home: Remote
) -> None:
    home.put(KEY, KV)
    for _ in range(3):
        assert same(tiers.get(KEY), KV)
        assert tiers.flush(10)
    assert home.asked == [KEY]
    assert KEY in fast
    assert KEY in near
    first, second, last = tiers.tier_stats()
    assert (first.hits, first.misses, first.written) == (2, 1, 1)
    assert (second.hits, second.misses, second.written) == (0, 1, 1)
    assert (last.hits, last.misses, last.written) == (1, 0, 0)
    for tier, reads in ((first, 2), (second, 0), (last, 1)):
        assert (tier.read_tokens, tier.read_bytes) == (reads * KV.num_tokens, reads * KV.nbytes)


def test_each_tier_is_read_once_for_the_missing_entries(
    tiers: TieredStore, fast: MemoryStore, near: DirectoryStore, home: Remote
) -> None:
    fast.put(KEYS[0], KVS[0])
    near.put(KEYS[1], KVS[1])
    home.put(KEYS[2], KVS[2])
    found = tiers.get_many([KEYS[3], *KEYS[:3], KEYS[2]])
    assert found[0] is None
    blocks = [one for one in found if isinstance(one, BlockKV)]
    assert [kv.key for kv in blocks] == [*KEYS[:3], KEYS[2]]
    assert sorted(home.asked) == sorted(KEYS[2:])


def test_concurrent_reads_of_an_entry_are_merged(home: Remote) -> None:
    home.put(KEY, KV)
    tiers = TieredStore(home)
    home.go.clear()
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(tiers.get, KEY) for _ in range(8)]
        time.sleep(0.2)
        home.go.set()
        found = [read.result(10) for read in reads]
    assert home.asked == [KEY]
    assert all(one is not None and same(one, KV) for one in found)


def test_damaged_copy_is_replaced(fast: MemoryStore, home: Remote) -> None:
    near = Remote()
    for store in (near, home):
        store.put(KEY, KV)
    near.damaged.add(KEY)
    tiers = TieredStore(near, home)
    assert same(tiers.get(KEY), KV)
    assert tiers.flush(10)
    assert not near.damaged
    assert not any(tier.failures for tier in tiers.tier_stats())


def test_damage_in_the_home_is_raised(home: Remote) -> None:
    home.put(KEY, KV)
    home.damaged.add(KEY)
    tiers = TieredStore(MemoryStore(ROOM), home)
    with pytest.raises(CorruptEntryError):
        tiers.get(KEY)
    tiers.put(KEY, KV)
    assert same(tiers.get(KEY), KV)


# Writing


def test_put_returns_when_the_home_has_the_block(
    tiers: TieredStore, fast: MemoryStore, near: DirectoryStore, home: Remote
) -> None:
    tiers.put(KEY, KV)
    assert home.written == [KEY]
    assert KEY in fast
    assert tiers.flush(10)
    assert KEY in near


def test_put_does_not_wait_for_copies(home: Remote) -> None:
    near = Remote()
    near.go.clear()
    tiers = TieredStore(near, home, queue_bytes=KV.nbytes, deadline_s=0.05)
    for kv in KVS:
        tiers.put(kv.key, kv)
    assert home.written == KEYS
    assert not tiers.flush(0.05)
    near.go.set()
    assert tiers.flush(10)
    assert near.written == [KEY]
    assert tiers.tier_stats()[0].dropped == 3


def test_put_of_nan_reaches_no_tier(home: Remote) -> None:
    kv, fast = make_kv(), MemoryStore(ROOM)
    kv.keys[0][0, 0, 0] = float("nan")
    tiers = TieredStore(fast, home, failures=1)
    with pytest.raises(StoreError, match=r"Cannot write to TieredStore\(.*NaN"):
        tiers.put(kv.key, kv)
    assert kv.key not in fast
    assert home.written == []
    assert [tier.failures for tier in tiers.tier_stats()] == [0, 0]


def test_unexpected_error_of_a_copy_is_counted_and_logged(
    home: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near = Remote()
    monkeypatch.setattr(near, "put", Mock(side_effect=MemoryError("no room for a copy")))
    tiers = TieredStore(near, home)
    with caplog.at_level(logging.WARNING):
        tiers.put(KEY, KV)
        assert tiers.flush(10)
    assert "could not store a block: no room for a copy" in caplog.text
    assert tiers.tier_stats()[0].dropped == 1


def test_delete_cancels_queued_copies(home: Remote) -> None:
    near, last = Remote(), make_kv("last")
    near.go.clear()
    tiers = TieredStore(near, home)
    for kv in (*KVS, last):  # keeps the four writing threads busy
        tiers.put(kv.key, kv)
    assert tiers.delete(last.key)
    assert last.key not in tiers
    near.go.set()
    assert tiers.flush(10)
    assert sorted(near.written) == sorted(KEYS)


# Failures


def test_failing_home_is_paused_and_retried(home: Remote, caplog: pytest.LogCaptureFixture) -> None:
    home.put(KEY, KV)
    tiers = TieredStore(MemoryStore(ROOM), home, failures=2, pause_s=0.3)
    home.fails = True
    with caplog.at_level(logging.INFO):
        assert [tiers.get(KEY) for _ in range(6)] == [None] * 6
    assert len(home.asked) == 2
    state = tiers.tier_stats()[1]
    assert (state.failures, state.skipped, state.is_open) == (2, 4, True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the remote store is down" in caplog.text
    with pytest.raises(StoreUnavailableError, match=r"is retried every 0\.3 s"):
        tiers.put(KEYS[1], KVS[1])
    assert same(tiers.get(KEYS[1]), KVS[1])  # from the faster tier
    time.sleep(0.35)
    assert tiers.get(KEY) is None  # a retry, which fails
    assert len(home.asked) == 3
    home.fails = False
    assert tiers.get(KEY) is None
    time.sleep(0.35)
    assert same(tiers.get(KEY), KV)
    assert not tiers.tier_stats()[1].is_open


def test_failing_copy_is_skipped(home: Remote) -> None:
    near = Remote()
    near.fails = True
    tiers = TieredStore(near, home)
    tiers.put(KEY, KV)
    assert same(tiers.get(KEY), KV)
    assert tiers.touch(KEY)
    assert KEY in tiers
    assert tiers.delete(KEY)
    assert tiers.tier_stats()[0].failures > 0


def test_hanging_tier_is_skipped_after_the_deadline(home: Remote) -> None:
    near = Remote()
    home.put(KEY, KV)
    near.go.clear()
    tiers = TieredStore(near, home, deadline_s=0.2)
    started = time.monotonic()
    assert same(tiers.get(KEY), KV)
    assert time.monotonic() - started < 2
    assert tiers.tier_stats()[0].failures == 1
    near.go.set()


def test_error_of_the_home_is_raised(home: Remote) -> None:
    home.fails = True
    tiers = TieredStore(MemoryStore(ROOM), home)
    with pytest.raises(StoreError, match="the remote store is down"):
        tiers.put(KEY, KV)
    assert same(tiers.get(KEY), KV)
    with pytest.raises(StoreError, match="the remote store is down"):
        tiers.touch(KEY)


def test_mark_used_of_an_object_store_closes_no_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = objects_in_memory()
    error = StoreError("the bucket is down")
    monkeypatch.setattr(objects, "get_many", lambda keys: [error] * len(keys))
    tiers = TieredStore(MemoryStore(ROOM), objects, failures=2)
    for _ in range(2):
        tiers.mark_used(KEY)
        assert tiers.get(KEY) is None
    assert tiers.tier_stats()[1].is_open


# Options


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, "at least one tier"),
        (("memory:",), {"deadline_s": 0}, "deadline_s must be"),
        (("memory:",), {"failures": 0}, "failures must be"),
        (("memory:",), {"pause_s": 0}, "pause_s must be"),
        (("memory:",), {"queue_bytes": 0}, "max_bytes must be"),
    ],
)
def test_invalid_options_are_refused(
    arguments: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TieredStore(*arguments, **options)
    with pytest.raises(TypeError, match="A tier must be a KVStore"):
        TieredStore(3)  # type: ignore[arg-type]
