"""Calls that run side by side, meeting at the model to be answered in one batch.

LangChain's ``batch`` runs ``invoke`` once per input, each with its own callbacks, cache look-up and
error. All of that stays as it is; only the innermost step, the model, is taken together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from blockattn_rag.blocks import BlockPrompt
from blockattn_rag.generation import Generation

BATCH_SIZE = 16
"""Calls that are answered together at most."""

_CURRENT: ContextVar[BatchMeeting | None] = ContextVar("blockattn_batch", default=None)


class _Seat(NamedTuple):
    prompt: BlockPrompt
    answer: Future[Generation]


class BatchMeeting:
    """Waits until every call under way has come to the model, or has ended without it.

    Args:
        answer: answers prompts in one batch.
        options: the engine's options of all these calls; calls with others do not take part.
        calls: how many calls there will be in all.
        at_once: how many of them run side by side.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[BlockPrompt]], list[Generation]],
        options: dict[str, object],
        calls: int,
        at_once: int,
    ) -> None:
        self._answer = answer
        self._options = options
        self._remaining = calls
        self._at_once = at_once
        self._waiting: list[_Seat] = []
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

    def join(self, prompt: BlockPrompt) -> Future[Generation]:
        """Ask for an answer; it comes when the batch is complete."""
        seat = _Seat(prompt, Future())
        with self._lock:
            self._waiting.append(seat)
            batch = self._take_batch()
        self._start(batch)
        return seat.answer

    def _take_batch(self) -> list[_Seat]:
        """Those waiting, if all calls under way wait; else nobody."""
        if len(self._waiting) < min(self._at_once, self._remaining):
            return []
        batch, self._waiting = self._waiting, []
        return batch

    def _start(self, batch: list[_Seat]) -> None:
        if batch:
            work = threading.Thread(
                target=self._run, args=(batch,), name="blockattn-batch", daemon=True
            )
            work.start()

    def _run(self, batch: list[_Seat]) -> None:
        seats = [seat for seat in batch if seat.answer.set_running_or_notify_cancel()]
        if not seats:
            return
        try:
            answers = self._answer([seat.prompt for seat in seats])
        except BaseException as error:  # noqa: BLE001 -- raised again by the calls
            if len(seats) == 1:
                seats[0].answer.set_exception(error)
                return
            # A batch fails as a whole; alone, each call gets its own answer or its own error.
            for seat in seats:
                self._run_alone(seat)
            return
        for seat, answer in zip(seats, answers, strict=True):
            seat.answer.set_result(answer)

    def _run_alone(self, seat: _Seat) -> None:
        try:
            seat.answer.set_result(self._answer([seat.prompt])[0])
        except BaseException as error:  # noqa: BLE001 -- raised again by the call
            seat.answer.set_exception(error)
