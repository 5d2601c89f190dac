"""Every path to an answer matches the oracle, with every recipe."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest

from blockattn_rag.check.oracle import RecipeOracle
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.store import MemoryStore
from tests.engines import with_settings
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

HEAD = Block.of([Span("You answer.", "system")])
A, B, C, ONE = (Block(t) for t in ("Halden is tall.", "It was built in 1931.", "Ferries go.", "x"))
QUESTIONS = ("How tall?", "When was it built?")
CONTEXTS = [(), (HEAD,), (A,), (HEAD, A), (HEAD, A, B, C), (HEAD, C, B, A), (B, A, A, ONE)]
PROMPTS = [BlockPrompt(context, QUESTIONS[i % 2]) for i, context in enumerate(CONTEXTS)]
LONGEST = BlockPrompt((HEAD, A, B, C, ONE), "How tall?")
NEW = 6

MODEL = BlockModel(tiny_model(), tiny_tokenizer())
RECIPES = {
    "none": Recipe(),
    "sink": Recipe("head:4"),
    "adapter": recipe_of(MODEL, sink="none"),
    "sink and adapter": recipe_of(MODEL),
    "promotion": Recipe(promote=1),
    "composite": recipe_of(MODEL, positions="composite"),
    "everything": recipe_of(MODEL, promote=2),
}


@pytest.fixture(params=RECIPES)
def recipe(request: Any) -> Recipe:
    return RECIPES[request.param]


@pytest.fixture
def engine(recipe: Recipe) -> BlockAttentionEngine:
    return BlockAttentionEngine(MODEL, MemoryStore(1 << 28), recipe=recipe)


@cache
def expected(recipe: Recipe, prompt: BlockPrompt, new: int = NEW) -> list[int]:
    return RecipeOracle(MODEL, prompt, recipe).generate(new)


@pytest.mark.parametrize("assembly", ["relay", "copy"])
def test_answers_and_logits_match_the_oracle(engine: BlockAttentionEngine, assembly: Any) -> None:
    engine = with_settings(engine, assembly=assembly)
    for prompt in PROMPTS:
        answer = expected(engine.recipe, prompt)
        for _ in range(2):  # first computed, then reused
            found = engine.generate(prompt, max_new_tokens=NEW)
            assert found.token_ids == answer
        logits = engine.answer_logits(prompt, answer)
        true = RecipeOracle(MODEL, prompt, engine.recipe).logits(answer[:-1])
        assert relative_error(logits.float(), true) <= 1e-4


@pytest.mark.parametrize("assembly", ["relay", "copy"])
def test_batches_match_the_oracle(engine: BlockAttentionEngine, assembly: Any) -> None:
    engine = with_settings(engine, assembly=assembly)
    found = engine.generate_batch(PROMPTS, max_new_tokens=NEW)
    assert [one.token_ids for one in found] == [expected(engine.recipe, p) for p in PROMPTS]


def test_streams_and_async_calls_match_the_oracle(engine: BlockAttentionEngine) -> None:
    answer = expected(engine.recipe, LONGEST)
    *_, last = engine.stream(LONGEST, max_new_tokens=NEW)
    assert last.generation is not None
    assert last.generation.token_ids == answer

    async def both() -> list[list[int]]:
        asked = await engine.agenerate(LONGEST, max_new_tokens=NEW)
        ends = [chunk.generation async for chunk in engine.astream(LONGEST, max_new_tokens=NEW)]
        return [asked.token_ids, ends[-1].token_ids if ends[-1] else []]

    assert asyncio.run(both()) == [answer, answer]


def test_growing_conversations_match_the_oracle(engine: BlockAttentionEngine) -> None:
    final = "How tall?"
    for turn in range(3):
        prompt = BlockPrompt((HEAD, A, B), final)
        found = engine.generate(prompt, max_new_tokens=NEW)
        assert found.token_ids == expected(engine.recipe, prompt)
        final = f"{final}{found.text} And {turn}?"


def test_int8_errors_are_no_larger_than_without_a_recipe(recipe: Recipe) -> None:
    """Logits are compared instead of tokens, because rounding may change tokens."""
    engine = BlockAttentionEngine(MODEL, MemoryStore(1 << 28), recipe=recipe, kv_dtype="int8")
    oracle = RecipeOracle(MODEL, LONGEST, recipe)
    found = engine.answer_logits(LONGEST, [0])[-1].float()
    assert relative_error(found, oracle.logits()[-1]) <= 0.05
    stats = engine.generate(LONGEST, max_new_tokens=1).stats
    assert stats.int8_blocks == len(LONGEST.context) - recipe.promote


def test_ingested_passages_are_hits(engine: BlockAttentionEngine) -> None:
    engine.encode([A, B, C, ONE])
    found = engine.generate(LONGEST, max_new_tokens=NEW)
    assert found.stats.misses == 1  # the text before the passages
    assert found.token_ids == expected(engine.recipe, LONGEST)
    assert found.stats.recipe == str(engine.recipe)


def test_recipes_compared_on_one_engine_do_not_mix() -> None:
    engine = BlockAttentionEngine(MODEL, MemoryStore(1 << 28), recipe="none")
    for recipe in (*RECIPES.values(), *reversed(RECIPES.values())):
        answer = engine.generate(LONGEST, recipe=recipe, max_new_tokens=NEW)
        assert answer.token_ids == expected(recipe, LONGEST)
    assert engine.generate(LONGEST, max_new_tokens=NEW).token_ids == expected(Recipe(), LONGEST)
