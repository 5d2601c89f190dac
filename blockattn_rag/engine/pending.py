"""Items in a model's queue: functions to run, and prompts to answer."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.prompts.blocks import Block, BlockPrompt

T = TypeVar("T")

MAX_BATCH = 16
"""Default maximum number of requests in a batch."""

Prompt = BlockPrompt | Sequence["str | Block"]
LatePrompt = Prompt | Callable[[], Prompt]
"""A prompt, or a function that creates it when the request is processed."""


def to_block_prompt(prompt: LatePrompt) -> BlockPrompt:
    made = prompt() if callable(prompt) else prompt
    return made if isinstance(made, BlockPrompt) else BlockPrompt.from_texts(made)


class Group:
    """Group of concurrent calls whose requests should share a batch.

    At most ``at_once`` of the ``calls`` calls run at a time. Requests with ``options`` wait until
    each running call has submitted one, or has ended, for example because its answer was cached.
    """

    _current: ContextVar[Group | None] = ContextVar("blockattn_group", default=None)

    def __init__(self, options: object, calls: int, at_once: int) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._options = options
        self._remaining = calls
        self._at_once = at_once
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context manager for one call, to be used in the call's own thread or task."""
        token = self._current.set(self)
        try:
            yield
        finally:
            with self._lock:
                self._remaining -= 1
            self.on_change()
            self._current.reset(token)

    def dissolve(self) -> None:
        """Stop waiting for further requests, because the remaining calls may never start."""
        with self._lock:
            self._remaining = 0
        self.on_change()

    @classmethod
    def of_this_call(cls, options: object) -> Group | None:
        group = cls._current.get()
        return group if group is not None and group._options == options else None

    def is_complete(self, waiting: int) -> bool:
        """Whether all running calls have submitted a request. ``waiting``: Queued requests."""
        return waiting >= min(self._at_once, self._remaining)


class Pending(Generic[T]):
    """A queue item with a future for its result."""

    group: Group | None = None
    needs: Future[Any] | None = None  # The work can start once this future is done.
    loop: asyncio.AbstractEventLoop | None = None  # Event loop of an async caller.
    max_batch = 1

    def __init__(self) -> None:
        self.answer: Future[T] = Future()
        self.started = time.perf_counter()
        self._left = threading.Event()
        self._context = copy_context()
        self._num_threads = torch.get_num_threads()

    @property
    def left(self) -> bool:
        """Whether the caller has stopped waiting for the result."""
        return self._left.is_set() or (self.loop is not None and self.loop.is_closed())

    def leave(self) -> None:
        self._left.set()
        self.answer.cancel()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, or raise the work's error. ``timeout``: Seconds until the work is
        canceled and ``TimeoutError`` is raised. Default: no limit."""
        try:
            return self.answer.result(timeout)
        finally:
            self.leave()

    async def wait(self) -> T:
        """Async ``result``. Canceling the task cancels the work."""
        self.loop = asyncio.get_running_loop()
        try:
            return await asyncio.wrap_future(self.answer)
        finally:
            self.leave()

    @property
    def is_ready(self) -> bool:
        return self.group is None and (self.needs is None or self.needs.done())

    def begin(self) -> bool:
        """Mark the work as running, unless its caller has left. Returns whether to run it."""
        return not self.left and self.answer.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):  # asyncio futures reject StopIteration.
            named = RuntimeError(f"Creating the prompt or its answer raised {error!r}.")
            named.__cause__ = error
            error = named
        if not self.answer.done():
            self.answer.set_exception(error)

    def joins(self, first: Pending[Any]) -> bool:
        """Whether this work can share a batch with ``first``."""
        return False

    def run(self, batch: Sequence[Pending[Any]]) -> None:
        """Run a batch that starts with this item, with the caller's context variables and number of
        PyTorch threads."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        self._context.copy().run(self._serve, batch)

    def _serve(self, batch: Sequence[Pending[Any]]) -> None:
        raise NotImplementedError


class Job(Pending[T]):
    """A function to run between answers, for example to encode a few blocks."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work = work

    def _serve(self, batch: Sequence[Pending[Any]]) -> None:
        self.answer.set_result(self._work())


class BatchRunner(Protocol):
    """Interface of ``runner.Runner``."""

    def answer_batch(self, batch: Sequence[PendingRequest], /) -> None: ...

    def can_share(self, options: GenerateOptions, /) -> bool: ...


class PendingRequest(Pending[Generation]):
    """A prompt that is waiting for its answer.

    Args:
        prompt: The prompt, or a function that creates it. The function may be slow, so it runs on
            the model's thread: the caller's thread may run an event loop.
        needs: Future of the compiled grammar. Until it is done, other requests may run.
    """

    def __init__(
        self,
        prompt: LatePrompt,
        options: GenerateOptions,
        runner: BatchRunner,
        *,
        max_batch: int = MAX_BATCH,
        needs: Future[Any] | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.max_batch = max_batch
        self.needs = needs
        self.group = group
        self.on_chunk: Callable[[GenerationChunk], object] | None = None
        self._prompt = prompt
        self._runner = runner

    def prompt(self) -> BlockPrompt:
        return self._context.copy().run(to_block_prompt, self._prompt)

    def emit(self, text: str, token_ids: Sequence[int] = ()) -> None:
        if text and self.on_chunk is not None:
            self.on_chunk(GenerationChunk(text, token_ids=tuple(token_ids)))

    def chunks(self, submit: Callable[[], object]) -> Generator[GenerationChunk, None, None]:
        """Submit the request and stream its answer. The last chunk has the complete answer."""
        chunks: queue.SimpleQueue[GenerationChunk | None] = queue.SimpleQueue()
        self.on_chunk = chunks.put
        self.answer.add_done_callback(lambda _: chunks.put(None))
        try:
            submit()
            while (chunk := chunks.get()) is not None:
                yield chunk
            yield GenerationChunk("", self.answer.result())
        finally:
            self.leave()

    async def achunks(self, submit: Callable[[], object]) -> AsyncGenerator[GenerationChunk, None]:
        loop = self.loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[GenerationChunk | None] = asyncio.Queue()

        def put(chunk: GenerationChunk | None) -> None:
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # The loop is closed, so nobody is reading the stream.
                self.leave()

        self.on_chunk = put
        self.answer.add_done_callback(lambda _: put(None))
        try:
            submit()
            while (chunk := await chunks.get()) is not None:
                yield chunk
            yield GenerationChunk("", self.answer.result())
        finally:
            self.leave()

    def joins(self, first: Pending[Any]) -> bool:
        return (
            isinstance(first, PendingRequest)
            and self._runner is first._runner
            and self.max_batch == first.max_batch
            and self.options == first.options
            and self._runner.can_share(self.options)
        )

    def _serve(self, batch: Sequence[Pending[Any]]) -> None:
        self._runner.answer_batch(cast("Sequence[PendingRequest]", batch))  # See `joins`.
