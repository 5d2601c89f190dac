"""The scheduler runs a model in one thread: batching, cancellation, errors and shutdown."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blockattn_rag.engine import scheduler as scheduling
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import MAX_BATCH, Group, Job, PendingRequest
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation, GenerationChunk, ReuseStats
from blockattn_rag.engine.scheduler import Scheduler
from blockattn_rag.model.exclusion import ModelLock, holds_a_model
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.holding import LONGEST_S


class Model:
    """Model that answers with the text of the prompt, once ``gate`` is set."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.left: list[list[bool]] = []
        self.shares = True

    def answer_batch(self, batch: Sequence[PendingRequest]) -> None:
        texts = [request.prompt().final for request in batch]
        self.batches.append(texts)
        self.started.set()
        assert self.gate.wait(LONGEST_S)
        self.left.append([request.left for request in batch])
        for text, request in zip(texts, batch, strict=True):
            if text == "bad":
                raise ValueError("a bad prompt")
            for letter in text:
                request.emit(letter)
            request.answer.set_result(Generation(text, [], "stop", ReuseStats("block")))

    def can_share(self, options: GenerateOptions) -> bool:
        return self.shares

    def wait_until_started(self) -> None:
        assert self.started.wait(LONGEST_S)


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.gate.set()


def pending(
    model: Model, text: str | Callable[[], BlockPrompt], *, group: Group | None = None,
    max_batch: int = MAX_BATCH, **options: Any,
) -> PendingRequest:  # fmt: skip
    prompt = text if callable(text) else BlockPrompt((), text)
    parsed = GenerateOptions.parse(options, Recipe())
    return PendingRequest(prompt, parsed, model, max_batch=max_batch, group=group)


async def ask(model: Model, text: Any, **options: Any) -> str:
    request = pending(model, text, **options)
    model.scheduler.submit_in_turn(request)
    return (await request.wait()).text


def streamed(model: Model, request: PendingRequest) -> Generator[GenerationChunk, None, None]:
    return request.chunks(partial(model.scheduler.submit, request))


def astreamed(model: Model, request: PendingRequest) -> AsyncGenerator[GenerationChunk, None]:
    return request.achunks(partial(model.scheduler.submit_in_turn, request))


def keep_busy(model: Model) -> PendingRequest:
    """Occupy the model with a request until ``model.gate`` is set."""
    model.gate.clear()
    first = pending(model, "first")
    model.scheduler.submit(first)
    model.wait_until_started()
    return first


def answered(model: Model, *requests: PendingRequest) -> list[str]:
    """Submit requests together, and return the texts of their answers."""
    model.scheduler.submit(*requests)
    return [one.result(LONGEST_S).text for one in requests]


async def started(model: Model) -> None:
    await asyncio.to_thread(model.wait_until_started)


# -- batches ---------------------------------------------------------------------------------------


async def test_calls_of_one_loop_iteration_share_a_batch(model: Model) -> None:
    texts = [f"question {n}" for n in range(MAX_BATCH)]
    assert await asyncio.gather(*(ask(model, text) for text in texts)) == texts
    assert model.batches == [texts]


async def test_a_single_call_does_not_wait_for_others(model: Model) -> None:
    assert await ask(model, "alone") == "alone"
    assert await ask(model, "again") == "again"
    assert model.batches == [["alone"], ["again"]]


def test_requests_that_arrive_while_the_model_is_busy_share_a_batch(model: Model) -> None:
    first = keep_busy(model)
    others = [pending(model, text) for text in "abc"]
    for one in others:
        model.scheduler.submit(one)
    model.gate.set()
    assert [one.result(LONGEST_S).text for one in (first, *others)] == ["first", "a", "b", "c"]
    assert model.batches == [["first"], ["a", "b", "c"]]


def test_requests_beyond_the_batch_size_run_in_further_batches(model: Model) -> None:
    requests = [pending(model, str(n), max_batch=4) for n in range(10)]
    assert answered(model, *requests) == [str(n) for n in range(10)]
    assert [len(batch) for batch in model.batches] == [4, 4, 2]


def test_only_requests_with_equal_options_share_a_batch(model: Model) -> None:
    other = Model()
    requests = [
        pending(model, "a", top_k=1), pending(model, "b", top_k=2), pending(other, "c", top_k=1),
        pending(model, "d", top_k=1),
    ]  # fmt: skip
    assert answered(model, *requests) == ["a", "b", "c", "d"]
    assert model.batches == [["a", "d"], ["b"]]
    assert other.batches == [["c"]]


def test_requests_that_cannot_share_a_batch_run_in_order(model: Model) -> None:
    model.shares = False
    requests = [pending(model, "a"), pending(model, "b", top_k=1), pending(model, "c")]
    assert answered(model, *requests) == ["a", "b", "c"]
    assert model.batches == [["a"], ["b"], ["c"]]


def test_requests_with_incomparable_options_run_alone(model: Model) -> None:
    requests = [pending(model, text, bias=torch.ones(2)) for text in "ab"]
    assert answered(model, *requests) == ["a", "b"]
    assert model.batches == [["a"], ["b"]]


