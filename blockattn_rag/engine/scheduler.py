"""Model scheduler: a queue, and the thread that processes it.

All engines that share a model use one queue for answers, streams, batches, async calls and
encoding. Waiting requests of one engine with equal options share a batch if this leaves the answers
unchanged. A request only waits for others to join its batch if it is part of a group.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from blockattn_rag.engine.pending import Job, Pending
from blockattn_rag.model.exclusion import ModelLock, counts_as_holder, holds_a_model

T = TypeVar("T")

_IDLE_S = 10.0
"""Seconds without work after which the thread ends."""

_LONGEST_END_S = 10.0


class Scheduler:
    """Queue of a model, processed by a thread that starts on demand and ends when idle."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Pending[Any]] = []
        self._running: Sequence[Pending[Any]] = ()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Pending[Any]]]
        self._turns = WeakKeyDictionary()

    # -- for callers -------------------------------------------------------------------------

    def submit(self, *work: Pending[Any]) -> None:
        """Add all work items to the queue atomically. A thread that is already running a model does
        the work itself, because a logits processor that waits for the queue would deadlock."""
        if holds_a_model():
            for pending in work:
                self._run([pending])
            return
        with self._changed:
            for pending in work:
                if pending.group is not None:
                    pending.group.on_change = self._wake
            try:
                self._start()
            except RuntimeError as error:  # The system cannot start a thread.
                for pending in work:
                    pending.fail(error)
                return
            self._waiting += work
            self._changed.notify()
        for pending in work:
            if pending.needs is not None:
                pending.needs.add_done_callback(lambda _: self._wake())

    def submit_in_turn(self, work: Pending[Any]) -> None:
        """Submit work together with all other work from this iteration of the event loop."""
        loop = asyncio.get_running_loop()
        with self._changed:
            turn = self._turns.setdefault(loop, [])
            turn.append(work)
        if len(turn) == 1:
            loop.call_soon(self._submit_turn, loop)

    def _submit_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            turn = self._turns.pop(loop, [])
        self.submit(*turn)

    def submit_and_wait(self, *work: Pending[T]) -> list[T]:
        """Submit work, and return the results in order. An error cancels the remaining work.

        If the model is idle, the main thread does the work itself, so that a script loads and runs
        its model in one thread. OpenMP keeps workers for each thread that has computed, and forward
        passes slow down once workers outnumber cores (benchmarks/main_thread.py).
        """
        try:
            is_main = threading.current_thread() is threading.main_thread()
            with self._changed:
                is_idle = not (self._waiting or self._running)
            if holds_a_model() or (is_main and is_idle):
                return self._do_here(work)
            self.submit(*work)
            return [pending.result() for pending in work]
        finally:
            for pending in work:
                pending.leave()

    def run(self, work: Callable[[], T]) -> T:
        return self.submit_and_wait(Job(work))[0]

    def _do_here(self, work: Sequence[Pending[T]]) -> list[T]:
        results = []
        with counts_as_holder():
            for pending in work:
                if not pending.answer.done():
                    self._run(_first_batch([each for each in work if not each.answer.done()]))
                results.append(pending.result())
        return results

    # -- the model's thread ------------------------------------------------------------------

    def _start(self) -> None:
        if self._has_ended:
            raise RuntimeError("Cannot generate answers while the interpreter is shutting down")
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="blockattn-model", daemon=True)
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        with counts_as_holder():
            while batch := self._take():
                self._run(batch)
                # An idle thread must not keep models or answers alive.
                del batch

    def _take(self) -> list[Pending[Any]]:
        """Wait for the next batch. Returns an empty batch to end the thread."""
        with self._changed:
            self._running = ()
            while not self._has_ended:
                if batch := self._next_batch():
                    self._waiting = [pending for pending in self._waiting if pending not in batch]
                    self._running = batch
                    return batch
                if not self._changed.wait(_IDLE_S) and not self._waiting:
                    break
            self._thread = None
            return []

    def _next_batch(self) -> list[Pending[Any]]:
        self._waiting = [pending for pending in self._waiting if not pending.left]
        waiting = Counter(pending.group for pending in self._waiting)
        for pending in self._waiting:
            if pending.group is not None and pending.group.is_complete(waiting[pending.group]):
                # The request stops waiting for others, even if the batch has no room for it.
                pending.group = None
        ready = [pending for pending in self._waiting if pending.is_ready]
        try:
            return _first_batch(ready)
        except Exception as error:  # noqa: BLE001 -- reraised by its caller
            ready[0].fail(error)
            ready[0].leave()
            return ready[:1]

    @staticmethod
    def _run(batch: Sequence[Pending[Any]]) -> None:
        if not (begun := [pending for pending in batch if pending.begin()]):
            return
        try:
            begun[0].run(begun)
        except BaseException as error:  # noqa: BLE001 -- reraised by the callers
            for pending in begun:
                pending.fail(error)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def end(self) -> threading.Thread | None:
        """Cancel all work, and end the thread. Returns the thread if it is still running."""
        with self._changed:
            self._has_ended = True
            for pending in (*self._running, *self._waiting):
                pending.leave()
            self._changed.notify()
            return self._thread


def _first_batch(ready: Sequence[Pending[T]]) -> list[Pending[T]]:
    sharing = [*ready[:1], *(pending for pending in ready[1:] if pending.joins(ready[0]))]
    return sharing[: ready[0].max_batch] if ready else []


_schedulers: WeakKeyDictionary[ModelLock, Scheduler] = WeakKeyDictionary()
_guard = threading.Lock()


def scheduler_of(lock: ModelLock) -> Scheduler:
    """Scheduler of the model with this lock, shared by all engines of the model."""
    with _guard:
        if lock not in _schedulers:
            _schedulers[lock] = Scheduler()
        return _schedulers[lock]


@atexit.register
def _end_all() -> None:
    # A daemon thread that is running PyTorch code during shutdown would abort the process.
    for thread in [scheduler.end() for scheduler in list(_schedulers.values())]:
        if thread is not None:
            thread.join(_LONGEST_END_S)


def _reset_in_child() -> None:
    """Empty the queues in a forked process, which does not inherit its parent's threads."""
    for scheduler in list(_schedulers.values()):
        scheduler.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
