"""Promoted passages are computed in the final block: answers, choice and figures."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from blockattn_rag.check.oracle import oracle_generate, oracle_logits
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.context import place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.tolerances import LOGITS
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from tests.models import tiny_model, tiny_tokenizer

HEAD = Block.of([Span("You answer.", "system")])
A, B, C = Block("Halden is tall."), Block("It was built in 1931."), Block("Ferries go.")
Q = "How tall?"
PROMPT = BlockPrompt((HEAD, A, B, C), Q)
NEW = 6
EXACT = LOGITS[torch.float32]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    model = BlockModel(tiny_model(), tiny_tokenizer())
    model.config.block_attention = {"tuned": True}
    return model


@pytest.fixture
def engine(model: BlockModel) -> BlockAttentionEngine:
    return BlockAttentionEngine(model)


def ids(model: BlockModel, *texts: Block | str, first: bool = False) -> list[int]:
    """Token ids of texts that make one block."""
    found: list[int] = []
    for text in texts:
        opens = first and not found
        tokenizer = model.tokenizer
        found += (
            tokenizer.final_ids(text, first=opens)
            if isinstance(text, str)
            else tokenizer.block_ids(text, first=opens)
        )
    return found


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(found[-1].float(), expected.float())


def expected_blocks(model: BlockModel) -> list[list[int]]:
    """The blocks of PROMPT when A and B are promoted, the better one last."""
    return [ids(model, HEAD, first=True), ids(model, C), ids(model, B, A, Q)]


@pytest.mark.parametrize("assembly", ["relay", "copy"])
def test_promoted_passages_see_all_blocks_and_one_another(
    engine: BlockAttentionEngine, assembly: Literal["relay", "copy"]
) -> None:
    model = engine.model
    expected = oracle_generate(
        model.hf_model, expected_blocks(model), NEW, sorted(model.end_token_ids)
    )
    found = engine.generate(PROMPT, promote=2, assembly=assembly, max_new_tokens=NEW)
    assert found.token_ids == expected
    logits = oracle_logits(model.hf_model, expected_blocks(model))[-1]
    assert error(engine.answer_logits(PROMPT, [0], promote=2, assembly=assembly), logits) < EXACT
    assert error(engine.answer_logits(PROMPT, [0], assembly=assembly), logits) > 100 * EXACT
    together = engine.generate_batch(
        [PROMPT, ["a", "b", Q]], promote="2", assembly=assembly, max_new_tokens=NEW
    )
    assert together[0].token_ids == expected


def test_all_passages_promoted_is_full_attention_in_another_order(
    engine: BlockAttentionEngine,
) -> None:
    full = engine.answer_logits(BlockPrompt((HEAD, C, B, A), Q), [0], mode="full")
    assert error(engine.answer_logits(PROMPT, [0], promote=3), full[0]) < EXACT


def test_a_prompt_that_opens_with_a_passage_keeps_its_one_bos(engine: BlockAttentionEngine) -> None:
    for texts, order in ((["a", "b", Q], ["b", "a", Q]), (["a", Q], ["a", Q])):
        full = engine.answer_logits(order, [0], mode="full")
        # One block and the final one are full attention.
        assert error(engine.answer_logits(texts, [0], promote=1), full[0]) < EXACT


def test_the_question_chooses_what_it_attends_to(model: BlockModel) -> None:
    """Against the weights of one dense forward, each token's shares among blocks averaged."""
    model = BlockModel(tiny_model(attn_implementation="eager"), tiny_tokenizer())
    engine = BlockAttentionEngine(model)
    blocks = [ids(model, HEAD, first=True), *(ids(model, one) for one in (A, B, C)), ids(model, Q)]
    shares = dense_shares(model, blocks)
    requests = [EncodeRequest(one, str(i), str(i)) for i, one in enumerate(blocks[:-1])]
    encoded = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    context = place([encoded[str(i)] for i in range(4)])
    found = model.attention_to_blocks(context, blocks[-1])
    assert [found[str(i)] for i in range(4)] == pytest.approx(shares, rel=1e-4)
    assert sum(found.values()) == pytest.approx(1)
    best = max((1, 2, 3), key=lambda i: shares[i])
    stay = [one for i, one in enumerate(blocks[:-1]) if i != best]
    expected = oracle_logits(model.hf_model, [*stay, blocks[best] + blocks[-1]])[-1]
    assert error(engine.answer_logits(PROMPT, [0], promote="attention:1"), expected) < EXACT


