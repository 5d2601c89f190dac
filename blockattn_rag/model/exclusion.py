"""Locks that serialize the use of a model, and prevent other random draws during a seeded run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel


class ModelLock:
    """Lock of a model, which is held while the model runs.

    Reentrant, because a logits processor may call the engine that runs it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        _this_thread.models -= 1
        self._lock.release()

    def enter(self, *, wait: bool = True) -> bool:
        """Acquire the lock, and return whether this succeeded. ``wait=False`` never blocks."""
        taken = self._lock.acquire(blocking=wait)
        _this_thread.models += taken
        return taken


class _ThisThread(threading.local):
    models = 0  # Number of model locks that the thread holds, including nested acquisitions.


_this_thread = _ThisThread()


def holds_a_model() -> bool:
    return _this_thread.models > 0


@contextmanager
def counts_as_holder() -> Iterator[None]:
    """Context manager that makes the thread count as running a model, even between model calls."""
    _this_thread.models += 1
    try:
        yield
    finally:
        _this_thread.models -= 1


_locks: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(hf_model: nn.Module) -> ModelLock:
    """Lock of a model. A PEFT wrapper shares the lock of the wrapped model."""
    whole = (module for module in hf_model.modules() if isinstance(module, PreTrainedModel))
    with _guard:
        return _locks.setdefault(next(whole, hf_model), ModelLock())


@contextmanager
def turn_to_draw(lock: ModelLock, *, alone: bool) -> Iterator[None]:
    """Context manager that holds the model's lock, and the right to draw random numbers.

    All threads share PyTorch's random state. A seeded run (``alone``) therefore excludes other runs
    that draw random numbers, because their draws would affect each other. Runs without a seed may
    draw concurrently. Draws outside this package are not prevented.

    Never wait for the lock while holding the right to draw, or vice versa; that could deadlock.
    """
    while True:
        with _draws.entered(alone=alone):
            if lock.enter(wait=False):
                try:
                    yield
                finally:
                    lock.__exit__()
                return
        with lock:  # Wait for the model without the right to draw, then retry.
            pass


class _Draws:
    """Readers-writer lock, which admits one thread exclusively, or any number of threads together.
    Reentrant: a thread that holds the lock may acquire it again in the same mode."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depths: dict[int, int] = {}  # Nesting depth of each thread that holds the lock.
        self._is_alone = False
        self._waiting = 0  # Number of threads waiting for exclusive access, which has priority.

    @contextmanager
    def entered(self, *, alone: bool) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            if me not in self._depths:
                self._wait(alone)
            self._depths[me] = self._depths.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._depths[me] -= 1
                if not self._depths[me]:
                    del self._depths[me]
                    self._is_alone = False
                    self._changed.notify_all()

    def _wait(self, alone: bool) -> None:
        if not alone:
            self._changed.wait_for(lambda: not self._is_alone and not self._waiting)
            return
        self._waiting += 1
        try:
            self._changed.wait_for(lambda: not self._depths)
        finally:  # Release the lock even after an interrupt, so that other threads can proceed.
            self._waiting -= 1
            self._changed.notify_all()
        self._is_alone = True


_draws = _Draws()


def _reset_in_child() -> None:
    """Reset all locks in a forked process, where the threads that held them do not exist."""
    for lock in list(_locks.values()):
        lock.__init__()  # type: ignore[misc]
    _draws.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
