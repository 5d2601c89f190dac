"""Background threads that end before the interpreter shuts down.

A daemon thread that is inside PyTorch during the shutdown aborts the process.
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
    """Run ``work`` in a background thread. At exit, ``stop`` is called to end it soon."""
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
