"""A model that a test holds between two tokens: what happens meanwhile is no matter of speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from blockattn_rag.model import decoding

LONGEST_S = 60.0
"""After this a wait fails, so that a test ends that would hang. Nothing is measured by it."""

FEW = 100
"""Tokens that surely hold a few pieces of text, even of a model that writes noise: that a stream's
reader has left is noticed when the next piece comes."""

ALL = 1_000_000


class Held:
    """Holds the model after each token, until the test lets it go on or its readers have left.

    ``tokens``: how many it has made so far; a step of a batch counts once.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._allowed = threading.Semaphore(0)
        self._made_one = threading.Event()
        self._told_to_end = threading.Event()

    def let_go(self, tokens: int = ALL) -> None:
        """Let it make this many tokens more."""
        self._allowed.release(tokens)

    def wait_for_token(self) -> None:
        """Until it has made its first token, after which it stands."""
        assert self._made_one.wait(LONGEST_S), "the model made no token"

    def wait_for_end(self) -> None:
        """Until it was told that nobody reads the answer any more."""
        assert self._told_to_end.wait(LONGEST_S), "nobody told the model to end its answer"

    def after_token(self, is_left: Callable[[], bool]) -> None:
        """In the model's thread."""
        self.tokens += 1
        self._made_one.set()
        until = time.monotonic() + LONGEST_S
        while not (is_left() or self._allowed.acquire(timeout=0.001)):
            assert time.monotonic() < until, "neither was the model let go nor its answer left"
        if is_left():
            self._told_to_end.set()


@contextmanager
def holding() -> Iterator[Held]:
    """Hold every model of this process; they go on when the block ends."""
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
