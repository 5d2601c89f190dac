"""Supported families match the oracle's logits and tokens, and all others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import RecipeOracle, oracle_generate, oracle_logits
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ContextOverflowError, UnsupportedModelError
from blockattn_rag.kv.context import Assembly, Positions
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.store import MemoryStore
from tests.engines import with_settings
from tests.model.families import LONGROPE_LIMIT, REFUSED, SUPPORTED
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

# Measured errors are at most 1e-6: float32 rounding (6e-8) in sums of a few hundred terms over a
# few layers. A wrong mask or position gives at least 1e-2.
BUDGET = LOGITS[torch.float32]
# A and B exceed the sliding windows of 16 tokens. ONE is a single token.
A, ONE, B = "Halden Tower is 214 metres tall, they say.", "x", "It was built in 1931."
QUESTION = "How tall is it?"

RELAYING = ["llama", "qwen3", "gemma", "phi", "glm", "cohere", "smollm3", "gpt_neox", "mixtral"]

families = pytest.mark.parametrize("family", SUPPORTED)


@cache
def engine_for(family: str) -> BlockAttentionEngine:
    kind, config = SUPPORTED[family]
    model = BlockModel(tiny_model(kind, **config), tiny_tokenizer())
    model.config.block_attention = {"tuned": True}  # prevents the warning about stock models
    return BlockAttentionEngine(model, MemoryStore(1 << 28))


def assemblies(engine: BlockAttentionEngine) -> list[Assembly]:
    return ["copy", "relay"] if engine.model.supports_relay else ["copy"]


def error_of(
    engine: BlockAttentionEngine, texts: list[str], assembly: Assembly, sink_ids: Sequence[int] = ()
) -> float:
    """Return the relative error of the next token's logits, compared with the oracle."""
    model = engine.model
    ids = model.tokenizer.prompt_ids(BlockPrompt.from_texts([*texts, QUESTION]))
    chosen = model.choose_assembly(assembly, len(ids.final))
    context = placed_context(model, ids.context, sink_ids)
    found = model.next_logits(torch.tensor([ids.final]), model.cache_for(context, assembly=chosen))
    expected = oracle_logits(model.hf_model, [*ids.context, ids.final], sink_ids)[-1]
    return relative_error(found, expected)


@families
@pytest.mark.parametrize("sink", ["none", "head:4"])
def test_logits_and_greedy_tokens_match_the_oracle(family: str, sink: str) -> None:
    engine = engine_for(family)
    model = engine.model
    assert model.supports_relay or family not in RELAYING
    before, ends = sink_ids(sink, model.tokenizer), sorted(model.end_token_ids)
    assert len(before) == (0 if sink == "none" else 4)
    orders = [[A, ONE, B], [ONE, B, A], [B, A, ONE]]  # every block in every place
    prompts = [[], [ONE], [A], [A, A], [A, ONE, A, A, B], *orders]
    if before and family in ("gptj", "ministral3"):
        # The oracle places a sink before its block, and these have no negative positions.
        prompts.remove([ONE, B, A])
    for assembly in assemblies(engine):
        errors = {str(texts): error_of(engine, texts, assembly, before) for texts in prompts}
        assert max(errors.values()) <= BUDGET, errors
    for texts in ([], [A, A], [A, ONE, A, A, B]):
        prompt = BlockPrompt.from_texts([*texts, QUESTION])
        ids = model.tokenizer.prompt_ids(prompt)
        expected = oracle_generate(model.hf_model, [*ids.context, ids.final], 5, ends, before)
        for assembly in assemblies(engine):
            one = with_settings(engine, assembly=assembly)
            answer = one.generate(prompt, max_new_tokens=5, recipe=sink)
            assert answer.token_ids == expected


@families
def test_recipes_with_an_adapter_match_the_oracle(family: str) -> None:
    engine = engine_for(family)
    recipe = recipe_of(engine.model, sink="bos", size=0.05)
    prompt = BlockPrompt.from_texts([A, B, ONE, A, QUESTION])
    oracle = RecipeOracle(engine.model, prompt, recipe)
    if family.startswith(("falcon", "gptj")):
        with pytest.raises(
            UnsupportedModelError, match="does not use transformers' attention interface"
        ):
            oracle.logits()
        return
    expected, logits = oracle.generate(5), oracle.logits()
    for assembly in assemblies(engine):
        one = with_settings(engine, assembly=assembly, recipe=recipe)
        found = one.answer_logits(prompt, [0])
        assert relative_error(found.float(), logits) <= BUDGET
        assert one.generate(prompt, max_new_tokens=5).token_ids == expected


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_with_the_reason(family: str) -> None:
    kind, config, reason = REFUSED[family]
    model = tiny_model(kind, **config)
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        BlockModel(model, tiny_tokenizer())
    assert str(refusal.value).startswith(type(model).__name__) or "Config" in str(refusal.value)


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(vocab_size=264, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        BlockModel(T5ForConditionalGeneration(config), tiny_tokenizer())


def test_longrope_is_limited_to_the_length_at_which_frequencies_change() -> None:
    engine = engine_for("phi3, longrope")
    assert engine.model.max_context_tokens == LONGROPE_LIMIT
    block = "p" * (LONGROPE_LIMIT - 10)  # BOS and "question" leave one token
    answer = engine.generate([block, "question"], max_new_tokens=8)
    assert len(answer.token_ids) == 1
    with pytest.raises(ContextOverflowError, match=r"513 tokens.*at most 512"):
        engine.generate([block, "question.."], max_new_tokens=1)


@pytest.mark.parametrize("family", ["llama", "llama, yarn", "phi", "glm", "gemma3"])
def test_far_offsets_are_exact(family: str) -> None:
    engine = engine_for(family)
    far = [A * 30, B * 40, ONE, A]
    for assembly in assemblies(engine):
        # At offset 2000, the model rounds angles to float32, an error of 2000 * 6e-8 = 1e-4 rad
        # in the oracle's keys. Moved keys have no such error, because their angles are float64.
        assert error_of(engine, far, assembly) <= 4 * BUDGET


def test_block_order_and_composite_positions_change_the_logits() -> None:
    engine = engine_for("llama")
    model = engine.model

    def logits(texts: list[str], positions: Positions) -> torch.Tensor:
        blocks = [model.tokenizer.block_ids(Block(text), first=False) for text in texts]
        context = placed_context(model, blocks, recipe=Recipe(positions=positions))
        final = torch.tensor([model.tokenizer.final_ids(QUESTION, first=False)])
        return model.next_logits(final, model.cache_for(context))

    forward = logits([A, B], "reordered")
    assert relative_error(logits([B, A], "reordered"), forward) > 1e-2
    assert relative_error(logits([A, B], "composite"), forward) > 1e-2
