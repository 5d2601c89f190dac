"""The last passages of a prompt can be promoted, that is, computed in the final block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag.check.oracle import RecipeOracle
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import MissError
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from tests.engines import with_settings
from tests.models import tiny_model, tiny_tokenizer

HEAD = Block.of([Span("You answer.", "system")])
BETWEEN = Block.of([Span("Between.", "conversation")])
A, B, C = Block("Halden is tall."), Block("It was built in 1931."), Block("Ferries go.")
Q = "How tall?"
PROMPT = BlockPrompt((HEAD, A, B, C), Q)
NEW = 6
EXACT = LOGITS[torch.float32]


def ids(model: BlockModel, *blocks: Block, first: bool = False) -> list[int]:
    """Return the token ids of blocks."""
    return [
        token
        for place, block in enumerate(blocks)
        for token in model.tokenizer.block_ids(block, first=first and not place)
    ]


def promoting(count: int) -> Recipe:
    return Recipe(promote=count)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(found[-1].float(), expected[-1].float())


@pytest.mark.parametrize("question", [Q, ""])
@pytest.mark.parametrize(
    ("context", "count", "reused"),
    [
        ((HEAD, A, B, C), 0, 4),
        ((HEAD, A, B, C), 1, 3),
        ((HEAD, A, B, C), 2, 2),
        ((HEAD, A, B, C), 9, 1),
        ((HEAD, A, BETWEEN, B, BETWEEN), 1, 3),  # also moves the text after the passage
        ((HEAD, A, BETWEEN, B, BETWEEN), 2, 1),
        ((A, B, A), 1, 2),
        ((A,), 1, 0),
        ((HEAD,), 1, 1),
    ],
)
def test_the_last_passages_move_to_the_final_block(
    model: BlockModel, context: tuple[Block, ...], count: int, reused: int, question: str
) -> None:
    prompt = BlockPrompt(context, question)
    found, plain = (model.tokenizer.prompt_ids(prompt, promote) for promote in (count, 0))
    assert found.context == plain.context[:reused]
    assert found.flat == plain.flat


def test_promoted_passages_need_not_be_stored(model: BlockModel) -> None:
    engine = BlockAttentionEngine(model, recipe=promoting(2), on_miss="error")
    engine.encode([A])
    assert engine.generate(PROMPT, max_new_tokens=1).token_ids
    with pytest.raises(MissError, match="1 of 3 blocks"):
        engine.generate(PROMPT, recipe=promoting(1), max_new_tokens=1)


@pytest.mark.parametrize("context", [(HEAD, A, B, C), (A, B), (A,)])
def test_promoting_all_passages_equals_full_attention(
    engine: BlockAttentionEngine, context: tuple[Block, ...]
) -> None:
    prompt = BlockPrompt(context, Q)
    full = engine.answer_logits(prompt, [0], mode="full")
    assert error(engine.answer_logits(prompt, [0], recipe=promoting(3)), full) < EXACT


@pytest.mark.parametrize("assembly", ["relay", "copy"])
@pytest.mark.parametrize("count", [1, 2])
def test_promotion_with_windows_equals_the_oracle(assembly: Any, count: int) -> None:
    model = BlockModel(tiny_model("gemma3_text", sliding_window=16), tiny_tokenizer())
    oracle = RecipeOracle(model, PROMPT, promoting(count))
    engine = BlockAttentionEngine(model, recipe=promoting(count))
    engine = with_settings(engine, assembly=assembly)
    assert engine.generate(PROMPT, max_new_tokens=NEW).token_ids == oracle.generate(NEW)
    assert error(engine.answer_logits(PROMPT, [0]), oracle.logits()) < EXACT
    assert error(engine.answer_logits(PROMPT, [0], recipe="none"), oracle.logits()) > 100 * EXACT


def test_promoted_passages_are_not_read_and_not_stored(engine: BlockAttentionEngine) -> None:
    model = engine.model
    head, one, other = len(ids(model, HEAD, first=True)), len(ids(model, A)), len(ids(model, B, C))
    cold = engine.generate(PROMPT, recipe=promoting(2), max_new_tokens=1).stats
    assert (cold.hits, cold.misses, cold.reused_tokens) == (0, 2, 0)
    assert cold.computed_tokens == cold.prompt_tokens == head + one + other + len(Q)
    assert cold.recipe == "promote:2"
    assert [engine.contains(block) for block in (A, B, C)] == [True, False, False]
    plain = with_settings(engine, resident_bytes=0)  # without tails, to count all blocks
    warm = plain.generate(PROMPT, recipe=promoting(2), max_new_tokens=1).stats
    assert (warm.reused_tokens, warm.computed_tokens) == (head + one, other + len(Q))


def test_the_next_turn_reuses_promoted_passages(engine: BlockAttentionEngine) -> None:
    first = engine.generate(PROMPT, recipe=promoting(1), max_new_tokens=1)
    longer = BlockPrompt(PROMPT.context, f"{Q} And wide?")
    again = engine.generate(longer, recipe=promoting(1), max_new_tokens=NEW)
    assert again.stats.computed_tokens == len(" And wide?")
    assert first.stats.computed_tokens > len(Q)
    alone = with_settings(engine, resident_bytes=0)
    assert alone.generate(longer, recipe=promoting(1), max_new_tokens=NEW).token_ids == (
        again.token_ids
    )


def test_full_mode_promotes_nothing(engine: BlockAttentionEngine) -> None:
    plain = engine.answer_logits(PROMPT, [0], mode="full")
    found = engine.answer_logits(PROMPT, [0], mode="full", recipe=promoting(2))
    assert torch.equal(found, plain)
    asked = engine.generate(PROMPT, mode="full", recipe=promoting(2), max_new_tokens=1)
    assert asked.stats.recipe == ""
