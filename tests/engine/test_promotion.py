"""Promoted passages are computed in the final block: answers, choice and figures."""

from __future__ import annotations

import unicodedata
from typing import Any, Literal

import pytest
import torch
from tokenizers import normalizers

from blockattn_rag.check.oracle import RecipeOracle, oracle_logits
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.context import place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span
from tests.engines import with_settings
from tests.models import tiny_model, tiny_tokenizer

HEAD = Block.of([Span("You answer.", "system")])
A, B, C = Block("Halden is tall."), Block("It was built in 1931."), Block("Ferries go.")
Q = "How tall?"
PROMPT = BlockPrompt((HEAD, A, B, C), Q)
NEW = 6
EXACT = LOGITS[torch.float32]


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


def promoting(count: int) -> Recipe:
    return Recipe(promote=count)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return relative_error(found[-1].float(), expected.float())


@pytest.mark.parametrize("assembly", ["relay", "copy"])
@pytest.mark.parametrize("count", [1, 2])
def test_promoted_passages_see_all_blocks_and_one_another(
    engine: BlockAttentionEngine, assembly: Literal["relay", "copy"], count: int
) -> None:
    oracle = RecipeOracle(engine.model, PROMPT, promoting(count))
    expected, logits = oracle.generate(NEW), oracle.logits()[-1]
    engine = with_settings(engine, assembly=assembly)
    options: dict[str, Any] = {"recipe": promoting(count)}
    assert engine.generate(PROMPT, **options, max_new_tokens=NEW).token_ids == expected
    assert error(engine.answer_logits(PROMPT, [0], **options), logits) < EXACT
    assert error(engine.answer_logits(PROMPT, [0]), logits) > 100 * EXACT
    together = engine.generate_batch([PROMPT, ["a", "b", Q]], **options, max_new_tokens=NEW)
    assert together[0].token_ids == expected


def test_promoting_all_is_full_attention(engine: BlockAttentionEngine) -> None:
    oracle = RecipeOracle(engine.model, PROMPT, promoting(3))
    order = [token for block in oracle.blocks for token in block]
    full = engine.model.next_logits(torch.tensor([order]))
    assert error(engine.answer_logits(PROMPT, [0], recipe=promoting(3)), full) < EXACT
    assert sorted(order) == sorted(engine.model.tokenizer.prompt_ids(PROMPT).flat)


def test_a_prompt_that_opens_with_a_passage_keeps_its_one_bos(engine: BlockAttentionEngine) -> None:
    for count in (1, 2):
        for texts in (["a", "b", Q], ["a", Q]):
            recipe = promoting(count)
            oracle = RecipeOracle(engine.model, BlockPrompt.from_texts(texts), recipe)
            assert sum(block.count(256) for block in oracle.blocks) == 1
            assert oracle.blocks[0][0] == 256
            found = engine.answer_logits(texts, [0], recipe=recipe)
            assert error(found, oracle.logits()[-1]) < EXACT


def test_the_question_chooses_what_it_attends_to(model: BlockModel) -> None:
    """Against the weights of one dense forward, each token's shares among blocks averaged."""
    blocks = [ids(model, HEAD, first=True), *(ids(model, one) for one in (A, B, C)), ids(model, Q)]
    shares = dense_shares(blocks)
    requests = [EncodeRequest(one, str(i), str(i)) for i, one in enumerate(blocks[:-1])]
    encoded = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    context = place([encoded[str(i)] for i in range(4)])
    found = model.attention_to_blocks(context, blocks[-1])
    assert found == pytest.approx(shares, rel=1e-4)
    assert sum(found) == pytest.approx(1)
    best = max((1, 2, 3), key=lambda i: shares[i])
    oracle = RecipeOracle(model, PROMPT, promoting(1))
    assert oracle.blocks[-1] == blocks[best] + blocks[-1]


def test_attention_is_measured_at_each_place_of_a_repeated_block(model: BlockModel) -> None:
    parts = (HEAD, A, B, A, C)
    blocks = [*(ids(model, one, first=not at) for at, one in enumerate(parts)), ids(model, Q)]
    requests = [EncodeRequest(one, str(one), "") for one in blocks[:-1]]
    encoded = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    found = model.attention_to_blocks(place([encoded[str(one)] for one in blocks[:-1]]), blocks[-1])
    assert found == pytest.approx(dense_shares(blocks), rel=1e-4)


