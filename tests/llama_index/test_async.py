"""Streams that end early; tests/adapters/test_concurrency.py has what both adapters share."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from blockattn_rag.engine.results import GenerationChunk
from blockattn_rag.llama_index import BlockAttentionLLM
from tests.holding import FEW, LONGEST_S, Held
from tests.llama_index.conftest import RecordingEngine

LONG = 4000  # tokens: more than any test lets the model make


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
