"""CircuitBreaker: closed, open, and tried again once in a while."""

from __future__ import annotations

import pytest

from blockattn_rag.store.tier import CircuitBreaker


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


def test_one_caller_tries_after_the_pause_and_the_next_after_another(
    breaker: CircuitBreaker, clock: Clock
) -> None:
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
