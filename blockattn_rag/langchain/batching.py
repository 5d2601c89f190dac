"""Calls that run side by side, meeting at the model to be answered in one batch.

LangChain's ``batch`` runs ``invoke`` once per input, each with its own callbacks, cache look-up and
error. All of that stays as it is; only the innermost step, the model, is taken together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from blockattn_rag.engine.scheduler import Seat, Serve, fail_all, serve_all
from blockattn_rag.engine.threads import start_thread
from blockattn_rag.prompts.blocks import BlockPrompt

_CURRENT: ContextVar[BatchMeeting | None] = ContextVar("blockattn_batch", default=None)


class BatchMeeting:
    """Waits until every call under way has come to the model, or has ended without it.

    Args:
        serve: answers the calls on seats in one batch.
        options: the engine's options of all these calls; calls with others do not take part.
        calls: how many calls there will be in all.
        at_once: how many of them run side by side.
    """

    def __init__(
        self,
        serve: Serve,
        options: dict[str, object],
        calls: int,
        at_once: int,
    ) -> None:
        self._serve = serve
        self._options = options
        self._remaining = calls
        self._at_once = at_once
        self._waiting: list[Seat] = []
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds one of the calls, in its own thread or task."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)
            with self._lock:
                self._remaining -= 1
                batch = self._take_batch()
            self._start(batch)

    @staticmethod
    def of_this_call(options: dict[str, object]) -> BatchMeeting | None:
        """The meeting that the running call belongs to, if it asks for the same."""
        meeting = _CURRENT.get()
        return meeting if meeting is not None and meeting._options == options else None

    def join(self, make_prompt: Callable[[], BlockPrompt]) -> Seat:
        """Ask for an answer; it comes when the batch is complete."""
        seat = Seat(make_prompt)
        with self._lock:
            self._waiting.append(seat)
            batch = self._take_batch()
        self._start(batch)
        return seat

    def _take_batch(self) -> list[Seat]:
        """Those waiting, if all calls under way wait; else nobody."""
        if len(self._waiting) < min(self._at_once, self._remaining):
            return []
        batch, self._waiting = self._waiting, []
        return batch

    def _start(self, batch: list[Seat]) -> None:
        if not batch:
            return

        def leave() -> None:
            for seat in batch:
                seat.left.set()

        try:
            start_thread(lambda: serve_all(batch, self._serve), "blockattn-batch", leave)
        except RuntimeError as error:
            fail_all(batch, error)
