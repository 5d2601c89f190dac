"""TieredStore: reads fall through and are promoted, one at once; failing tiers cost no answer."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import CorruptEntryError, StoreError, StoreUnavailableError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, StoreStats, TieredStore
from blockattn_rag.store.base import Found
from blockattn_rag.store.tiered import Write
from tests.store.conftest import objects_in_memory
from tests.store.kvs import make_kv, same

KVS = [make_kv(f"passage {i}") for i in range(4)]
KEYS = [kv.key for kv in KVS]
KV, KEY = KVS[0], KEYS[0]
ROOM = 1 << 20


class Remote(KVStore):
    """A store that is far away, so to speak: it can be slow, fail, hold damage, and it counts."""

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

    def get_many(self, keys: Sequence[str]) -> list[Found]:
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


def test_what_only_the_home_has_is_read_there_once_and_goes_to_the_faster_tiers(
    tiers: TieredStore, fast: MemoryStore, near: DirectoryStore, home: Remote
) -> None:
    home.put(KEY, KV)
    for _ in range(3):
        assert same(tiers.get(KEY) or KVS[1], KV)
        assert tiers.flush(10)
    assert home.asked == [KEY]
    assert KEY in fast
    assert KEY in near
    first, second, last = tiers.tier_stats()
    assert (first.hits, first.misses, first.written) == (2, 1, 1)
    assert (second.hits, second.misses, second.written) == (0, 1, 1)
    assert (last.hits, last.misses, last.written) == (1, 0, 0)
    assert [tier.read_tokens for tier in (first, second, last)] == [
        2 * KV.num_tokens,
        0,
        KV.num_tokens,
    ]
    assert [tier.read_bytes for tier in (first, second, last)] == [2 * KV.nbytes, 0, KV.nbytes]


def test_each_tier_is_asked_once_for_what_is_still_missing(
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


def test_threads_that_read_one_entry_at_once_cause_one_read(home: Remote) -> None:
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


def test_next_tier_repairs_damage(fast: MemoryStore, home: Remote) -> None:
    near = Remote()
    for store in (near, home):
        store.put(KEY, KV)
    near.damaged.add(KEY)
    tiers = TieredStore(near, home)
    assert same(tiers.get(KEY) or KVS[1], KV)
    assert tiers.flush(10)
    assert not near.damaged
    assert not any(tier.failures for tier in tiers.tier_stats())


def test_damage_at_home_is_told_so_that_the_entry_is_written_anew(home: Remote) -> None:
    home.put(KEY, KV)
    home.damaged.add(KEY)
    tiers = TieredStore(MemoryStore(ROOM), home)
    with pytest.raises(CorruptEntryError):
        tiers.get(KEY)
    tiers.put(KEY, KV)
    assert same(tiers.get(KEY) or KVS[1], KV)


# Writing


def test_writing_through_the_home_has_the_block_when_put_returns(
    tiers: TieredStore, fast: MemoryStore, near: DirectoryStore, home: Remote
) -> None:
    tiers.put(KEY, KV)
    assert home.written == [KEY]
    assert KEY in fast
    assert tiers.flush(10)
    assert KEY in near


def test_writing_behind_put_does_not_wait_and_reads_see_what_waits(home: Remote) -> None:
    home.go.clear()
    with TieredStore(home, write="behind") as tiers:
        tiers.put(KEY, KV)
        assert home.written == []
        assert KEY in tiers
        assert tiers.touch(KEY)
        assert same(tiers.get(KEY) or KVS[1], KV)
        assert not tiers.flush(0.05)
        home.go.set()
    assert home.written == [KEY]
    assert tiers.tier_stats()[0].written == 1


def test_full_queue_drops_and_warns_once(home: Remote, caplog: pytest.LogCaptureFixture) -> None:
    home.go.clear()
    tiers = TieredStore(home, write="behind", queue_bytes=KV.nbytes, deadline_s=0.05)
    with caplog.at_level(logging.WARNING):
        for key, kv in zip(KEYS, KVS, strict=True):
            tiers.put(key, kv)
    home.go.set()
    tiers.close()
    assert home.written == [KEY]
    assert tiers.tier_stats()[0].dropped == 3
    assert len(caplog.records) == 1
    assert "Raise queue_bytes" in caplog.text


@pytest.mark.parametrize("write", ["through", "behind"])
def test_what_overflows_goes_to_no_tier_and_no_tier_is_blamed(home: Remote, write: Write) -> None:
    kv, fast = make_kv(), MemoryStore(ROOM)
    kv.keys[0][0, 0, 0] = float("nan")
    tiers = TieredStore(fast, home, write=write, failures=1)
    with pytest.raises(StoreError, match=r"Cannot write to TieredStore\(.*NaN"):
        tiers.put(kv.key, kv)
    tiers.close()
    assert kv.key not in fast
    assert home.written == []
    assert [tier.failures for tier in tiers.tier_stats()] == [0, 0]


def test_what_a_thread_fails_to_write_for_no_known_reason_is_counted_and_told(
    home: Remote, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put(_key: str, _kv: BlockKV) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(home, "put", put)
    tiers = TieredStore(home, write="behind")
    with caplog.at_level(logging.WARNING):
        tiers.put(KEY, KV)
        tiers.close()
    assert "could not store a block: no room for a copy" in caplog.text
    assert tiers.tier_stats()[0].dropped == 1


def test_closed_store_warns_once(home: Remote, caplog: pytest.LogCaptureFixture) -> None:
    tiers = TieredStore(home, write="behind")
    tiers.close()
    for kv in KVS[:2]:
        tiers.put(kv.key, kv)
    assert caplog.text.count("is closed and accepts no more blocks") == 1
    assert "more slowly" not in caplog.text
    assert tiers.tier_stats()[0].dropped == 2


def test_put_waits_for_room_in_the_queue(home: Remote) -> None:
    home.go.clear()
    tiers = TieredStore(home, write="behind", queue_bytes=KV.nbytes, deadline_s=10)
    tiers.put(KEY, KV)
    threading.Timer(0.2, home.go.set).start()
    tiers.put(KEYS[1], KVS[1])
    tiers.close()
    assert sorted(home.written) == sorted(KEYS[:2])


def test_a_promotion_does_not_take_the_place_of_a_write_that_waits(home: Remote) -> None:
    near = Remote()
    near.put(KEY, KV)
    home.go.clear()
    tiers = TieredStore(Remote(), near, home, write="behind")
    new = make_kv("passage 0", tokens=9)
    others = [make_kv(f"other {i}") for i in range(4)]
    for kv in others:  # four threads write, and are busy
        tiers.put(kv.key, kv)
    tiers.put(KEY, new)
    tiers._fill(KEY, KV, tiers._tiers[:1])
    home.go.set()
    tiers.close()
    assert same(home.get(KEY) or KV, new)


def test_a_newer_write_of_a_key_waits_for_the_older_one() -> None:
    """Else the older one, which ends last, would undo it."""

    class Home(Remote):
        began, late = threading.Event(), threading.Event()

        def put(self, key: str, kv: BlockKV) -> None:
            if not self.began.is_set():
                self.began.set()
                self.late.wait(0.5)  # set at once by a newer write that does not wait
                super().put(key, kv)
            else:
                super().put(key, kv)
                self.late.set()

    home, new = Home(), make_kv("passage 0", tokens=9)
    tiers = TieredStore(home, write="behind")
    tiers.put(KEY, KV)
    assert home.began.wait(20)
    tiers.put(KEY, new)
    tiers.close()
    assert same(home.get(KEY) or KV, new)


def test_what_is_deleted_is_not_written_later(home: Remote) -> None:
    home.go.clear()
    tiers = TieredStore(MemoryStore(ROOM), home, write="behind", queue_bytes=ROOM)
    for key, kv in zip(KEYS, KVS, strict=True):  # four threads write, and are busy
        tiers.put(key, kv)
    last = make_kv("last")
    tiers.put(last.key, last)
    assert tiers.delete(last.key)
    assert last.key not in tiers
    home.go.set()
    tiers.close()
    assert sorted(home.written) == sorted(KEYS)


def test_an_end_of_the_process_loses_nothing_that_waits(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tests.store.kvs import make_kv\n"
        "from blockattn_rag.store import DirectoryStore, TieredStore\n"
        "class Slow(DirectoryStore):\n"
        "    def put(self, key, kv): time.sleep(0.1); super().put(key, kv)\n"
        "tiers = TieredStore('memory:1MB', Slow(sys.argv[1]), write='behind')\n"
        "for i in range(12):\n"
        "    kv = make_kv(f'passage {i}'); tiers.put(kv.key, kv)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "home")], check=True, timeout=60)
    assert DirectoryStore(tmp_path / "home").stats().entries == 12


# Failing


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
    assert same(tiers.get(KEYS[1]) or KV, KVS[1])  # the faster tier has it
    time.sleep(0.35)
    assert tiers.get(KEY) is None  # the try, which fails
    assert len(home.asked) == 3
    home.fails = False
    assert tiers.get(KEY) is None
    time.sleep(0.35)
    assert same(tiers.get(KEY) or KVS[1], KV)
    assert not tiers.tier_stats()[1].is_open


def test_a_failing_fast_tier_is_passed_over(home: Remote) -> None:
    near = Remote()
    near.fails = True
    tiers = TieredStore(near, home)
    tiers.put(KEY, KV)
    assert same(tiers.get(KEY) or KVS[1], KV)
    assert tiers.touch(KEY)
    assert KEY in tiers
    assert tiers.delete(KEY)
    assert tiers.tier_stats()[0].failures > 0


def test_a_tier_that_hangs_is_waited_for_no_longer_than_the_deadline(home: Remote) -> None:
    near = Remote()
    home.put(KEY, KV)
    near.go.clear()
    tiers = TieredStore(near, home, deadline_s=0.2)
    started = time.monotonic()
    assert same(tiers.get(KEY) or KVS[1], KV)
    assert time.monotonic() - started < 2
    assert tiers.tier_stats()[0].failures == 1
    near.go.set()


def test_an_error_at_home_is_the_writers_to_know_when_he_writes_through(home: Remote) -> None:
    home.fails = True
    tiers = TieredStore(MemoryStore(ROOM), home)
    with pytest.raises(StoreError, match="the remote store is down"):
        tiers.put(KEY, KV)
    assert same(tiers.get(KEY) or KVS[1], KV)
    with pytest.raises(StoreError, match="the remote store is down"):
        tiers.touch(KEY)


def test_an_unrecorded_use_is_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = objects_in_memory()
    error = StoreError("the bucket is down")
    monkeypatch.setattr(objects, "get_many", lambda keys: [error] * len(keys))
    tiers = TieredStore(MemoryStore(ROOM), objects, failures=2)
    for _ in range(2):
        tiers.mark_used(KEY)
        assert tiers.get(KEY) is None
    assert tiers.tier_stats()[1].is_open


# The rest


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, "at least one tier"),
        (("memory:",), {"write": "back"}, "write must be one of"),
        (("memory:",), {"deadline_s": 0}, "deadline_s must be"),
        (("memory:",), {"failures": 0}, "failures must be"),
        (("memory:",), {"pause_s": 0}, "pause_s must be"),
        (("memory:",), {"queue_bytes": 0}, "max_bytes must be"),
    ],
)
def test_invalid_options(arguments: tuple[str, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TieredStore(*arguments, **options)
    with pytest.raises(TypeError, match="A tier must be a KVStore"):
        TieredStore(3)  # type: ignore[arg-type]
