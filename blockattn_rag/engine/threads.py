"""Threads that work beside a caller, and end before the interpreter does.

A daemon thread that is inside PyTorch when the interpreter goes away aborts the process.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

_LONGEST_END_S = 10.0

_stops: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


def start_thread(
    work: Callable[[], object], name: str, stop: Callable[[], object]
) -> threading.Thread:
    """Run ``work`` in a thread; ``stop`` asks it to end soon, when the process ends.

    Raises:
        RuntimeError: the system has no thread to give.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    for stop in list(_stops.values()):
        stop()
    for thread in list(_stops):
        if thread.is_alive():
            thread.join(_LONGEST_END_S)
