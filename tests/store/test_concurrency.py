"""Single flight, write queue and circuit breaker."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore
from blockattn_rag.store.base import ReadResult
from blockattn_rag.store.concurrency import CircuitBreaker, SingleFlight, WriteQueue
from tests.store.kvs import make_kv

KV, OTHER = make_kv("first"), make_kv("other")


class Source:
    """Read function that signals when it is called, and returns blocks once ``go`` is set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.reached = threading.Event()
        self.go = threading.Event()
        self.error: Exception | None = None

    def __call__(self, keys: Sequence[str]) -> list[ReadResult]:
        self.asked.append(tuple(keys))
        self.reached.set()
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        return [{KV.key: KV, OTHER.key: OTHER}.get(key) for key in keys]


def start(
    pool: ThreadPoolExecutor, flights: SingleFlight, source: Source
) -> Future[list[ReadResult]]:
    """Start a read of the first block, and wait until it is running."""
    read = pool.submit(flights.read, [KV.key], source, 10.0)
    assert source.reached.wait(10)
    return read


def test_single_flight_reads_each_key_once() -> None:
    source = Source()
    source.go.set()
    flights = SingleFlight()
    asked = [OTHER.key, "absent", KV.key, OTHER.key]
    assert flights.read(asked, source, 10) == [OTHER, None, KV, OTHER]
    assert source.asked == [(OTHER.key, "absent", KV.key)]
    assert flights.read([], source, 10) == []
    assert len(source.asked) == 1


def test_single_flight_joins_a_running_read() -> None:
    flights, source, rest = SingleFlight(), Source(), Source()
    rest.go.set()
    with ThreadPoolExecutor() as pool:
        first = start(pool, flights, source)
        second = pool.submit(flights.read, [KV.key, OTHER.key], rest, 10.0)
        assert rest.reached.wait(10)
        source.go.set()
        assert second.result(10) == [KV, OTHER]
        assert first.result(10) == [KV]
    assert rest.asked == [(OTHER.key,)]


def test_single_flight_returns_an_error_after_the_deadline() -> None:
    flights, source = SingleFlight(), Source()
    with ThreadPoolExecutor() as pool:
        first = start(pool, flights, source)
        (found,) = flights.read([KV.key], source, 0.05)
        assert isinstance(found, StoreError)
        source.go.set()
        assert first.result(10) == [KV]
    assert len(source.asked) == 1


def test_exception_of_a_read_is_raised_in_its_own_thread() -> None:
    flights, source = SingleFlight(), Source()
    source.error = RuntimeError("broken")
    with ThreadPoolExecutor() as pool:
        first = start(pool, flights, source)
        second = pool.submit(flights.read, [KV.key], source, 10.0)
        source.go.set()
        with pytest.raises(RuntimeError, match="broken"):
            first.result(10)
        try:
            (found,) = second.result(10)
            assert isinstance(found, StoreError)
        except RuntimeError:  # it started after the first had ended
            assert len(source.asked) == 2
    source.error = None
    assert flights.read([KV.key], source, 10) == [KV]


def test_reads_do_not_join_a_forgotten_read() -> None:
    flights, source, fresh = SingleFlight(), Source(), Source()
    fresh.go.set()
    with ThreadPoolExecutor() as pool:
        first = start(pool, flights, source)
        flights.forget(KV.key)
        assert flights.read([KV.key], fresh, 10) == [KV]
        source.go.set()
        assert first.result(10) == [KV]
    assert fresh.asked == [(KV.key,)]


# Write queue


class Writer:
    """Write function that records calls, and blocks until ``go`` is set."""

    def __init__(self) -> None:
        self.written: list[BlockKV] = []
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self, _key: str, kv: BlockKV) -> None:
        self.began.set()
        assert self.go.wait(10)
        self.written.append(kv)


def test_write_queue_refuses_blocks_beyond_its_limit_and_after_close() -> None:
    queue, writer = WriteQueue(KV.nbytes), Writer()
    assert queue.add(KV.key, KV, writer)
    assert not queue.add(OTHER.key, OTHER, writer)
    assert not queue.flush(0.05)
    writer.go.set()
    assert queue.flush(10)
    queue.close()
    assert not queue.add(OTHER.key, OTHER, writer)
    assert writer.written == [KV]


def test_writes_of_the_same_key_run_in_order() -> None:
    queue, older, newer = WriteQueue(1 << 20), Writer(), Writer()
    newer.go.set()
    assert queue.add(KV.key, KV, older)
    assert older.began.wait(10)
    assert queue.add(KV.key, OTHER, newer)
    assert not queue.flush(0.1)
    assert newer.written == []
    older.go.set()
    assert queue.flush(10)
    assert newer.written == [OTHER]


def test_discarding_waits_for_a_running_write() -> None:
    queue, running, queued = WriteQueue(1 << 20), Writer(), Writer()
    assert queue.add(KV.key, KV, running)
    assert running.began.wait(10)
    assert not queue.discard(OTHER.key, 10)  # does not wait for writes of other keys
    assert queue.add(KV.key, OTHER, queued)
    assert queue.discard(KV.key, 0.05)
    with ThreadPoolExecutor(1) as pool:
        discarded = pool.submit(queue.discard, KV.key, 10)
        with pytest.raises(TimeoutError):
            discarded.result(0.1)
        running.go.set()
        assert not discarded.result(10)
    assert running.written == [KV]
    assert queue.flush(10)
    assert queued.written == []


def test_a_normal_exit_completes_queued_writes(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tests.store.kvs import make_kv\n"
        "from blockattn_rag.store import DirectoryStore\n"
        "from blockattn_rag.store.concurrency import WriteQueue\n"
        "store, queue = DirectoryStore(sys.argv[1]), WriteQueue(1 << 20)\n"
        "def write(key, kv): time.sleep(0.1); store.put(key, kv)\n"
        "for i in range(12):\n"
        "    kv = make_kv(f'passage {i}'); queue.add(kv.key, kv, write)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert DirectoryStore(tmp_path).stats().entries == 12


# Circuit breaker


def test_breaker_opens_after_consecutive_failures_and_allows_one_call_per_pause() -> None:
    now = 100.0
    breaker = CircuitBreaker(3, 10.0, lambda: now)
    assert [breaker.failed(), breaker.failed()] == [False, False]
    assert not breaker.succeeded()
    assert [breaker.failed(), breaker.failed()] == [False, False]
    assert breaker.allows()
    assert breaker.failed()
    assert [breaker.is_open] == [True]
    now += 9.9
    assert not breaker.allows()
    now += 0.2
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    now += 9.9  # the caller that retries reports no result
    assert not breaker.allows()
    now += 0.2
    assert breaker.allows()
    assert not breaker.failed()  # it was already open
    now += 9.9
    assert not breaker.allows()
    now += 0.2
    assert breaker.allows()
    assert breaker.succeeded()
    assert not breaker.is_open
    assert all(breaker.allows() for _ in range(5))
    assert not breaker.failed()
