"""One event loop in a thread of its own, for all that this process asks of servers.

Connections belong to an event loop. With one for all, callers in threads and in event loops of
their own, which may come and go, share the same connections and the same code.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from blockattn_rag.engine.threads import start_thread

T = TypeVar("T")


class Background:
    """An event loop that starts when it is first needed, and ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, which is running.

        Raises:
            RuntimeError: the system has no thread to give.
        """
        with self._lock:
            if self._loop is None:
                started: Future[asyncio.AbstractEventLoop] = Future()
                stop = asyncio.Event()
                start_thread(
                    lambda: asyncio.run(_run_until(stop, started)),
                    "blockattn-remote",
                    lambda: started.result().call_soon_threadsafe(stop.set),
                )
                self._loop = started.result()
            return self._loop

    @property
    def running(self) -> asyncio.AbstractEventLoop | None:
        """The loop, if it was needed yet and has not ended."""
        return None if self._loop is None or self._loop.is_closed() else self._loop

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin some work; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


async def _run_until(stop: asyncio.Event, started: Future[asyncio.AbstractEventLoop]) -> None:
    started.set_result(asyncio.get_running_loop())
    await stop.wait()


background = Background()

if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads.
    os.register_at_fork(after_in_child=background.__init__)  # type: ignore[misc]