def dense_shares(model: BlockModel, blocks: list[list[int]]) -> list[float]:
    weights: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, out: weights.append(out[1]))
        for layer in model.hf_model.model.layers
    ]
    oracle_logits(model.hf_model, blocks)
    for hook in hooks:
        hook.remove()
    rows = torch.stack(weights)[:, 0, :, -len(blocks[-1]) :]  # [layers, heads, question, tokens]
    parts = torch.split(rows, [len(one) for one in blocks], dim=-1)
    sums = [part.sum(-1) for part in parts][:-1]
    masses = torch.stack(sums)
    return (masses / masses.sum(0)).flatten(1).mean(1).tolist()


def test_figures_tell_what_promotion_costs(engine: BlockAttentionEngine) -> None:
    model = engine.model
    a, b, c, question = (len(ids(model, one)) for one in (A, B, C, Q))
    head = len(ids(model, HEAD, first=True))
    by_rank = engine.generate(PROMPT, promote=1, max_new_tokens=1).stats
    assert not engine.contains(A)  # what is promoted needs no block
    assert (by_rank.hits, by_rank.misses) == (0, 3)
    assert by_rank.promoted_tokens == a
    assert (by_rank.reused_tokens, by_rank.computed_tokens) == (0, head + b + c + a + question)
    warm = engine.generate(PROMPT, promote=1, max_new_tokens=1).stats
    assert (warm.reused_tokens, warm.computed_tokens) == (head + b + c, a + question)
    engine.encode([A])
    chosen = engine.generate(PROMPT, promote="attention:3", max_new_tokens=1).stats
    assert (chosen.hits, chosen.misses, chosen.reused_tokens) == (1, 0, head)
    assert chosen.promoted_tokens == a + b + c + question
    assert chosen.computed_tokens == a + b + c + 2 * question


def test_a_passage_computed_for_the_choice_is_counted_as_a_miss(
    engine: BlockAttentionEngine,
) -> None:
    cold = engine.generate(PROMPT, promote="attention:3", max_new_tokens=1).stats
    tokens = sum(len(ids(engine.model, one)) for one in (A, B, C))
    head, question = len(ids(engine.model, HEAD, first=True)), len(Q)
    assert (cold.hits, cold.misses, cold.reused_tokens) == (0, 4, 0)
    assert cold.computed_tokens == head + 2 * tokens + 2 * question


@pytest.mark.parametrize("context", [(), (HEAD,)])
def test_where_there_is_no_passage_nothing_is_chosen(
    engine: BlockAttentionEngine, context: tuple[Block, ...]
) -> None:
    prompt = BlockPrompt(context, Q)
    found = engine.generate(prompt, promote="attention:1", max_new_tokens=1).stats
    assert found.promoted_tokens == 0
    assert found.prompt_tokens == len(engine.model.tokenizer.prompt_ids(prompt).flat)


def test_a_model_without_relay_attention_cannot_choose_by_attention() -> None:
    windowed: Any = tiny_model("mistral", sliding_window=8)
    engine = BlockAttentionEngine(BlockModel(windowed, tiny_tokenizer()))
    with pytest.raises(UnsupportedModelError, match="relay"):
        engine.generate(PROMPT, promote="attention:1", max_new_tokens=1)
    assert engine.generate(PROMPT, promote="1", max_new_tokens=1).token_ids


def test_full_mode_promotes_nothing(engine: BlockAttentionEngine) -> None:
    plain = engine.answer_logits(PROMPT, [0], mode="full")
    assert torch.equal(engine.answer_logits(PROMPT, [0], mode="full", promote=2), plain)
    asked = engine.generate(PROMPT, mode="full", promote=2, max_new_tokens=1)
    assert asked.stats.promoted_tokens == 0


def test_an_answer_is_predicted_as_it_is_generated(engine: BlockAttentionEngine) -> None:
    answer = engine.generate(PROMPT, promote=1, max_new_tokens=NEW).token_ids
    logits = engine.answer_logits(PROMPT, answer, promote=1)
    assert logits.argmax(-1).tolist() == answer
