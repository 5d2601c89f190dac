"""Streams across threads: an answer read as it is made, a blocking iterator read from a loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing
from typing import TypeVar

from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.engine.threads import start_thread

T = TypeVar("T")
_END = object()

Answering = Callable[[Callable[[str], None], Callable[[], bool]], Generation]
"""Makes an answer: calls back with each piece of text, asks whether its reader has gone."""


def stream_from_thread(answering: Answering) -> Iterator[GenerationChunk]:
    """The pieces of an answer that a thread of its own makes; the last one carries the whole.

    Errors of the thread are raised here. Leaving the iterator early lets the thread end.
    """
    chunks: queue.SimpleQueue[GenerationChunk | BaseException] = queue.SimpleQueue()
    left = threading.Event()

    def work() -> None:
        try:
            answer = answering(lambda text: chunks.put(GenerationChunk(text)), left.is_set)
            chunks.put(GenerationChunk("", answer))
        except BaseException as error:  # noqa: BLE001 -- raised again by the reader
            chunks.put(error)

    start_thread(work, "blockattn-stream", left.set)
    try:
        while True:
            chunk = chunks.get()
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk
            if chunk.generation is not None:
                return
    finally:
        left.set()


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
