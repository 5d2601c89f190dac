"""Calls that run side by side, answered in one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blockattn_rag.blocks import BlockPrompt
from blockattn_rag.generation import Generation

BATCH_SIZE = 16
"""Calls that are answered together at most."""

MakePrompt = Callable[[], BlockPrompt]
"""Makes a prompt: in the thread that answers it, since that may have to load a tokenizer."""

Answer = Callable[[Sequence[MakePrompt], Callable[[], bool]], list[Generation]]
"""Answers prompts together, unless told meanwhile that nobody waits for them any more."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A call that waits for its answer; ``left`` is set when it waits no more."""

    make_prompt: MakePrompt
    answer: Future[Generation] = field(default_factory=Future)
    left: threading.Event = field(default_factory=threading.Event)

    async def wait(self) -> Generation:
        """The answer, for a task of an event loop, which leaves the seat if it is cancelled."""
        try:
            return await asyncio.wrap_future(self.answer)
        finally:
            self.left.set()


def serve(seats: Sequence[Seat], answer: Answer) -> None:
    """Answer calls in one batch. A batch fails as a whole; alone, each call then gets its own
    answer or its own error."""
    seats = [seat for seat in seats if seat.answer.set_running_or_notify_cancel()]
    if not seats:
        return
    try:
        answers = answer(
            [seat.make_prompt for seat in seats], lambda: all(seat.left.is_set() for seat in seats)
        )
    except BaseException as error:  # noqa: BLE001 -- raised again by the calls
        if len(seats) == 1:
            seats[0].answer.set_exception(error)
            return
        for seat in seats:
            _serve_alone(seat, answer)
        return
    for seat, found in zip(seats, answers, strict=True):
        seat.answer.set_result(found)


def _serve_alone(seat: Seat, answer: Answer) -> None:
    try:
        seat.answer.set_result(answer([seat.make_prompt], seat.left.is_set)[0])
    except BaseException as error:  # noqa: BLE001 -- raised again by the call
        seat.answer.set_exception(error)


class Gathering:
    """Answers calls of event loops. Those that come in the same turn of a loop, or while the model
    is at work, are answered together if they ask for the same options; none waits for company.

    Args:
        answer: as ``Answer``, after the options of the calls.
    """

    def __init__(
        self,
        answer: Callable[
            [dict[str, Any], Sequence[MakePrompt], Callable[[], bool]], list[Generation]
        ],
    ) -> None:
        self._answer = answer
        self._waiting: list[tuple[dict[str, Any], Seat]] = []
        self._lock = threading.Lock()
        self._works = False

    async def answer(self, make_prompt: MakePrompt, options: dict[str, Any]) -> Generation:
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
        threading.Thread(target=self._work, name="blockattn-batch", daemon=True).start()

    def _work(self) -> None:
        while True:
            options, seats = self._next_batch()
            if not seats:
                return
            serve(seats, partial(self._answer, options))

    def _next_batch(self) -> tuple[dict[str, Any], list[Seat]]:
        """Those who wait with the first one's options; when nobody waits, work is over."""
        with self._lock:
            if not self._waiting:
                self._works = False
                return {}, []
            wanted = self._waiting[0][0]
            batch: list[tuple[dict[str, Any], Seat]] = []
            rest: list[tuple[dict[str, Any], Seat]] = []
            for pair in self._waiting:
                fits = len(batch) < BATCH_SIZE and _are_equal(pair[0], wanted)
                (batch if fits else rest).append(pair)
            self._waiting = rest
        return wanted, [seat for _, seat in batch]


def _are_equal(options: dict[str, Any], wanted: dict[str, Any]) -> bool:
    try:
        return options is wanted or bool(options == wanted)
    except (TypeError, ValueError, RuntimeError):  # tensors have no single truth
        return False
