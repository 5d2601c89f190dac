"""Nothing blocks the event loop, and whoever leaves frees the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from blockattn_rag.engine.results import GenerationChunk
from blockattn_rag.llama_index import BlockAttentionLLM
from tests.holding import FEW, LONGEST_S, Held
from tests.llama_index.conftest import RecordingEngine

LONG = 4000  # tokens: more than any test lets the model make


@pytest.mark.parametrize("method", ["acomplete", "astream_complete"])
async def test_the_event_loop_ticks_while_the_model_works(
    llm: BlockAttentionLLM, held: Held, method: str
) -> None:
    async def work() -> None:
        answer = await getattr(llm, method)("x" * 50)
        if method == "astream_complete":
            assert [step async for step in answer]

    task = asyncio.create_task(work())
    await asyncio.to_thread(held.wait_for_token)
    for _ in range(10):  # turns of the loop, while the model stands in the middle of an answer
        await asyncio.sleep(0)
    assert (held.tokens, task.done()) == (1, False)
    held.let_go()
    await task


def answers_again(llm: BlockAttentionLLM, held: Held, engine: RecordingEngine) -> bool:
    """Whether an answer that was left ended early, was not recorded, and holds up nobody."""
    held.wait_for_end()
    assert held.tokens <= 2 * FEW + 1
    held.let_go()
    llm.complete("Hi", max_new_tokens=1)
    return [call.options["max_new_tokens"] for call in engine.calls] == [1]


async def test_a_cancelled_call_frees_the_model(
    llm: BlockAttentionLLM, held: Held, engine: RecordingEngine
) -> None:
    task = asyncio.create_task(llm.acomplete("x" * 50, max_new_tokens=LONG))
    await asyncio.to_thread(held.wait_for_token)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(answers_again, llm, held, engine)


async def test_an_abandoned_async_stream_frees_the_model(
    llm: BlockAttentionLLM, held: Held, engine: RecordingEngine
) -> None:
    steps = await llm.astream_complete("x" * 50, max_new_tokens=LONG)
    held.let_go(FEW)
    async for _ in steps:
        break
    await steps.aclose()
    held.let_go(FEW)
    assert await asyncio.to_thread(answers_again, llm, held, engine)


def test_of_two_streams_one_abandoned_the_other_gets_its_answer(
    llm: BlockAttentionLLM, held: Held
) -> None:
    abandoned = llm.stream_complete("x" * 50, max_new_tokens=LONG)
    held.let_go(FEW)
    next(abandoned)
    answers: list[str] = []

    def read() -> None:
        answers.extend(step.text for step in llm.stream_complete("Hello", max_new_tokens=30))

    reader = threading.Thread(target=read)
    reader.start()
    del abandoned
    held.wait_for_end()
    held.let_go()
    reader.join(LONGEST_S)
    assert not reader.is_alive()
    assert answers[-1] == llm.complete("Hello", max_new_tokens=30).text


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
        reader.join(LONGEST_S)
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


async def test_a_failing_engine_ends_the_stream(
    llm: BlockAttentionLLM, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(make_prompt: Any, **options: object) -> AsyncGenerator[GenerationChunk, None]:
        make_prompt()
        yield GenerationChunk("one")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "astream", fail)
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
    llm: BlockAttentionLLM, held: Held, engine: RecordingEngine
) -> None:
    calls = [asyncio.create_task(llm.acomplete("x" * 50, max_new_tokens=20)) for _ in range(2)]
    await asyncio.to_thread(held.wait_for_token)
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    held.let_go()
    found = (await calls[1]).text
    assert engine.batches == [2]
    assert found == llm.complete("x" * 50, max_new_tokens=20).text
