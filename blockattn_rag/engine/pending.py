"""Work that waits for the model: what it is, for whom it is done, and what becomes of it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar, cast

import torch

from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.results import Generation, GenerationChunk, Marks
from blockattn_rag.prompts.blocks import BlockPrompt

T = TypeVar("T")

MAX_BATCH = 16
"""Requests that are answered in one batch at most, unless the caller says otherwise."""


class Group:
    """Calls that run side by side, and whose requests are to be answered in one batch.

    The requests of a group wait until every call under way has made its own, or has ended without
    one (its answer was in a cache, say).

    Args:
        options: requests with other options are no part of the group; the model is one of them.
        calls: how many calls there will be in all.
        at_once: how many of them run side by side.
    """

    _current: ContextVar[Group | None] = ContextVar("blockattn_group", default=None)

    def __init__(self, options: object, calls: int, at_once: int) -> None:
        self.on_change: Callable[[], object] | None = None
        self._options = options
        self._remaining = calls
        self._at_once = at_once
        self._lock = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds one of the calls, in its own thread or task."""
        token = self._current.set(self)
        try:
            yield
        finally:
            with self._lock:
                self._remaining -= 1
            self._tell()
            self._current.reset(token)

    def dissolve(self) -> None:
        """Wait for no more calls, because some will never begin."""
        with self._lock:
            self._remaining = 0
        self._tell()

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()

    @classmethod
    def of_this_call(cls, options: object) -> Group | None:
        """The group of the call that runs here, if it has these options."""
        group = cls._current.get()
        return group if group is not None and group._options == options else None

    def is_complete(self, waiting: int) -> bool:
        """Whether all calls under way wait, if so many of them do."""
        return waiting >= min(self._at_once, self._remaining)


class Pending(Generic[T]):
    """A piece of work that waits for the model, and the future of its result."""

    group: Group | None = None
    needs: Future[Any] | None = None  # what must be done first, in another thread
    loop: asyncio.AbstractEventLoop | None = None  # of the caller, if it is a task
    max_batch = 1

    def __init__(self) -> None:
        self.answer: Future[T] = Future()
        self.started = time.perf_counter()
        self._left = threading.Event()
        self._context = copy_context()
        self._num_threads = torch.get_num_threads()

    @property
    def left(self) -> bool:
        """Whether the caller no longer waits for the result."""
        return self._left.is_set() or (self.loop is not None and self.loop.is_closed())

    def leave(self) -> None:
        """Wait no longer: work that has not begun is dropped, an answer ends at its next token."""
        self._left.set()
        self.answer.cancel()

    def result(self, timeout: float | None = None) -> T:
        """The result, or the error that the work raised.

        Args:
            timeout: seconds to wait; after that the work is left.

        Raises:
            TimeoutError: the result did not come in time.
        """
        try:
            return self.answer.result(timeout)
        finally:
            self.leave()

    async def wait(self) -> T:
        """``result`` for a task of an event loop; a task that is cancelled leaves the work."""
        self.loop = asyncio.get_running_loop()
        try:
            return await asyncio.wrap_future(self.answer)
        finally:
            self.leave()

    @property
    def is_ready(self) -> bool:
        """Whether the work need not wait for anything but the model."""
        return self.group is None and (self.needs is None or self.needs.done())

    def begin(self) -> bool:
        """Whether the work is still wanted. From here on the future cannot be cancelled."""
        return not self.left and self.answer.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Raise the error in the caller, unless there is a result already."""
        if isinstance(error, StopIteration):  # because no task of an event loop can hold one
            named = RuntimeError(f"making the prompt or its answer raised {error!r}")
            named.__cause__ = error
            error = named
        if not self.answer.done():
            self.answer.set_exception(error)

    def as_the_caller(self, work: Callable[[], T]) -> T:
        """Run some work with the caller's context variables and number of PyTorch threads."""
        # PyTorch keeps that number for each thread apart.
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        return self._context.copy().run(work)

    def joins(self, first: Pending[Any]) -> bool:
        """Whether this work can share a batch with ``first``."""
        return False

    def serve(self, batch: Sequence[Pending[Any]]) -> None:
        """Do the work of a batch that begins with this: give each its result or its error."""
        raise NotImplementedError


class Job(Pending[T]):
    """A function to run while no answer runs, such as the encoding of a few blocks."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work = work

    def serve(self, batch: Sequence[Pending[Any]]) -> None:
        self.answer.set_result(self._work())


class PendingAnswer(Pending[Generation]):
    """A prompt that waits for its answer.

    Args:
        make_prompt: makes the prompt on another thread than the caller's, because that may take a
            while and the caller may be an event loop.
    """

    def __init__(self, make_prompt: Callable[[], BlockPrompt]) -> None:
        super().__init__()
        self.on_chunk: Callable[[GenerationChunk], object] | None = None
        self._make_prompt = make_prompt

    def prompt(self) -> BlockPrompt:
        """The prompt, made with the caller's context variables."""
        return self._context.copy().run(self._make_prompt)

    def emit(self, text: str, marks: Marks = ()) -> None:
        """Hand a piece of the answer to whoever reads the answer as it comes."""
        if text and self.on_chunk is not None:
            self.on_chunk(GenerationChunk(text, marks=marks))

    def chunks(self, submit: Callable[[], object]) -> Generator[GenerationChunk, None, None]:
        """Submit the request and yield its answer as it comes; the last chunk carries the whole."""
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
        """``chunks`` for a task of an event loop."""
        loop = self.loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[GenerationChunk | None] = asyncio.Queue()

        def put(chunk: GenerationChunk | None) -> None:
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the loop is closed: nobody reads any more
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


class PendingRequest(PendingAnswer):
    """A prompt that waits for the model.

    Args:
        make_prompt: see ``PendingAnswer``; called on the model's thread.
        options: how to answer.
        answer_batch: answers requests with equal options; the engine's.
        can_share: whether these options give in a batch what they give alone; asked when another
            such request waits.
        max_batch: size of the largest batch that the request may be part of.
        group: the requests to answer this one together with.
        needs: future of the compiled grammar; the request waits for it, and others overtake it.
    """

    def __init__(
        self,
        make_prompt: Callable[[], BlockPrompt],
        options: GenerateOptions,
        answer_batch: Callable[[Sequence[PendingRequest]], None],
        can_share: Callable[[], bool],
        *,
        max_batch: int = MAX_BATCH,
        group: Group | None = None,
        needs: Future[Any] | None = None,
    ) -> None:
        super().__init__(make_prompt)
        self.options = options
        self.max_batch = max_batch
        self.group = group
        self.needs = needs
        self._answer_batch = answer_batch
        self._can_share = can_share

    def joins(self, first: Pending[Any]) -> bool:
        return (
            isinstance(first, PendingRequest)
            and self._answer_batch == first._answer_batch
            and self.max_batch == first.max_batch
            and self.options == first.options
            and self._can_share()
        )

    def serve(self, batch: Sequence[Pending[Any]]) -> None:
        self._answer_batch(cast("Sequence[PendingRequest]", batch))  # nothing else joins it
