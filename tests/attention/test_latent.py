"""Attention to latents compared with float64 attention to the expanded keys and values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.kernels import AttentionInputs
from blockattn_rag.attention.latent import LatentMap
from blockattn_rag.attention.relay import JoinLimits, LayerReads, RelayPlan
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout, shift_positions
from tests.attention.test_kernels import exact, random
from tests.attention.test_relay import ORDERS

pytestmark = pytest.mark.usefixtures("device", "no_gradients")

HEADS, STILL, ROTARY, RANK, VALUE = 6, 12, 8, 24, 10
_FREQUENCIES = 10_000.0 ** (-torch.arange(0, ROTARY, 2) / ROTARY)
LAYOUTS = {
    "half": RotaryLayout(_FREQUENCIES, "half"),
    "interleaved": RotaryLayout(_FREQUENCIES, "interleaved"),
    "nope": NO_ROTATION,
}
# As in `test_kernels.budget`, with the sums of both projections and of the scores. Doubled, because
# queries are rotated in float32.
_SUMS = 4 * (STILL + RANK + ROTARY) + math.sqrt(200)
BUDGET = 2 * _SUMS * torch.finfo(torch.float32).eps


def blocks_of(lengths: list[int]) -> list[BlockKV]:
    return [
        BlockKV(
            keys=tuple(random(1, n, ROTARY, seed=100 * i + layer) for layer in (0, 1)),
            values=tuple(random(1, n, RANK, seed=100 * i + 50 + layer) for layer in (0, 1)),
            token_ids=torch.zeros(n, dtype=torch.long),
            fingerprint="",
            digest=str(i),
            handle="",
        )
        for i, n in enumerate(lengths)
    ]


def maps_of(layer: int) -> LatentMap:
    key, value = (
        random(HEADS, RANK, size, seed=900 + layer) / RANK**0.5 for size in (STILL, VALUE)
    )
    return LatentMap(key, value)


def by_expanding(
    query: Tensor, context: Context, tail: tuple[Tensor, Tensor], mask: Tensor, layout: RotaryLayout
) -> Tensor:
    """Attention of one request in layer 1 to the expanded keys and values of all tokens."""
    latent, keys, values = maps_of(1), [], []
    for kv, _, shift in context.blocks:
        rotary, latents = (states.double() for states in kv.states(1))
        still = latents @ latent.key.double()
        moved = shift_positions(rotary, shift, layout).expand(HEADS, -1, -1)
        keys.append(torch.cat([still, moved], -1))
        values.append(latents @ latent.value.double())
    key, value = torch.cat([*keys, tail[0]], 1), torch.cat([*values, tail[1]], 1)
    before = torch.ones(len(mask), context.num_tokens, dtype=torch.bool)
    return exact(query, key, value, 0.25, torch.cat([before, mask], -1)).output


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("joined", [0, 50], ids=["one by one", "joined"])
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_attention_to_latents_equals_attention_to_expanded_states(
    kv_dtype: str, joined: int, layout: RotaryLayout, orders: list[list[int]]
) -> None:
    blocks = blocks_of([40, 1, 17, 60])
    if kv_dtype == "int8":
        blocks = [kv.quantized() for kv in blocks]
    contexts = [place([blocks[i] for i in order]) for order in orders]
    layers = {7: LayerReads(1, latent=maps_of(1))}
    device, limits = torch.get_default_device(), JoinLimits(joined, joined)
    plan = RelayPlan(contexts, [layout, layout], device, joins=limits, layers=layers)
    for tokens in (6, 1):
        query = random(len(orders), HEADS, tokens, STILL + ROTARY, seed=7)
        key = random(len(orders), HEADS, tokens, STILL + ROTARY, seed=8)
        value = random(len(orders), HEADS, tokens, VALUE, seed=9)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        seen = mask.expand(len(orders), 1, -1, -1)
        found = plan.attend(7, AttentionInputs(query, key, value, 0.25, seen))
        for row, context in enumerate(contexts):
            expected = by_expanding(query[row], context, (key[row], value[row]), mask, layout)
            assert (found[row] - expected).abs().max() <= BUDGET
