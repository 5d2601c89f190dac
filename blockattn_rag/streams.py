"""A blocking iterator read from an event loop, without ever blocking the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")
_END = object()


async def iterate_in_thread(
    start: Callable[[], Generator[T, None, None]],
) -> AsyncGenerator[T, None]:
    """Yield what ``start()`` yields, computed in a worker thread.

    Whatever ends this generator early (``aclose``, a cancelled task) closes the inner one before
    its next item, which frees the model. Errors of the thread are raised here.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[T | object] = asyncio.Queue()
    abandoned = threading.Event()

    def produce() -> None:
        try:
            if abandoned.is_set():
                return
            with closing(start()) as items:
                for item in items:
                    if abandoned.is_set():
                        return
                    loop.call_soon_threadsafe(queue.put_nowait, item)
        finally:
            # After asyncio.run has closed the loop nobody listens any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, _END)

    producer = asyncio.ensure_future(asyncio.to_thread(produce))
    try:
        while (item := await queue.get()) is not _END:
            yield item  # type: ignore[misc]
        await producer
    finally:
        abandoned.set()
        # An error that comes after the reader has left has nobody to go to; asyncio would log it.
        producer.add_done_callback(lambda task: task.cancelled() or task.exception())
