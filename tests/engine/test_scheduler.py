"""Calls of event loops meet in batches, and each keeps its own answer, error and end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from blockattn_rag.engine import scheduler as batching
from blockattn_rag.engine.results import Generation, ReuseStats
from blockattn_rag.engine.scheduler import BATCH_SIZE, Gathering, Seat
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.holding import LONGEST_S


class Model:
    """Answers with the prompt's own text; ``gate`` holds it back until it is set."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.left: list[list[bool]] = []

    def serve(self, options: dict[str, Any], seats: Sequence[Seat]) -> None:
        texts = [seat.prompt().final for seat in seats]
        self.batches.append(texts)
        self.started.set()
        assert self.gate.wait(LONGEST_S)
        self.left.append([seat.left.is_set() for seat in seats])
        if options.get("fails_late") and len(seats) > 1:
            seats[0].answer.set_result(Generation("early", [], "stop", ReuseStats("block")))
        if "bad" in texts:
            raise ValueError("a bad prompt")
        for text, seat in zip(texts, seats, strict=True):
            if not seat.answer.done():
                seat.answer.set_result(Generation(text, [], "stop", ReuseStats("block")))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def gathering(model: Model) -> Gathering:
    return Gathering(model.serve)


async def ask(gathering: Gathering, text: str, **options: Any) -> str:
    return (await gathering.answer(lambda: BlockPrompt((), text), options)).text


async def started(model: Model) -> None:
    assert await asyncio.to_thread(model.started.wait, LONGEST_S)


async def test_gathered_calls_are_one_batch_and_each_gets_its_own_answer(
    gathering: Gathering, model: Model
) -> None:
    texts = [f"question {n}" for n in range(BATCH_SIZE)]
    assert await asyncio.gather(*(ask(gathering, text) for text in texts)) == texts
    assert model.batches == [texts]


async def test_a_call_alone_waits_for_nobody(gathering: Gathering, model: Model) -> None:
    assert await ask(gathering, "alone") == "alone"
    assert await ask(gathering, "again") == "again"
    assert model.batches == [["alone"], ["again"]]


async def test_calls_that_come_while_the_model_works_are_the_next_batch(
    gathering: Gathering, model: Model
) -> None:
    model.gate.clear()
    first = asyncio.create_task(ask(gathering, "first"))
    await started(model)
    others = [asyncio.create_task(ask(gathering, text)) for text in "abc"]
    await asyncio.sleep(0)  # the loop's next turn begins them
    model.gate.set()
    assert await asyncio.gather(first, *others) == ["first", "a", "b", "c"]
    assert model.batches == [["first"], ["a", "b", "c"]]


async def test_more_calls_than_a_batch_holds_are_several(
    gathering: Gathering, model: Model
) -> None:
    texts = [str(n) for n in range(BATCH_SIZE + 3)]
    assert await asyncio.gather(*(ask(gathering, text) for text in texts)) == texts
    assert [len(batch) for batch in model.batches] == [BATCH_SIZE, 3]


async def test_calls_with_other_options_keep_apart(gathering: Gathering, model: Model) -> None:
    await asyncio.gather(
        ask(gathering, "a", top_k=1), ask(gathering, "b", top_k=2), ask(gathering, "c", top_k=1)
    )
    assert model.batches == [["a", "c"], ["b"]]


async def test_options_that_cannot_be_compared_keep_apart(
    gathering: Gathering, model: Model
) -> None:
    many = [torch.ones(2), torch.ones(2)]
    await asyncio.gather(*(ask(gathering, "x", bias=bias) for bias in many))
    assert model.batches == [["x"], ["x"]]


async def test_an_error_goes_to_the_call_that_made_it(gathering: Gathering, model: Model) -> None:
    found = await asyncio.gather(
        *(ask(gathering, text) for text in ("good", "bad", "fine")), return_exceptions=True
    )
    assert found[0] == "good"
    assert found[2] == "fine"
    assert isinstance(found[1], ValueError)
    assert model.batches == [["good", "bad", "fine"], ["good"], ["bad"], ["fine"]]


async def test_a_prompt_that_cannot_be_made_is_an_error_of_its_call(gathering: Gathering) -> None:
    def fail() -> BlockPrompt:
        raise KeyError("no tokenizer")

    with pytest.raises(KeyError):
        await gathering.answer(fail, {})
    assert await ask(gathering, "next") == "next"


async def test_an_answer_that_came_before_the_batch_failed_is_kept(
    gathering: Gathering, model: Model
) -> None:
    found = await asyncio.gather(
        *(ask(gathering, text, fails_late=True) for text in ("good", "bad")),
        return_exceptions=True,
    )
    assert found[0] == "early"
    assert isinstance(found[1], ValueError)
    assert model.batches == [["good", "bad"], ["bad"]]


async def test_an_error_that_no_task_can_hold_is_named(gathering: Gathering) -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        await asyncio.wait_for(gathering.answer(lambda: next(iter(())), {}), LONGEST_S)


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise AttributeError("no attribute")

    __hash__ = None  # type: ignore[assignment]


async def test_options_that_fail_to_compare_hang_nobody(gathering: Gathering) -> None:
    calls = [ask(gathering, text, option=Incomparable()) for text in "ab"]
    assert await asyncio.wait_for(asyncio.gather(*calls), LONGEST_S) == ["a", "b"]
    assert await asyncio.wait_for(ask(gathering, "next"), LONGEST_S) == "next"


async def test_a_thread_that_cannot_be_started_is_an_error_and_the_next_call_tries_again(
    gathering: Gathering, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(batching, "start_thread", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await asyncio.wait_for(ask(gathering, "first"), LONGEST_S)
    assert await asyncio.wait_for(ask(gathering, "next"), LONGEST_S) == "next"


async def test_a_prompt_is_made_with_the_context_variables_of_its_call(
    gathering: Gathering,
) -> None:
    user: ContextVar[str] = ContextVar("user")

    async def call(name: str) -> str:
        user.set(name)
        return (await gathering.answer(lambda: BlockPrompt((), user.get()), {})).text

    assert await asyncio.gather(*(call(name) for name in ("ann", "bob"))) == ["ann", "bob"]


async def test_a_cancelled_call_leaves_and_the_others_get_their_answers(
    gathering: Gathering, model: Model
) -> None:
    model.gate.clear()
    calls = [asyncio.create_task(ask(gathering, text)) for text in "ab"]
    await started(model)
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    model.gate.set()
    assert await calls[1] == "b"
    assert calls[0].cancelled()
    assert model.left == [[True, False]]


async def test_a_batch_that_nobody_waits_for_is_told_to_end(
    gathering: Gathering, model: Model
) -> None:
    model.gate.clear()
    calls = [asyncio.create_task(ask(gathering, text)) for text in "ab"]
    await started(model)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    model.gate.set()
    assert await ask(gathering, "next") == "next"
    assert model.left == [[True, True], [False]]


async def test_a_call_cancelled_while_it_waits_is_never_answered(
    gathering: Gathering, model: Model
) -> None:
    model.gate.clear()
    first = asyncio.create_task(ask(gathering, "first"))
    await started(model)
    waiting = [asyncio.create_task(ask(gathering, text)) for text in ("left", "stays")]
    await asyncio.sleep(0)  # the loop's next turn begins them
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    model.gate.set()
    assert await first == "first"
    assert await waiting[1] == "stays"
    assert model.batches == [["first"], ["stays"]]


def test_loops_of_several_threads_share_one_gathering(gathering: Gathering) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(asyncio.run(ask(gathering, str(n)))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert sorted(found) == [str(n) for n in range(8)]