def test_jobs_run_in_order_with_requests(model: Model) -> None:
    keep_busy(model)
    job, last = Job(lambda: [*model.batches]), pending(model, "last")
    model.scheduler.submit(job)
    model.scheduler.submit(last)
    model.gate.set()
    assert last.result(LONGEST_S).text == "last"
    assert job.result(LONGEST_S) == [["first"]]  # ran between the two


def test_a_group_waits_for_all_its_running_calls(model: Model) -> None:
    options: dict[str, Any] = {"top_k": 1}
    group = Group(options, calls=3, at_once=3)
    submitted = threading.Barrier(3, timeout=LONGEST_S)

    def call(text: str | None) -> str | None:
        with group.call():
            if text is None:  # simulates a cached answer
                return None
            joined = Group.of_this_call(options)
            assert joined is group
            assert Group.of_this_call({}) is None  # a nested call with other options
            request = pending(model, text, group=joined, **options)
            model.scheduler.submit(request)
            submitted.wait()
            return request.result(LONGEST_S).text

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, text) for text in "ab"]
        submitted.wait()
        assert answered(model, pending(model, "c")) == ["c"]  # does not wait for the group
        assert model.batches == [["c"]]
        assert call(None) is None
        assert [call.result(LONGEST_S) for call in calls] == ["a", "b"]
    assert sorted(model.batches[1]) == ["a", "b"]


def test_a_closed_group_no_longer_waits(model: Model) -> None:
    group = Group(None, calls=3, at_once=3)
    first = pending(model, "a", group=group)
    model.scheduler.submit(first)
    group.dissolve()
    assert first.result(LONGEST_S).text == "a"


# -- errors ----------------------------------------------------------------------------------------


def test_a_batch_error_is_raised_by_its_unfinished_requests(model: Model) -> None:
    good, bad, behind = requests = [pending(model, text) for text in ("good", "bad", "behind")]
    model.scheduler.submit(*requests)
    assert good.result(LONGEST_S).text == "good"
    for one in (bad, behind):
        with pytest.raises(ValueError, match="a bad prompt"):
            one.result(LONGEST_S)


async def test_a_prompt_error_is_raised_by_its_call(model: Model) -> None:
    with pytest.raises(KeyError):
        await ask(model, Mock(side_effect=KeyError("no tokenizer")))
    assert await ask(model, "next") == "next"


async def test_a_stop_iteration_error_is_wrapped(model: Model) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await asyncio.wait_for(ask(model, lambda: next(iter(()))), LONGEST_S)


async def test_a_failed_thread_start_raises_and_the_next_call_retries(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("can't start new thread")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=error))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await asyncio.wait_for(ask(model, "first"), LONGEST_S)
    assert await asyncio.wait_for(ask(model, "next"), LONGEST_S) == "next"


# -- cancellation ----------------------------------------------------------------------------------


def test_an_error_while_batching_does_not_affect_other_requests(model: Model) -> None:
    first = keep_busy(model)
    requests = [pending(model, text) for text in ("bad size", "good")]
    requests[0].max_batch = 4.5  # type: ignore[assignment]  # no slice has such an end
    model.scheduler.submit(*requests)
    model.gate.set()
    with pytest.raises(TypeError, match="slice"):
        requests[0].result(LONGEST_S)
    assert [one.result(LONGEST_S).text for one in (first, requests[1])] == ["first", "good"]


def test_a_caller_that_times_out_leaves(model: Model) -> None:
    model.gate.clear()
    first, waiting = pending(model, "first"), pending(model, "waiting", top_k=1)
    model.scheduler.submit(first, waiting)
    model.wait_until_started()
    for one in (first, waiting):
        with pytest.raises(TimeoutError):
            one.result(timeout=0.001)
        assert one.left
    model.gate.set()
    assert answered(model, pending(model, "last")) == ["last"]
    assert model.batches == [["first"], ["last"]]
    assert model.left == [[True], [False]]


async def test_cancelling_does_not_affect_other_answers(model: Model) -> None:
    model.gate.clear()
    calls = [asyncio.create_task(ask(model, text)) for text in "ab"]
    await started(model)
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    model.gate.set()
    assert await calls[1] == "b"
    assert calls[0].cancelled()
    assert model.left == [[True, False]]


async def test_a_call_cancelled_while_waiting_never_runs(model: Model) -> None:
    model.gate.clear()
    first = asyncio.create_task(ask(model, "first"))
    await started(model)
    waiting = [asyncio.create_task(ask(model, text)) for text in ("left", "stays")]
    await asyncio.sleep(0)  # submitted in the next iteration of the loop
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    model.gate.set()
    assert await first == "first"
    assert await waiting[1] == "stays"
    assert model.batches == [["first"], ["stays"]]


