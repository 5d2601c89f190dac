"""Recomputed tokens in the engine: statistics, batch sizes and empty blocks."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch
from tokenizers import normalizers

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.engine.results import Generation
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from tests.engines import tuned_engine, tuned_model
from tests.models import tiny_tokenizer

SYSTEM = Block.of([Span("Answer from the passages.", "system")])
PASSAGES = [Block("Halden Tower is 214 metres."), Block("Vell Bridge dates from 1907.")]
QUESTION = " How high is Halden Tower?"


@pytest.fixture
def engine() -> BlockAttentionEngine:
    return tuned_engine()


def answer(engine: BlockAttentionEngine, context: Sequence[Block], share: float) -> Generation:
    prompt = BlockPrompt(tuple(context), QUESTION)
    return engine.generate(prompt, recipe=Recipe(recompute=share), max_new_tokens=1)


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_tokens_of_misses_are_counted_once(engine: BlockAttentionEngine, stored: int) -> None:
    lengths = [len(block.text) for block in PASSAGES]
    prompt = [SYSTEM, *PASSAGES]
    engine.generate(BlockPrompt((SYSTEM,), QUESTION), max_new_tokens=1)  # keeps SYSTEM in memory
    engine.precompute(PASSAGES[:stored])
    stats = answer(engine, prompt, 1.0).stats
    head = len(engine.model.tokenizer.block_ids(SYSTEM, first=True))
    # All tokens of all passages are computed, whether the passages were stored or not.
    assert (stats.hits, stats.misses) == (1 + stored, 2 - stored)
    assert stats.reused_tokens == head
    assert stats.computed_tokens == sum(lengths) + len(QUESTION)


def test_recomputed_tokens_of_misses_are_not_counted_twice(engine: BlockAttentionEngine) -> None:
    (found, missing), prompt = PASSAGES, [SYSTEM, *PASSAGES, PASSAGES[1]]
    engine.precompute([found])
    chosen = round(0.5 * (len(found.text) + 2 * len(missing.text)))
    first = answer(engine, prompt, 0.5).stats
    again = answer(engine, prompt, 0.5).stats  # with all blocks stored
    new = len(engine.model.tokenizer.block_ids(SYSTEM, first=True)) + len(missing.text)
    assert again.computed_tokens == chosen + len(QUESTION)
    assert new + len(QUESTION) < first.computed_tokens < again.computed_tokens + new
    assert first.prompt_tokens == again.prompt_tokens


def test_after_an_empty_first_block_all_passages_are_recomputed() -> None:
    tokenizer: Any = tiny_tokenizer(bos=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    recipe = Recipe("head:4", recompute=1.0)
    engine = BlockAttentionEngine(tuned_model(tokenizer), recipe=recipe)
    prompt = BlockPrompt((Block("\u200b"), *PASSAGES), QUESTION)
    assert not engine.model.tokenizer.block_ids(prompt.context[0], first=True)
    expected = engine.answer_logits(prompt, [5, 6], mode="full")
    found = engine.answer_logits(prompt, [5, 6])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Record, for each batch, the number of tokens in its contexts, and in all recomputed contexts
    that are in memory."""
    seen: list[tuple[int, int]] = []
    copies: WeakSet[BlockKV] = WeakSet()
    cache_for = BlockModel.cache_for

    def recorded(model: BlockModel, *contexts: Context, **options: Any) -> Any:
        copies.update(context.blocks[0].kv for context in contexts)
        gc.collect()
        seen.append((sum(c.num_tokens for c in contexts), sum(kv.num_tokens for kv in copies)))
        return cache_for(model, *contexts, **options)

    monkeypatch.setattr(BlockModel, "cache_for", recorded)
    gc.collect()
    gc.freeze()  # makes later collections skip the objects of earlier tests
    yield seen
    gc.unfreeze()


@pytest.mark.parametrize("most", [1, 200, 350])
def test_a_batch_holds_no_more_recomputed_tokens_than_batch_tokens(
    engine: BlockAttentionEngine,
    contexts: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    recipe = Recipe(recompute=0.2)
    prompts = [BlockPrompt((SYSTEM, *PASSAGES), QUESTION + "?" * n) for n in range(5)]
    options: dict[str, Any] = {"recipe": recipe, "max_new_tokens": 2}
    expected = [engine.generate(prompt, **options) for prompt in prompts]
    (length, _) = contexts[0]
    contexts.clear()
    monkeypatch.setattr(BlockModel, "batch_tokens", most)
    found = engine.generate_batch(prompts, **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    stats = [(one.stats.reused_tokens, one.stats.computed_tokens) for one in found]
    assert stats[1:] == [
        (one.stats.reused_tokens, one.stats.computed_tokens) for one in expected[1:]
    ]
    assert sum(tokens for tokens, _ in contexts) == 5 * length
    assert max(tokens for tokens, _ in contexts) <= max(most, length)
    assert all(tokens == held for tokens, held in contexts)


def test_contexts_without_recomputed_tokens_do_not_count(
    engine: BlockAttentionEngine, contexts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockModel, "batch_tokens", 200)
    prompts = [BlockPrompt((SYSTEM, *PASSAGES), QUESTION) for _ in range(5)]
    engine.generate_batch(prompts, recipe=Recipe(recompute=0.001), max_new_tokens=1)
    assert len(contexts) == 1


def test_answers_of_a_failed_batch_are_counted_as_single_requests(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [BlockPrompt((SYSTEM, *PASSAGES), QUESTION + "?" * n) for n in range(3)]
    options: dict[str, Any] = {"recipe": Recipe(recompute=0.2), "max_new_tokens": 2}
    for prompt in prompts:
        engine.generate(prompt, **options)
    expected = [engine.generate(prompt, **options).stats.reuse() for prompt in prompts]
    generate_batch = BlockModel.generate_batch

    def failing(model: BlockModel, rows: Any, *args: Any, **options: Any) -> Any:
        if len(rows) > 1:
            raise torch.OutOfMemoryError
        return generate_batch(model, rows, *args, **options)

    monkeypatch.setattr(BlockModel, "generate_batch", failing)
    found = engine.generate_batch(prompts, **options)
    assert [one.stats.reuse() for one in found] == expected
