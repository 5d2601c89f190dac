"""``batch`` runs real batches, and gives every input its own config, answer or error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from blockattn_rag.store import MemoryStore
from tests.engines import CountingEngine
from tests.langchain.conftest import passages, tiny_block_model


def counting_engine() -> CountingEngine:
    return CountingEngine(tiny_block_model(), MemoryStore(1 << 28))


@pytest.fixture
def engine() -> CountingEngine:
    return counting_engine()


def inputs(count: int = 8) -> list[Any]:
    """Return questions with different numbers of shared passages."""
    return [
        [("system", format_blocks(passages(n % 3))), ("human", f"Question {n}?")]
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def one_by_one() -> list[Any]:
    """Answers of individual calls."""
    chat = ChatBlockAttention(engine=counting_engine(), max_tokens=6)
    return [chat.invoke(messages).content for messages in inputs()]


def contents(messages: Sequence[Any]) -> list[Any]:
    return [message.content for message in messages]


async def test_eight_inputs_are_one_batch_with_the_answers_of_single_calls(
    chat: ChatBlockAttention, engine: CountingEngine, one_by_one: list[Any]
) -> None:
    assert contents(chat.batch(inputs())) == one_by_one
    assert contents(await chat.abatch(inputs())) == one_by_one
    assert engine.batches == [8, 8]


def test_max_concurrency_limits_the_batch(
    chat: ChatBlockAttention, engine: CountingEngine, one_by_one: list[Any]
) -> None:
    assert contents(chat.batch(inputs(), {"max_concurrency": 3})) == one_by_one
    assert sum(engine.batches) == 8
    assert max(engine.batches) == 3


async def test_large_batches_keep_order(chat: ChatBlockAttention, engine: CountingEngine) -> None:
    many: list[Any] = [[("human", f"Question {n}?")] for n in range(20)]
    expected = [chat.invoke(one, max_tokens=1).content for one in many]
    assert contents(chat.batch(many, max_tokens=1)) == expected
    assert contents(await chat.abatch(many, max_tokens=1)) == expected
    assert max(engine.batches) == 16


def test_each_input_has_its_own_callbacks_and_run(chat: ChatBlockAttention) -> None:
    class Recorder(BaseCallbackHandler):
        def __init__(self) -> None:
            self.runs: list[Any] = []

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.runs.append((kwargs["run_id"], response.generations[0][0].message.content))

    recorders = [Recorder(), Recorder()]
    answers = chat.batch(inputs(2), [{"callbacks": [r], "tags": ["t"]} for r in recorders])
    assert [r.runs[0][1] for r in recorders] == contents(answers)
    assert len({r.runs[0][0] for r in recorders}) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_failing_input_does_not_affect_the_other_answers(
    chat: ChatBlockAttention, one_by_one: list[Any], asynchronous: bool
) -> None:
    mixed: list[Any] = [*inputs(2), [("human", "x" * 9000)]]
    answers: list[Any] = (
        await chat.abatch(mixed, return_exceptions=True)
        if asynchronous
        else chat.batch(mixed, return_exceptions=True)
    )
    assert contents(answers[:2]) == one_by_one[:2]
    assert isinstance(answers[2], ContextOverflowError)
    with pytest.raises(ContextOverflowError):
        chat.batch(mixed)


def test_first_failure_ends_the_batch(chat: ChatBlockAttention, one_by_one: list[Any]) -> None:
    """The executor starts no further calls, so running calls must not wait for them."""
    too_long: list[Any] = [[("human", "x" * 9000)]] * 2
    many: list[Any] = [[("human", f"Question {n}?")] for n in range(18)]
    with pytest.raises(ContextOverflowError):
        chat.batch([*too_long, *many], max_tokens=1)
    assert contents(chat.batch(inputs())) == one_by_one


def test_callback_may_ask_another_model(chat: ChatBlockAttention, one_by_one: list[Any]) -> None:
    guard = ChatBlockAttention(engine=counting_engine(), max_tokens=4)

    class Asks(BaseCallbackHandler):
        raise_error = True

        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            if "Question 1" in str(messages):
                guard.invoke("May it?")

    assert contents(chat.batch(inputs(3), {"callbacks": [Asks()]})) == one_by_one[:3]