def test_closing_a_stream_leaves_the_batch(model: Model) -> None:
    chunks = list(streamed(model, pending(model, "abc")))
    assert [chunk.text for chunk in chunks] == ["a", "b", "c", ""]
    assert chunks[-1].generation is not None
    request = pending(model, "abc")
    stream = streamed(model, request)
    next(stream)
    stream.close()
    assert request.left
    with pytest.raises(ValueError, match="a bad prompt"):
        list(streamed(model, pending(model, "bad")))


async def test_closing_an_async_stream_leaves_the_batch(model: Model) -> None:
    chunks = [chunk async for chunk in astreamed(model, pending(model, "abc"))]
    assert [chunk.text for chunk in chunks] == ["a", "b", "c", ""]
    request = pending(model, "abc")
    async with aclosing(astreamed(model, request)) as stream:
        await anext(stream)
    assert request.left
    with pytest.raises(ValueError, match="a bad prompt"):
        async for _ in astreamed(model, pending(model, "bad")):
            pass


def test_callers_leave_when_their_event_loop_closes(model: Model) -> None:
    request = pending(model, "abc")
    stream = astreamed(model, request)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()
    assert request.left
    model.gate.clear()
    waiting = pending(model, "def")
    loop = asyncio.new_event_loop()
    stream = astreamed(model, waiting)
    task = loop.create_task(anext(stream))
    loop.run_until_complete(asyncio.sleep(0))
    model.wait_until_started()
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    model.gate.set()
    assert answered(model, pending(model, "last")) == ["last"]


# -- threads ---------------------------------------------------------------------------------------


async def test_prompts_are_built_with_the_callers_context_variables(model: Model) -> None:
    user: ContextVar[str] = ContextVar("user")

    async def call(name: str) -> str:
        user.set(name)
        return await ask(model, lambda: BlockPrompt((), user.get()))

    assert await asyncio.gather(*(call(name) for name in ("ann", "bob"))) == ["ann", "bob"]


def test_uses_the_thread_count_of_the_caller(model: Model) -> None:
    mine = torch.get_num_threads()
    try:
        for number in (2, 1):
            torch.set_num_threads(number)
            job = Job(torch.get_num_threads)
            model.scheduler.submit(job)
            assert job.result(LONGEST_S) == number
    finally:
        torch.set_num_threads(mine)


def test_a_nested_call_runs_immediately(model: Model) -> None:
    def ask_inside() -> tuple[str, int]:
        inner = pending(model, "inner")
        model.scheduler.submit(inner)  # would deadlock if it were queued behind this job
        return inner.result(LONGEST_S).text, threading.get_ident()

    job = Job(ask_inside)
    model.scheduler.submit(job)
    text, thread = job.result(LONGEST_S)
    assert text == "inner"
    assert thread != threading.get_ident()
    lock = ModelLock()
    assert not holds_a_model()
    with lock:
        assert ask_inside() == ("inner", threading.get_ident())
    assert not holds_a_model()


def test_idle_model_runs_in_the_main_thread(model: Model) -> None:
    found: list[threading.Thread] = []

    def ask_here() -> None:
        found.append(model.scheduler.run(threading.current_thread))

    ask_here()
    for _ in range(2):
        thread = threading.Thread(target=ask_here)
        thread.start()
        thread.join(LONGEST_S)
    ask_here()  # the model's thread has not exited yet, but is idle
    here, other, *again = found
    assert here is threading.main_thread()
    assert other.name == "blockattn-model"
    assert again == [other, here]


def test_the_main_thread_waits_for_earlier_requests(model: Model) -> None:
    first, second = keep_busy(model), pending(model, "second", top_k=1)
    model.scheduler.submit(second)
    soon = threading.Timer(0.05, model.gate.set)
    soon.start()
    [last] = model.scheduler.submit_and_wait(pending(model, "last", top_k=2))
    assert last.text == "last"
    assert model.batches == [["first"], ["second"], ["last"]]
    assert [one.result(LONGEST_S).text for one in (first, second)] == ["first", "second"]


def test_the_main_thread_also_forms_batches(model: Model) -> None:
    requests = [pending(model, str(n), max_batch=4, top_k=2 if n == 1 else 3) for n in range(7)]
    answers = model.scheduler.submit_and_wait(*requests)
    assert [answer.text for answer in answers] == [str(n) for n in range(7)]
    assert model.batches == [["0", "2", "3", "4"], ["1"], ["5", "6"]]


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_requests_are_released_after_an_error(model: Model, in_main_thread: bool) -> None:
    requests = [pending(model, text, max_batch=1) for text in ("good", "bad", "late")]

    def ask_all() -> None:
        with pytest.raises(ValueError, match="a bad prompt"):
            model.scheduler.submit_and_wait(*requests)

    if in_main_thread:
        ask_all()
        assert model.batches == [["good"], ["bad"]]
    else:
        asyncio.run(asyncio.to_thread(ask_all))
    assert all(one.left for one in requests)


def test_idle_thread_is_restarted(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_IDLE_S", 0.01)
    jobs = [Job(threading.current_thread) for _ in range(2)]
    threads = []
    for job in jobs:
        model.scheduler.submit(job)
        threads.append(job.result(LONGEST_S))
        threads[-1].join(LONGEST_S)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]
