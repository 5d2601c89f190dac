"""Circuit breaker and single flight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.store.base import Found
from blockattn_rag.store.concurrency import SingleFlight
from blockattn_rag.store.tier import CircuitBreaker
from tests.store.kvs import make_kv

KV, OTHER = make_kv("first"), make_kv("other")


class Source:
    """Gives blocks when it is let go, and tells when it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.reached = threading.Event()
        self.go = threading.Event()
        self.error: Exception | None = None

    def __call__(self, keys: Sequence[str]) -> list[Found]:
        self.asked.append(tuple(keys))
        self.reached.set()
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        return [{KV.key: KV, OTHER.key: OTHER}.get(key) for key in keys]


def start(pool: ThreadPoolExecutor, flights: SingleFlight, source: Source) -> Future[list[Found]]:
    """A read of the first block that is under way."""
    read = pool.submit(flights.read, [KV.key], source, 10.0)
    assert source.reached.wait(10)
    return read


def test_answers_come_in_order_and_each_key_is_read_once() -> None:
    source = Source()
    source.go.set()
    flights = SingleFlight()
    asked = [OTHER.key, "absent", KV.key, OTHER.key]
    assert flights.read(asked, source, 10) == [OTHER, None, KV, OTHER]
    assert source.asked == [(OTHER.key, "absent", KV.key)]
    assert flights.read([], source, 10) == []
    assert len(source.asked) == 1


def test_a_read_that_goes_on_is_waited_for_and_the_rest_is_read() -> None:
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


def test_a_read_that_takes_too_long_is_an_error_to_those_who_wait() -> None:
    flights, source = SingleFlight(), Source()
    with ThreadPoolExecutor() as pool:
        first = start(pool, flights, source)
        (found,) = flights.read([KV.key], source, 0.05)
        assert isinstance(found, StoreError)
        source.go.set()
        assert first.result(10) == [KV]
    assert len(source.asked) == 1


def test_a_read_that_raises_raises_to_its_own_thread_and_ends() -> None:
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
        except RuntimeError:  # it came after the first had ended, and read itself
            assert len(source.asked) == 2
    source.error = None
    assert flights.read([KV.key], source, 10) == [KV]


def test_after_a_change_nobody_joins_an_older_read() -> None:
    flights, source, fresh = SingleFlight(), Source(), Source()
    fresh.go.set()
    with ThreadPoolExecutor() as pool:
        first = start(pool, flights, source)
        flights.forget(KV.key)
        assert flights.read([KV.key], fresh, 10) == [KV]
        source.go.set()
        assert first.result(10) == [KV]
    assert fresh.asked == [(KV.key,)]


# Circuit breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(3, 10.0, clock)


def test_failures_in_a_row_open_it_and_no_others(breaker: CircuitBreaker) -> None:
    assert [breaker.failed(), breaker.failed()] == [False, False]
    assert not breaker.succeeded()
    assert [breaker.failed(), breaker.failed()] == [False, False]
    assert breaker.allows()
    assert breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()


def test_one_caller_retries_after_each_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
    clock.now += 9.9
    assert not breaker.allows()
    clock.now += 0.2
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    clock.now += 9.9  # the one who tries does not report
    assert not breaker.allows()
    clock.now += 0.2
    assert breaker.allows()
    assert not breaker.failed()  # it was open before
    clock.now += 9.9
    assert not breaker.allows()


def test_a_success_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
    clock.now += 11
    assert breaker.allows()
    assert breaker.succeeded()
    assert not breaker.is_open
    assert all(breaker.allows() for _ in range(5))
    assert not breaker.failed()
