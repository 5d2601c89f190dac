"""Threads and event loops: no call blocks the loop, and abandoned answers free the model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.adapters.frameworks import AWAITED, EACH, Framework, How
from tests.engines import CountingEngine, tuned_engine
from tests.holding import FEW, Held

pytestmark = EACH

LONG: dict[str, Any] = {"max_new_tokens": 3000}  # more tokens than any test generates
SHORT: dict[str, Any] = {"max_new_tokens": 20}


@pytest.fixture
def chat(framework: Framework) -> Any:
    return framework.chat(CountingEngine(tuned_engine().model))


@AWAITED
async def test_event_loop_is_not_blocked(
    framework: Framework, chat: Any, held: Held, how: How
) -> None:
    task = asyncio.create_task(framework.aask(chat, how, **SHORT))
    await asyncio.to_thread(held.wait_for_token)
    for _ in range(10):  # the loop keeps running while the model is paused in mid-answer
        await asyncio.sleep(0)
    assert (held.tokens, task.done()) == (1, False)
    held.let_go()
    assert (await task).finish_reason


def assert_ended_early(framework: Framework, chat: Any, held: Held) -> None:
    """Check that the abandoned answer ended early, and that the model still answers."""
    held.let_go(FEW)
    held.wait_for_end()
    assert held.tokens <= 2 * FEW + 1
    held.let_go()
    assert framework.ask(chat, "whole", max_new_tokens=1).reuse["generated_tokens"] == 1


@AWAITED
async def test_cancelling_frees_the_model(
    framework: Framework, chat: Any, held: Held, how: How
) -> None:
    task = asyncio.create_task(framework.aask(chat, how, **LONG))
    await asyncio.to_thread(held.wait_for_token)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(assert_ended_early, framework, chat, held)


def test_a_closed_stream_frees_the_model(framework: Framework, chat: Any, held: Held) -> None:
    stream = framework.stream(chat, "Well?", **LONG)
    held.let_go(FEW)
    next(stream)
    stream.close()
    assert_ended_early(framework, chat, held)


async def test_closing_an_async_stream_frees_the_model(
    framework: Framework, chat: Any, held: Held
) -> None:
    stream = framework.astream(chat, "Well?", **LONG)
    held.let_go(FEW)
    await anext(stream)
    await stream.aclose()
    await asyncio.to_thread(assert_ended_early, framework, chat, held)


def test_streams_of_two_threads_are_independent(framework: Framework, chat: Any) -> None:
    questions = ["Hello", "Good day"]
    expected = [framework.ask(chat, "whole", one, **SHORT).text for one in questions]
    with ThreadPoolExecutor() as threads:
        answers = threads.map(
            lambda question: framework.ask(chat, "stream", question, **SHORT).text, questions
        )
        assert list(answers) == expected


async def test_gathered_calls_share_a_batch(framework: Framework, chat: Any) -> None:
    questions = [f"Question {n}?" for n in range(5)]
    alone = [await framework.aask(chat, "awaited", one, **SHORT) for one in questions]
    calls = (framework.aask(chat, "awaited", one, **SHORT) for one in questions)
    gathered = await asyncio.gather(*calls)
    assert [one.text for one in gathered] == [one.text for one in alone]
    assert chat.engine.batches == [5]


async def test_cancelling_one_call_does_not_affect_the_rest_of_its_batch(
    framework: Framework, chat: Any, held: Held
) -> None:
    calls = [
        asyncio.create_task(framework.aask(chat, "awaited", "x" * 50, **SHORT)) for _ in range(2)
    ]
    await asyncio.to_thread(held.wait_for_token)
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[0]
    held.let_go()
    found = await calls[1]
    assert chat.engine.batches == [2]
    assert found.text == (await framework.aask(chat, "awaited", "x" * 50, **SHORT)).text


@AWAITED
async def test_errors_reach_the_caller(framework: Framework, chat: Any, how: How) -> None:
    with pytest.raises(ValueError, match="bogus"):
        await framework.aask(chat, how, bogus=1)
