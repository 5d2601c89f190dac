"""Who may run: one request at a time per model, and seeded draws alone in the whole process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel


class ModelLock:
    """Whoever holds it runs the model. Reentrant, because a logits processor may ask the engine
    that runs it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        _this_thread.models -= 1
        self._lock.release()

    def enter(self, *, wait: bool = True) -> bool:
        """Take the lock, without ``wait`` only if it is free; whether it was taken."""
        taken = self._lock.acquire(blocking=wait)
        _this_thread.models += taken
        return taken


class _ThisThread(threading.local):
    """How many locks of models the running thread holds, counting one as often as entered."""

    models = 0


_this_thread = _ThisThread()


def holds_a_model() -> bool:
    """Whether this thread runs a model now."""
    return _this_thread.models > 0


@contextmanager
def counts_as_holder() -> Iterator[None]:
    """Surrounds what a thread does that exists to run a model, between its models' calls too."""
    _this_thread.models += 1
    try:
        yield
    finally:
        _this_thread.models -= 1


_locks: WeakKeyDictionary[nn.Module, ModelLock] = WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(hf_model: nn.Module) -> ModelLock:
    """The lock that all share who run this model, or the same model wrapped by PEFT."""
    whole = (module for module in hf_model.modules() if isinstance(module, PreTrainedModel))
    with _guard:
        return _locks.setdefault(next(whole, hf_model), ModelLock())


@contextmanager
def turn_to_draw(lock: ModelLock, *, alone: bool) -> Iterator[None]:
    """Surrounds a run that draws: it has the model, and a turn to draw.

    PyTorch's random state is one for all threads. So a seeded run is the only one that draws
    (``alone``): it neither loses draws to a model in another thread nor gives that its seed. Runs
    without a seed draw beside each other. Draws outside this package are not kept out.

    A thread that waits for one of the two holds not the other, because the thread that has the
    other may be waiting for the one.
    """
    while True:
        with _draws.entered(alone=alone):
            if lock.enter(wait=False):
                try:
                    yield
                finally:
                    lock.__exit__()
                return
        with lock:  # until the model is free
            pass


class _Draws:
    """Lets in one thread alone, or any number together. Who is in may enter again, as it is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._depths: dict[int, int] = {}  # of the threads inside
        self._is_alone = False
        self._waiting = 0  # to be alone; who comes later waits for them

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
        finally:  # an interrupt lets those behind go on
            self._waiting -= 1
            self._changed.notify_all()
        self._is_alone = True


_draws = _Draws()


def _reset_in_child() -> None:
    """A forked process has none of the threads that held something when it was forked."""
    for lock in list(_locks.values()):
        lock.__init__()  # type: ignore[misc]
    _draws.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