@pytest.mark.parametrize("twin", ["template", "composed"])
def test_texts_of_equal_tokens_are_promoted_by_their_place(model: BlockModel, twin: str) -> None:
    """They share one stored block, which has the handle of the text that was encoded first."""
    best, other = most_attended(model), Block("Ferries go.")
    if twin == "template":  # the text around it is part of it, or of its template
        first = Block(f"<{best.text}>")
        again = Block(best.text, BlockTemplate("<", ">"))
    else:  # two texts that a normalising tokenizer gives the same ids
        first = Block(unicodedata.normalize("NFD", f"<{best.text}>\u00e9"))
        again = Block(unicodedata.normalize("NFC", f"<{best.text}>\u00e9"))
        model = BlockModel(tiny_model(), nfc_tokenizer())
    assert first.handle != again.handle
    assert ids(model, first) == ids(model, again)
    engine = BlockAttentionEngine(model, recipe="none")
    engine.encode([first])
    prompt = BlockPrompt((HEAD, other, again, C), Q)
    oracle = RecipeOracle(model, prompt, promoting(1))
    assert oracle.blocks[-1] == ids(model, again, Q)  # it is the one to be promoted
    found = engine.answer_logits(prompt, [0], recipe=promoting(1))
    assert error(found, oracle.logits()[-1]) < EXACT


def most_attended(model: BlockModel) -> Block:
    """A passage that the question attends to more than to all others of these tests."""
    return Block("How tall? How tall? How tall? How tall? How tall?")


def nfc_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def dense_shares(blocks: list[list[int]]) -> list[float]:
    hf_model = tiny_model(attn_implementation="eager")
    weights: list[torch.Tensor] = []
    layers: Any = hf_model.get_submodule("model.layers")
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, out: weights.append(out[1]))
        for layer in layers
    ]
    oracle_logits(hf_model, blocks)
    for hook in hooks:
        hook.remove()
    rows = torch.stack(weights)[:, 0, :, -len(blocks[-1]) :]  # [layers, heads, question, tokens]
    parts = torch.split(rows, [len(one) for one in blocks], dim=-1)
    sums = [part.sum(-1) for part in parts][:-1]
    masses = torch.stack(sums)
    means: list[float] = (masses / masses.sum(0)).flatten(1).mean(1).tolist()
    return means


def test_figures_tell_what_promotion_costs(engine: BlockAttentionEngine) -> None:
    model = engine.model
    head, question = len(ids(model, HEAD, first=True)), len(Q)
    tokens = sum(len(ids(model, one)) for one in (A, B, C))
    cold = engine.generate(PROMPT, recipe=promoting(3), max_new_tokens=1).stats
    # A passage that is computed for the choice is a miss.
    assert (cold.hits, cold.misses, cold.reused_tokens) == (0, 4, 0)
    assert cold.computed_tokens == head + 2 * tokens + 2 * question
    warm = engine.generate(PROMPT, recipe=promoting(3), max_new_tokens=1).stats
    assert (warm.hits, warm.misses, warm.reused_tokens) == (1, 0, head)
    assert warm.promoted_tokens == tokens + question
    assert warm.computed_tokens == tokens + 2 * question
    assert warm.recipe == "promote 3"


@pytest.mark.parametrize("context", [(), (HEAD,)])
def test_nothing_to_promote(engine: BlockAttentionEngine, context: tuple[Block, ...]) -> None:
    prompt = BlockPrompt(context, Q)
    found = engine.generate(prompt, recipe=promoting(1), max_new_tokens=1).stats
    assert found.promoted_tokens == 0
    assert found.prompt_tokens == len(engine.model.tokenizer.prompt_ids(prompt).flat)


def test_full_mode_promotes_nothing(engine: BlockAttentionEngine) -> None:
    plain = engine.answer_logits(PROMPT, [0], mode="full")
    found = engine.answer_logits(PROMPT, [0], mode="full", recipe=promoting(2))
    assert torch.equal(found, plain)
    asked = engine.generate(PROMPT, mode="full", recipe=promoting(2), max_new_tokens=1)
    assert (asked.stats.promoted_tokens, asked.stats.recipe) == (0, "")


def test_an_answer_is_predicted_as_it_is_generated(engine: BlockAttentionEngine) -> None:
    answer = engine.generate(PROMPT, recipe=promoting(1), max_new_tokens=NEW).token_ids
    logits = engine.answer_logits(PROMPT, answer, recipe=promoting(1))
    assert logits.argmax(-1).tolist() == answer
