"""Concurrency helpers for stores: reads with deadlines, deduplicated reads, a write queue, and a
circuit breaker.

Objects that rely on running threads reset themselves in forked processes, which inherit no threads.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ClassVar, ParamSpec, TypeVar
from weakref import WeakSet

import torch

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import ReadResult
from blockattn_rag.store.eviction import check_max_bytes

T = TypeVar("T")
P = ParamSpec("P")

_WRITERS = 4


class _ForkAware(ABC):
    _known: ClassVar[WeakSet[_ForkAware]] = WeakSet()

    def __init__(self) -> None:
        self._renew()
        self._known.add(self)

    @abstractmethod
    def _renew(self) -> None:
        """Reset the object to a state without running threads or held locks."""

    @classmethod
    def renew_all(cls) -> None:
        for instance in list(cls._known):
            instance._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ForkAware.renew_all)


class Readers(_ForkAware):
    """Thread pool for reads and other calls to a store."""

    def __init__(self, threads: int, name: str) -> None:
        if threads < 1:
            raise ValueError(f"Expected at least one thread, found {threads}")
        self._threads, self._name = threads, name
        super().__init__()

    def _renew(self) -> None:
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)

    def start(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._pool.submit(read, *args, **kwargs)


def deadline(seconds: float) -> float:
    """Return the time ``seconds`` from now on the ``time.monotonic`` clock."""
    return time.monotonic() + seconds


def remaining(until: float) -> float:
    return max(0.0, until - time.monotonic())


def outcome(future: Future[T], until: float, doing: str) -> T:
    """Return a call's result. At the deadline, cancel it if still queued, and raise StoreError."""
    try:
        return future.result(remaining(until))
    except TimeoutError:
        future.cancel()
        raise StoreError(f"Cannot {doing}: no response before the deadline") from None


def check_seconds(name: str, seconds: float) -> float:
    if not seconds > 0:
        raise ValueError(f"{name} must be a positive number of seconds, found {seconds!r}")
    return seconds


class SingleFlight(_ForkAware):
    """Deduplication of reads: threads that read the same key concurrently share the result."""

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[str, Future[ReadResult]] = {}

    def read(
        self,
        keys: Sequence[str],
        read_many: Callable[[Sequence[str]], Sequence[ReadResult]],
        most_s: float,
    ) -> list[ReadResult]:
        """Read keys with ``read_many``. If another thread is already reading a key, wait for its
        result until ``most_s`` seconds after this call, then return a StoreError for the key."""
        until = deadline(most_s)
        awaited: dict[str, Future[ReadResult]] = {}
        own: list[str] = []
        with self._lock:
            for key in dict.fromkeys(keys):
                if key not in self._reads:
                    self._reads[key] = Future()
                    own.append(key)
                awaited[key] = self._reads[key]
        try:
            for key, entry in zip(own, read_many(own) if own else (), strict=True):
                awaited[key].set_result(entry)
        finally:
            for key in own:
                if not awaited[key].done():  # `read_many` raised in this thread.
                    awaited[key].set_result(StoreError(f"Cannot read {key}: a shared read failed"))
                with self._lock:
                    if self._reads.get(key) is awaited[key]:
                        del self._reads[key]
        return [_answer(awaited[key], until, key) for key in keys]

    def forget(self, key: str) -> None:
        """Keep later reads from joining a running read, because the entry is about to change."""
        with self._lock:
            self._reads.pop(key, None)


def _answer(read: Future[ReadResult], until: float, key: str) -> ReadResult:
    try:
        return read.result(remaining(until))
    except TimeoutError:
        return StoreError(f"Cannot read {key}: another thread's read did not finish in time")


class WriteQueue(_ForkAware):
    """Queue of blocks for background threads to write. It is drained before a normal exit."""

    def __init__(self, max_bytes: int) -> None:
        check_max_bytes(max_bytes)
        self._max_bytes = max_bytes
        self._closed = False
        super().__init__()

    def _renew(self) -> None:
        # The parent process writes the blocks that are already queued.
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._running: set[str] = set()
        self._bytes = 0
        # The interpreter waits for these threads when it exits.
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="blockattn-rag-writes")

    def add(self, key: str, kv: BlockKV, write: Callable[[str, BlockKV], object]) -> bool:
        """Queue ``write(key, kv)``, which must not raise, and cancel a queued write for this key.
        Returns False if the queue is full or closed: then nothing is written or canceled."""
        kv = kv.to(torch.device("cpu"))
        queued = partial(write, key, kv)
        with self._changed:
            if self._closed or (self._bytes and self._bytes + kv.nbytes > self._max_bytes):
                return False
            try:
                self._threads.submit(self._run, key, kv.nbytes, queued)
            except RuntimeError:  # The interpreter is exiting.
                return False
            self._waiting[key] = queued
            self._bytes += kv.nbytes
        return True

    def discard(self, key: str, wait_s: float) -> bool:
        """Cancel a queued write, and wait at most ``wait_s`` seconds for a running one. Returns
        whether a write was queued or running."""
        with self._changed:
            was_queued = self._waiting.pop(key, None) is not None
            self._changed.wait_for(lambda: key not in self._running, wait_s)
            return was_queued

    def flush(self, wait_s: float | None = None) -> bool:
        """Wait until the queue is empty, but at most ``wait_s`` seconds. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, wait_s)

    def close(self) -> None:
        """Write all queued blocks, and accept no new ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=True)

    def _run(self, key: str, nbytes: int, queued: Callable[[], object]) -> None:
        with self._changed:
            # One write per key at a time: an older write that ends last would undo a newer one.
            self._changed.wait_for(lambda: key not in self._running)
            self._running.add(key)
            is_wanted = self._waiting.get(key) is queued
        try:
            if is_wanted:
                queued()
        finally:
            with self._changed:
                self._running.discard(key)
                self._bytes -= nbytes
                if self._waiting.get(key) is queued:
                    del self._waiting[key]
                self._changed.notify_all()


class CircuitBreaker:
    """Circuit breaker for calls to a service that may be down.

    The breaker starts closed and allows every call. After ``failures`` consecutive failures, it
    opens and allows one call every ``pause_s`` seconds. The first success closes it.
    """

    def __init__(
        self, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if failures < 1:
            raise ValueError(f"failures must be 1 or more, found {failures}")
        self.pause_s = check_seconds("pause_s", pause_s)
        self._most, self._clock = failures, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._next_try = -math.inf

    @property
    def is_open(self) -> bool:
        return self._failures >= self._most

    def allows(self) -> bool:
        """Whether a call is allowed now. If it is, the caller must report its outcome."""
        with self._lock:
            if self.is_open:
                now = self._clock()
                if now < self._next_try:
                    return False
                self._next_try = now + self.pause_s
            return True

    def succeeded(self) -> bool:
        """Report a success. Returns whether this closed the breaker."""
        with self._lock:
            was_open = self.is_open
            self._failures = 0
            return was_open

    def failed(self) -> bool:
        """Report a failure. Returns whether this opened the breaker."""
        with self._lock:
            self._failures += 1
            self._next_try = self._clock() + self.pause_s
            return self._failures == self._most
