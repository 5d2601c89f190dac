"""Reads that end: made by a bounded number of threads, and not waited for past a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from blockattn_rag.errors import StoreError
from blockattn_rag.store.forks import renew_in_child

T = TypeVar("T")
P = ParamSpec("P")


class Readers:
    """Threads that read for others. They are started when they are first needed.

    Args:
        threads: how many reads go on at once, at most; further ones wait.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        if threads < 1:
            raise ValueError(f"expected at least one thread, found {threads}")
        self._threads, self._name = threads, name
        self.renew()
        renew_in_child(self)

    def renew(self) -> None:
        """Forget the threads, which a forked process does not have."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def start(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin a read, or have it wait for a thread."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
        return self._pool.submit(read, *args, **kwargs)


def deadline(seconds: float) -> float:
    """When an operation that starts now must have ended, by ``time.monotonic``."""
    return time.monotonic() + seconds


def remaining(until: float) -> float:
    """Seconds left, 0 when there are none."""
    return max(0.0, until - time.monotonic())


def outcome(future: Future[T], until: float, doing: str) -> T:
    """What a read came to, if it ends by ``until``. One that did not start yet never will.

    Raises:
        StoreError: it did not end in time.
        Exception: what the read raised.
    """
    try:
        return future.result(remaining(until))
    except TimeoutError:
        future.cancel()
        raise StoreError(f"cannot {doing}: there was no answer before the deadline") from None


def check_seconds(name: str, seconds: float) -> float:
    """Refuse a time that is none.

    Raises:
        ValueError: it is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"{name} must be a positive number of seconds, found {seconds!r}")
    return seconds
