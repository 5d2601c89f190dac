"""Nothing blocks the event loop, and whoever leaves frees the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from blockattn_rag.generation import GenerationChunk
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.streams import iterate_in_thread
from tests.llama_index.conftest import RecordingEngine

LONG = 400


class Ticker:
    """Counts how often the event loop gets its turn."""

    def __init__(self) -> None:
        self.ticks = 0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            self.ticks += 1

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()


@pytest.mark.parametrize("method", ["acomplete", "astream_complete"])
async def test_the_event_loop_ticks_while_the_model_works(
    llm: BlockAttentionLLM, method: str
) -> None:
    async with Ticker() as ticker:
        started = time.perf_counter()
        answer = await getattr(llm, method)("x" * 500, max_new_tokens=40)
        if method == "astream_complete":
            [step async for step in answer]
        busy_s = time.perf_counter() - started
    assert ticker.ticks > 3
    assert ticker.ticks > busy_s / 0.1


async def free_within(llm: BlockAttentionLLM, seconds: float) -> bool:
    """Whether the model answers a short prompt soon: nobody holds it any more."""
    await asyncio.wait_for(asyncio.to_thread(llm.complete, "Hi", max_new_tokens=1), seconds)
    return True


async def test_a_cancelled_call_frees_the_model(
    llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    task = asyncio.create_task(llm.acomplete("x" * 50, max_new_tokens=LONG * 10))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await free_within(llm, 10)
    assert [call.options["max_new_tokens"] for call in engine.calls] == [1]


async def test_an_abandoned_async_stream_frees_the_model(
    llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    steps = await llm.astream_complete("x" * 50, max_new_tokens=LONG * 10)
    async for _ in steps:
        break
    await steps.aclose()
    assert await free_within(llm, 10)
    assert [call.options["max_new_tokens"] for call in engine.calls] == [1]


def test_of_two_streams_one_abandoned_the_other_gets_its_answer(llm: BlockAttentionLLM) -> None:
    expected = llm.complete("Hello", max_new_tokens=30).text
    abandoned = llm.stream_complete("x" * 50, max_new_tokens=LONG * 10)
    next(abandoned)
    answers: list[str] = []

    def read() -> None:
        answers.extend(step.text for step in llm.stream_complete("Hello", max_new_tokens=30))

    reader = threading.Thread(target=read)
    reader.start()
    del abandoned
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert answers[-1] == expected


def test_two_threads_stream_at_once_and_both_are_right(llm: BlockAttentionLLM) -> None:
    prompts = ["Hello", "Good day"]
    expected = [llm.complete(prompt, max_new_tokens=20).text for prompt in prompts]
    answers: dict[str, str] = {}

    def read(prompt: str) -> None:
        answers[prompt] = "".join(
            step.delta or "" for step in llm.stream_complete(prompt, max_new_tokens=20)
        )

    readers = [threading.Thread(target=read, args=(prompt,)) for prompt in prompts]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(timeout=60)
    assert [answers[prompt] for prompt in prompts] == expected


async def test_many_calls_at_once_are_answered_in_turn(llm: BlockAttentionLLM) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    expected = [llm.complete(prompt).text for prompt in prompts]
    answers = await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))
    assert [answer.text for answer in answers] == expected


async def test_errors_of_the_thread_reach_the_caller(llm: BlockAttentionLLM) -> None:
    with pytest.raises(ValueError, match="bogus"):
        await llm.acomplete("Hi", bogus=1)
    with pytest.raises(ValueError, match="bogus"):
        [step async for step in await llm.astream_complete("Hi", bogus=1)]


async def test_leaving_closes_the_inner_iterator() -> None:
    closed = threading.Event()

    def numbers() -> Generator[int, None, None]:
        try:
            for number in range(10**9):
                time.sleep(0.001)
                yield number
        finally:
            closed.set()

    async for number in iterate_in_thread(numbers):
        if number == 3:
            break
    assert await asyncio.to_thread(closed.wait, 5)


async def test_a_failing_engine_ends_the_stream(
    llm: BlockAttentionLLM, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prompt: object, **options: object) -> Iterator[GenerationChunk]:
        yield GenerationChunk("one")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "stream", fail)
    steps = await llm.astream_complete("Hi")
    assert (await anext(steps)).text == "one"
    with pytest.raises(RuntimeError, match="out of memory"):
        await anext(steps)


async def test_gathered_calls_share_a_batch_and_answer_as_alone(
    llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    prompts = [f"Question {n}?" for n in range(5)]
    alone = [llm.complete(prompt).text for prompt in prompts]
    gathered = await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))
    assert [answer.text for answer in gathered] == alone
    assert engine.batches == [5]


async def test_of_two_gathered_calls_one_cancelled_the_other_gets_its_answer(
    llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    expected = llm.complete("x" * 50, max_new_tokens=LONG).text
    calls = [asyncio.create_task(llm.acomplete("x" * 50, max_new_tokens=LONG)) for _ in range(2)]
    await asyncio.sleep(0.1)
    calls[0].cancel()
    assert (await calls[1]).text == expected
    assert calls[0].cancelled()
