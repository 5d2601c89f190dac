"""The oracle against itself where its meaning is plain, and against models run by hand."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.attention.context_merge import ContextMerge, FixedMerge, LearnedMerge
from blockattn_rag.check.oracle import oracle_generate, oracle_logits
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model.tolerances import LOGITS
from tests.model.test_relay_attention import random_ids
from tests.models import tiny_model

FIRST, ONE, OTHER, FINAL = [256, 3, 4, 5], [7, 8, 9, 10, 11], [20, 21], [40, 41, 42]
PROMPT = [FIRST, ONE, OTHER, FINAL]
IDENTITIES = [
    FixedMerge("scale", 1.0),
    FixedMerge("bias", 0.0),
    FixedMerge("ape", 1.0),
    LearnedMerge.identity(3, 4, 2, 8),
]


@pytest.mark.parametrize("merge", IDENTITIES, ids=["scale", "bias", "ape", "learned"])
def test_a_merge_of_one_is_none(merge: ContextMerge) -> None:
    model = tiny_model("llama")
    expected = oracle_logits(model, PROMPT)
    found = oracle_logits(model, PROMPT, merge=merge)
    assert relative_error(found, expected) <= LOGITS[torch.float32]
    assert not torch.equal(found, expected)  # by another way
    other = oracle_logits(model, PROMPT, merge=FixedMerge("scale", 0.5))
    assert relative_error(other, expected) > 1e-2


def test_a_context_of_no_weight_is_not_seen() -> None:
    """The final block then attends to the first block alone, its position aside."""
    model = tiny_model("llama")
    found = oracle_logits(model, PROMPT, merge=FixedMerge("bias", -80.0))
    position = torch.tensor([[0, 1, 2, 3, 11, 12, 13]])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[*FIRST, *FINAL]]), position_ids=position).logits
    assert relative_error(found, expected[0, -3:]) <= LOGITS[torch.float32]


def test_without_blocks_after_the_first_a_merge_changes_nothing() -> None:
    model = tiny_model("llama")
    merge = FixedMerge("bias", -2.0)
    for prompt in ([FINAL], [FIRST, FINAL]):
        assert torch.equal(oracle_logits(model, prompt, merge=merge), oracle_logits(model, prompt))


def test_the_models_attention_is_what_it_was_afterwards() -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    expected = oracle_logits(model, PROMPT)
    oracle_logits(model, PROMPT, merge=FixedMerge("bias", -2.0))
    assert model.config._attn_implementation == before
    assert torch.equal(oracle_logits(model, PROMPT), expected)


def test_composite_positions_start_each_block_at_0() -> None:
    """A block that holds the tokens of another then has its keys, but for their order."""
    model = tiny_model("llama")
    one, other = ([FIRST, *blocks, FINAL] for blocks in ([ONE, OTHER], [OTHER, ONE]))
    found = oracle_logits(model, one, positions="composite")
    swapped = oracle_logits(model, other, positions="composite")
    assert relative_error(found, swapped) <= LOGITS[torch.float32]
    assert relative_error(oracle_logits(model, one), oracle_logits(model, other)) > 1e-2


def test_greedy_tokens_are_those_of_the_weighted_logits() -> None:
    model = tiny_model("llama")
    blocks = [random_ids(length, seed) for seed, length in enumerate((10, 20, 15, 9))]
    merge = FixedMerge("bias", -80.0)
    found = oracle_generate(model, blocks, 4, merge=merge)
    assert found != oracle_generate(model, blocks, 4)
    for number, token in enumerate(found):
        prompt = [*blocks[:-1], [*blocks[-1], *found[:number]]]
        assert token == int(oracle_logits(model, prompt, merge=merge)[-1].argmax())
