"""Calls that run side by side, answered in one batch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blockattn_rag.engine.results import Generation
from blockattn_rag.engine.threads import start_thread
from blockattn_rag.prompts.blocks import BlockPrompt

BATCH_SIZE = 16
"""Calls that are answered together at most."""


def _no_prompt() -> BlockPrompt:
    raise RuntimeError("this call brought no prompt")


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """A call that waits for its answer.

    Args:
        make_prompt: run in the thread that answers, since it may have to load a tokenizer; not
            needed where the prompt is given beside the seat.
        answer: set when it is there.
        left: set when the call no longer waits for its answer.
        started: when it came, in seconds of ``time.perf_counter``.
    """

    make_prompt: Callable[[], BlockPrompt] = _no_prompt
    answer: Future[Generation] = field(default_factory=Future)
    left: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.perf_counter)
    context: Context = field(default_factory=copy_context)

    def prompt(self) -> BlockPrompt:
        """The prompt, made with the context variables of the call."""
        return self.context.run(self.make_prompt)

    def fail(self, error: BaseException) -> None:
        """Raise the error in the call."""
        if isinstance(error, StopIteration):  # which no task can be given
            named = RuntimeError(f"making the prompt or its answer raised {error!r}")
            named.__cause__ = error
            error = named
        self.answer.set_exception(error)

    async def wait(self) -> Generation:
        """The answer, for a task of an event loop, which leaves the seat if it is cancelled."""
        try:
            return await asyncio.wrap_future(self.answer)
        except BaseException:  # the task was cancelled, most likely
            self.left.set()
            raise


Serve = Callable[[Sequence[Seat]], object]
"""Answers the calls on these seats, all of them or, if it raises, some."""


def serve_all(seats: Sequence[Seat], serve: Serve) -> None:
    """Answer calls together. A batch fails as a whole; alone, each call then gets its own answer or
    its own error. Never raises."""
    taken = [seat for seat in seats if seat.answer.set_running_or_notify_cancel()]
    try:
        if taken:
            serve(taken)
    except BaseException as error:  # noqa: BLE001 -- raised again by the calls
        if len(taken) == 1:
            taken[0].fail(error)
            return
        for seat in taken:
            if not seat.answer.done():
                _serve_alone(seat, serve)


def _serve_alone(seat: Seat, serve: Serve) -> None:
    try:
        serve([seat])
    except BaseException as error:  # noqa: BLE001 -- raised again by the call
        seat.fail(error)


def fail_all(seats: Sequence[Seat], error: BaseException) -> None:
    """Raise the error in every call that still waits."""
    for seat in seats:
        if seat.answer.set_running_or_notify_cancel():
            seat.fail(error)


class Gathering:
    """Answers calls of event loops. Those that come in the same turn of a loop, or while the model
    is at work, are answered together if they ask for the same options; none waits for company.

    Args:
        serve: answers the calls on some seats by the engine's options, all of them the same.
    """

    def __init__(self, serve: Callable[[dict[str, Any], Sequence[Seat]], object]) -> None:
        self._serve = serve
        self._waiting: list[tuple[dict[str, Any], Seat]] = []
        self._served: Sequence[Seat] = ()
        self._lock = threading.Lock()
        self._works = False

    async def answer(
        self, make_prompt: Callable[[], BlockPrompt], options: dict[str, Any]
    ) -> Generation:
        """The answer to one prompt. A cancelled call leaves its batch, and the last one ends it."""
        seat = Seat(make_prompt)
        with self._lock:
            self._waiting.append((options, seat))
        # In the loop's next turn: calls that were gathered have all come by then.
        asyncio.get_running_loop().call_soon(self._start)
        return await seat.wait()

    def _start(self) -> None:
        with self._lock:
            if self._works or not self._waiting:
                return
            self._works = True
        try:
            start_thread(self._work, "blockattn-batch", self._leave_all)
        except RuntimeError as error:
            with self._lock:
                waiting, self._waiting, self._works = self._waiting, [], False
            fail_all([seat for _, seat in waiting], error)

    def _work(self) -> None:
        while batch := self._next_batch():
            options, self._served = batch
            serve_all(self._served, partial(self._serve, options))

    def _leave_all(self) -> None:
        """The process ends: nobody waits any more."""
        with self._lock:
            seats = [*self._served, *(seat for _, seat in self._waiting)]
        for seat in seats:
            seat.left.set()

    def _next_batch(self) -> tuple[dict[str, Any], list[Seat]] | None:
        """Those who wait with the first one's options; when nobody waits, work is over."""
        with self._lock:
            if not self._waiting:
                self._works, self._served = False, ()
                return None
            wanted = self._waiting[0][0]
            batch: list[Seat] = []
            rest: list[tuple[dict[str, Any], Seat]] = []
            for options, seat in self._waiting:
                if len(batch) < BATCH_SIZE and _are_equal(options, wanted):
                    batch.append(seat)
                else:
                    rest.append((options, seat))
            self._waiting = rest
        return wanted, batch


def _are_equal(options: dict[str, Any], wanted: dict[str, Any]) -> bool:
    try:
        return options is wanted or bool(options == wanted)
    except Exception:  # noqa: BLE001 -- tensors, say, have no single truth
        return False
