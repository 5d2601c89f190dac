"""Many concurrent threads and event loops: correct answers, one model thread, no leaked threads."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from blockattn_rag.check.oracle import oracle_generate
from blockattn_rag.engine import scheduler as scheduling
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from tests.engines import tuned_model
from tests.holding import LONGEST_S

PASSAGES = [f"Tower {n} is {n * 7} metres tall." for n in range(6)]
QUESTIONS = ["How tall?", "Which tower is it?"]
NEW = 5
THREADS = 16
ROUNDS = 6


@pytest.fixture
def engines() -> list[BlockAttentionEngine]:
    """Two engines that share a model."""
    model = tuned_model()
    return [BlockAttentionEngine(model), BlockAttentionEngine(model)]


def prompt(chance: random.Random) -> list[str]:
    return [*chance.sample(PASSAGES, chance.randrange(4)), chance.choice(QUESTIONS)]


class Work:
    """The work of the threads: ask in different ways and compare with the oracle's answers."""

    def __init__(self, engines: list[BlockAttentionEngine]) -> None:
        self._engines = engines
        self._expected: dict[tuple[str, ...], list[int]] = {}
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.wrong: list[object] = []

    def expected(self, texts: list[str]) -> list[int]:
        model = self._engines[0].model
        with self._lock:
            if tuple(texts) not in self._expected:
                ids = model.tokenizer.prompt_ids(BlockPrompt.from_texts(texts))
                rows, ends = [*ids.context, ids.final], sorted(model.end_token_ids)
                with model.lock:
                    self._expected[tuple(texts)] = oracle_generate(model.hf_model, rows, NEW, ends)
            return self._expected[tuple(texts)]

    def check(self, way: str, texts: list[str], found: list[int]) -> None:
        if found != self.expected(texts):
            self.wrong.append((way, texts, found))
        self.done[way] += 1

    def generate(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        texts = prompt(chance)
        answer = engine.generate(texts, max_new_tokens=NEW)
        self.check("generate", texts, answer.token_ids)

    def stream(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        texts = prompt(chance)
        *_, last = engine.stream(texts, max_new_tokens=NEW)
        assert last.generation is not None
        self.check("stream", texts, last.generation.token_ids)

    def leave_a_stream(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        with closing(engine.stream(prompt(chance), max_new_tokens=3500)) as stream:
            next(stream)
        self.done["left stream"] += 1

    def batch(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        many = [prompt(chance) for _ in range(4)]
        answers = engine.generate_batch(many, max_new_tokens=NEW, batch_size=3)
        for texts, answer in zip(many, answers, strict=True):
            self.check("batch", texts, answer.token_ids)

    def encode(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        text = f"A new passage, number {chance.random()}."
        if engine.encode([text]) != [Block(text).handle] or not engine.contains(Block(text)):
            self.wrong.append(("encode", text))
        self.done["encode"] += 1

    def cancelled_task(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        asyncio.run(self._cancel_one_of_two(engine, chance))

    async def _cancel_one_of_two(self, engine: BlockAttentionEngine, chance: random.Random) -> None:
        texts = prompt(chance)
        left = asyncio.create_task(engine.agenerate(prompt(chance), max_new_tokens=3500))
        stays = asyncio.create_task(engine.agenerate(texts, max_new_tokens=NEW))
        await asyncio.sleep(0.001 * chance.random())
        left.cancel()
        await asyncio.wait([left])
        self.check("task", texts, (await stays).token_ids)
        assert left.cancelled()
        self.done["cancelled task"] += 1


def test_sixteen_threads_get_correct_answers_and_leak_no_threads(
    engines: list[BlockAttentionEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_IDLE_S", 0.01)
    before = set(threading.enumerate())
    work = Work(engines)
    ways: list[Callable[[BlockAttentionEngine, random.Random], None]]
    ways = [
        work.generate, work.stream, work.leave_a_stream, work.batch, work.encode,
        work.cancelled_task,
    ]  # fmt: skip

    def act(seed: int) -> None:
        chance = random.Random(seed)
        for turn in range(ROUNDS):
            ways[(seed + turn) % len(ways)](engines[seed % 2], chance)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(act, range(THREADS), timeout=2 * LONGEST_S))
    assert not work.wrong
    each = THREADS  # every thread does each kind of work once
    assert work.done == {
        "generate": each, "stream": each, "left stream": each, "batch": 4 * each, "encode": each,
        "task": each, "cancelled task": each,
    }  # fmt: skip
    for thread in set(threading.enumerate()) - before:
        thread.join(LONGEST_S)
    assert set(threading.enumerate()) <= before
