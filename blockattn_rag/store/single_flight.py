"""Single flight: of several reads of one key at once, one is made, and the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from blockattn_rag.errors import StoreError
from blockattn_rag.store.base import Found
from blockattn_rag.store.deadlines import deadline, remaining
from blockattn_rag.store.forks import renew_in_child


class SingleFlight:
    """Reads through a function, no key twice at once."""

    def __init__(self) -> None:
        self.renew()
        renew_in_child(self)

    def renew(self) -> None:
        """Forget all reads, which a forked process does not make."""
        self._lock = threading.Lock()
        self._reads: dict[str, Future[Found]] = {}

    def read(
        self,
        keys: Sequence[str],
        read_many: Callable[[Sequence[str]], Sequence[Found]],
        most_s: float,
    ) -> list[Found]:
        """What ``read_many`` says to each key, in this call or in one that is going on.

        Args:
            most_s: seconds to wait for other threads' reads; those that take longer are answered
                by a StoreError.
        """
        until = deadline(most_s)
        awaited: dict[str, Future[Found]] = {}
        own: list[str] = []
        with self._lock:
            for key in dict.fromkeys(keys):
                if key not in self._reads:
                    self._reads[key] = Future()
                    own.append(key)
                awaited[key] = self._reads[key]
        try:
            for key, found in zip(own, read_many(own) if own else (), strict=True):
                awaited[key].set_result(found)
        finally:
            for key in own:
                if not awaited[key].done():  # read_many raised: to this thread alone
                    awaited[key].set_result(StoreError(f"the read of {key} was broken off"))
                self._end(key, awaited[key])
        return [_result(awaited[key], until, key) for key in keys]

    def forget(self, key: str) -> None:
        """Let no later read wait for one that is going on, because the entry changes."""
        with self._lock:
            self._reads.pop(key, None)

    def _end(self, key: str, read: Future[Found]) -> None:
        with self._lock:
            if self._reads.get(key) is read:
                del self._reads[key]


def _result(read: Future[Found], until: float, key: str) -> Found:
    try:
        return read.result(remaining(until))
    except TimeoutError:
        return StoreError(f"cannot read {key}: another thread's read did not end in time")
