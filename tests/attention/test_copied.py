"""A weighted context in joined keys gives what relay attention gives over the blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.context_merge import ContextMerge, FixedMerge
from blockattn_rag.attention.copied import CopiedContexts
from blockattn_rag.kv.context import Context, assemble, place
from tests.attention.test_context_merge import learned
from tests.attention.test_kernels import KV_HEADS, SIZE, random
from tests.attention.test_relay import HEADS, LAYOUT, RELAY_BUDGET, blocks_of, relay_plan

pytestmark = pytest.mark.usefixtures("device", "no_gradients")

ORDERS = {
    "one request": [[0, 1, 2, 3]],
    "a first block alone": [[0]],
    "equal lengths": [[0, 1, 2], [0, 2, 1]],
    "unequal lengths": [[0, 1, 2, 3], [3, 0], [], [2, 2, 1], [3]],
}


def joined(contexts: list[Context]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the second layer, padded on the left, and what is no padding."""
    width = max(context.num_tokens for context in contexts)
    keys, values = (torch.zeros(len(contexts), KV_HEADS, width, SIZE) for _ in range(2))
    present = torch.zeros(len(contexts), 1, 1, width, dtype=torch.bool)
    for row, context in enumerate(contexts):
        if context.blocks:
            start = width - context.num_tokens
            *_, (keys[row, :, start:], values[row, :, start:]) = assemble(context, [LAYOUT] * 2)
            present[row, ..., start:] = True
    return keys, values, present


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("weight", [FixedMerge("bias", -0.7, 0.8), learned()], ids=["fixed", ""])
@pytest.mark.parametrize(("tokens", "beams"), [(1, 1), (6, 1), (4, 3)])
def test_it_is_what_relay_attention_gives(
    tokens: int, beams: int, weight: ContextMerge, orders: list[list[int]]
) -> None:
    blocks = blocks_of([40, 1, 17, 60])
    contexts = [place([blocks[i] for i in order]) for order in orders]
    rows = len(orders) * beams
    query = random(rows, HEADS, tokens, SIZE, seed=7)
    tail_key = random(rows, KV_HEADS, tokens, SIZE, seed=8)
    tail_value = random(rows, KV_HEADS, tokens, SIZE, seed=9)
    causal = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool).tril()
    plan = relay_plan(contexts, [LAYOUT, LAYOUT], merge=weight)
    expected = plan.attend(1, query, tail_key, tail_value, 0.25, causal)
    keys, values, present = (t.repeat_interleave(beams, dim=0) for t in joined(contexts))
    key, value = torch.cat([keys, tail_key], dim=2), torch.cat([values, tail_value], dim=2)
    mask = torch.cat([present.expand(-1, -1, tokens, -1), causal], dim=-1)
    copied = CopiedContexts(contexts, weight, torch.get_default_device())
    found = copied.attend(1, query, key, value, 0.25, None if bool(mask.all()) else mask)
    assert found.shape == query.shape
    assert (found - expected).abs().max() <= RELAY_BUDGET


def test_weights_of_another_model_are_refused() -> None:
    contexts = [place(blocks_of([4, 3]))]
    copied = CopiedContexts(contexts, learned(heads=2 * HEADS), torch.get_default_device())
    states = random(1, KV_HEADS, 8, SIZE)
    with pytest.raises(ValueError, match="found a learned merge of 2 layers, 12 heads"):
        copied.attend(0, random(1, HEADS, 1, SIZE), states, states, 0.25, None)
