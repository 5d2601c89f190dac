"""Pause a model between tokens, so that tests do not depend on the speed of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from blockattn_rag.model import decoding

LONGEST_S = 60.0
"""Seconds after which a wait fails instead of hanging. Tests never depend on the exact value."""

FEW = 100
"""Enough tokens for several pieces of text, even from a random model. An abandoned stream is only
detected when the next piece is emitted."""

ALL = 1_000_000


class Held:
    """Pauses the model after each token, until the test lets it continue or all readers have left.
    ``tokens``: Number of tokens generated so far. A step of a batch counts as one."""

    def __init__(self) -> None:
        self.tokens = 0
        self._allowed = threading.Semaphore(0)
        self._made_one = threading.Event()
        self._told_to_end = threading.Event()

    def let_go(self, tokens: int = ALL) -> None:
        """Let the model generate this many more tokens."""
        self._allowed.release(tokens)

    def wait_for_token(self) -> None:
        """Wait until the model has generated its first token and is paused."""
        assert self._made_one.wait(LONGEST_S), "the model generated no token"

    def wait_for_end(self) -> None:
        """Wait until generation is ended because no reader is left."""
        assert self._told_to_end.wait(LONGEST_S), "the answer was not ended"

    def after_token(self, is_left: Callable[[], bool]) -> None:
        """Called after each token, in the model's thread."""
        self.tokens += 1
        self._made_one.set()
        until = time.monotonic() + LONGEST_S
        while not (is_left() or self._allowed.acquire(timeout=0.001)):
            assert time.monotonic() < until, (
                "the model was neither resumed nor its answer abandoned"
            )
        if is_left():
            self._told_to_end.set()


@contextmanager
def holding() -> Iterator[Held]:
    """Pause all models of this process until the end of the ``with`` block."""
    held, criterion = Held(), decoding._AfterEachStep
    original = criterion.__call__

    def after_step(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        met = original(self, input_ids, *args, **kwargs)
        held.after_token(self._is_cancelled)
        return met | self._is_cancelled()

    with mock.patch.object(criterion, "__call__", after_step):
        try:
            yield held
        finally:
            held.let_go()
