"""Relay attention against attention written out in float64, and against hand-written numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention import (
    Partial,
    RelayPlan,
    attend,
    attend_cpu,
    attend_plain,
    merge,
)
from blockattn_rag.kv import BlockKV, Context, place
from blockattn_rag.rope import NO_ROTATION, RotaryLayout, rotate, shift_positions

BACKENDS = [attend_plain, attend_cpu]
HEADS, KV_HEADS, SIZE = 6, 2, 16
LAYOUT = RotaryLayout(10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE), "half")


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> Partial:
    """Softmax attention in float64, as written in any textbook."""
    scores = query.double() @ key.double().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return Partial(scores.softmax(-1) @ value.double(), scores.logsumexp(-1))


def budget(dtype: torch.dtype, keys: int) -> float:
    """Error of an output whose inputs are of order 1.

    Scores are sums of SIZE products, so each is off by about ``SIZE * eps``, and a weight by as
    much; the output is a mean of values of order 1 plus a sum over ``keys`` roundings that grow
    with their square root. 16-bit types also round the output once.
    """
    return (4 * SIZE + math.sqrt(keys)) * torch.finfo(dtype).eps


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_query_over_two_keys_gives_the_numbers_worked_out_by_hand(
    backend: Callable[..., Partial],
) -> None:
    # Scores 0 and ln 3: weights 1/4 and 3/4, log-sum-exp ln 4.
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[0.0, 0.0], [math.log(3), 5.0]]]])
    value = torch.tensor([[[[4.0, 0.0], [0.0, 8.0]]]])
    part = backend(query, key, value, 1.0, None)
    torch.testing.assert_close(part.output, torch.tensor([[[[1.0, 6.0]]]]))
    torch.testing.assert_close(part.lse, torch.tensor([[[math.log(4)]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_each_backend_stays_within_the_rounding_of_its_type(
    backend: Callable[..., Partial], dtype: torch.dtype, masked: bool
) -> None:
    query = random(1, KV_HEADS, 9, SIZE, dtype=dtype)
    key = random(1, KV_HEADS, 40, SIZE, seed=1, dtype=dtype)
    value = random(1, KV_HEADS, 40, SIZE, seed=2, dtype=dtype)
    mask = torch.ones(9, 40, dtype=torch.bool).tril(30)[None, None] if masked else None
    found = backend(query, key, value, 0.25, mask)
    expected = exact(query, key, value, 0.25, mask)
    assert found.output.dtype == found.lse.dtype == torch.float32
    assert (found.output - expected.output).abs().max() <= budget(dtype, 40)
    assert (found.lse - expected.lse).abs().max() <= budget(dtype, 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_has_output_zero_and_minus_infinity(
    backend: Callable[..., Partial],
) -> None:
    mask = torch.tensor([[True, True], [False, False]])[None, None]
    states = random(1, 1, 2, SIZE)
    part = backend(states, states, states, 1.0, mask)
    assert part.lse[0, 0, 1] == -math.inf
    assert not part.output[0, 0, 1].any()
    assert part.output[0, 0, 0].any()


def test_values_of_another_size_than_keys_are_attended_to_by_the_plain_backend() -> None:
    query, key, value = random(1, 1, 3, 8), random(1, 1, 5, 8, seed=1), random(1, 1, 5, 4, seed=2)
    found = attend(query, key, value, 1.0)
    assert found.output.shape == (1, 1, 3, 4)
    torch.testing.assert_close(found, attend_plain(query, key, value, 1.0, None))


def test_parts_merge_to_attention_over_the_whole() -> None:
    query = random(1, KV_HEADS, 5, SIZE)
    key, value = random(1, KV_HEADS, 60, SIZE, seed=1), random(1, KV_HEADS, 60, SIZE, seed=2)
    whole = exact(query, key, value, 0.25, None)
    cuts = [slice(0, 1), slice(1, 30), slice(30, 60)]
    parts = [attend(query, key[:, :, cut], value[:, :, cut], 0.25) for cut in cuts]
    merged = merge(torch.stack([p.output for p in parts]), torch.stack([p.lse for p in parts]))
    assert (merged.output - whole.output).abs().max() <= budget(torch.float32, 60)
    assert (merged.lse - whole.lse).abs().max() <= budget(torch.float32, 60)


def test_merging_with_parts_that_see_nothing_changes_nothing_and_stays_finite() -> None:
    outputs, lses = random(3, 2, 4), torch.tensor([[1.0, -math.inf]] * 3)
    lses[1:] = -math.inf
    merged = merge(outputs, lses)
    torch.testing.assert_close(merged.output[0], outputs[0, 0])
    assert merged.output.isfinite().all()
    assert merged.lse.tolist() == [1.0, -math.inf]


def blocks_of(lengths: list[int], layers: int = 2) -> list[BlockKV]:
    def states(block: int, length: int, layer: int) -> Tensor:
        return random(KV_HEADS, length, SIZE, seed=100 * block + layer)

    return [
        BlockKV(
            keys=tuple(states(i, n, layer) for layer in range(layers)),
            values=tuple(states(i, n, layer + 50) for layer in range(layers)),
            token_ids=torch.zeros(n, dtype=torch.long),
            fingerprint="",
            digest=str(i),
            handle="",
        )
        for i, n in enumerate(lengths)
    ]


def by_moving_the_keys(
    query: Tensor,
    context: Context,
    tail: tuple[Tensor, Tensor],
    mask: Tensor | None,
    layer: int,
    layout: RotaryLayout,
) -> Tensor:
    """One request's attention the ordinary way: keys moved and joined, heads repeated, float64."""
    keys = [shift_positions(b.kv.keys[layer].double(), b.shift, layout) for b in context.blocks]
    key = torch.cat([*keys, tail[0].double()], dim=1)
    value = torch.cat([*(b.kv.values[layer] for b in context.blocks), tail[1]], dim=1)
    groups = HEADS // KV_HEADS
    seen = None
    if mask is not None:
        before = torch.ones(*mask.shape[:-1], context.num_tokens, dtype=torch.bool)
        seen = torch.cat([before, mask], dim=-1)
    key, value = key.repeat_interleave(groups, 0)[None], value.repeat_interleave(groups, 0)[None]
    return exact(query[None], key, value, 0.25, seen).output[0]


# Rotating in float32 adds one rounding of each product to the scores of the exact attention.
RELAY_BUDGET = 2 * budget(torch.float32, 200)


@pytest.mark.parametrize("layout", [LAYOUT, NO_ROTATION], ids=["rotary", "nope"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_turning_queries_equals_moving_keys_for_a_batch_that_shares_blocks(
    layout: RotaryLayout, tokens: int
) -> None:
    blocks = blocks_of([40, 1, 17, 60])
    orders = [[0, 1, 2, 3], [3, 0], [], [2, 2, 1]]  # another order, no block, one block twice
    contexts = [place([blocks[i] for i in order]) for order in orders]
    query = random(len(orders), HEADS, tokens, SIZE, seed=7)
    tail_key = random(len(orders), KV_HEADS, tokens, SIZE, seed=8)
    tail_value = random(len(orders), KV_HEADS, tokens, SIZE, seed=9)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    plan = RelayPlan(contexts, [layout, layout], torch.device("cpu"))
    found = plan.attend(1, query, tail_key, tail_value, 0.25, mask.expand(len(orders), -1, -1, -1))
    for row, context in enumerate(contexts):
        tail = tail_key[row], tail_value[row]
        expected = by_moving_the_keys(query[row], context, tail, mask[0], 1, layout)
        assert (found[row] - expected).abs().max() <= RELAY_BUDGET


def test_beams_of_one_request_see_the_same_context() -> None:
    context = place(blocks_of([12, 5]))
    query = random(3, HEADS, 1, SIZE, seed=7)
    tail_key, tail_value = (
        random(3, KV_HEADS, 2, SIZE, seed=8),
        random(3, KV_HEADS, 2, SIZE, seed=9),
    )
    plan = RelayPlan([context], [LAYOUT], torch.device("cpu"))
    found = plan.attend(0, query, tail_key, tail_value, 0.25, None)
    for beam in range(3):
        tail = tail_key[beam], tail_value[beam]
        expected = by_moving_the_keys(query[beam], context, tail, None, 0, LAYOUT)
        assert (found[beam] - expected).abs().max() <= RELAY_BUDGET


def test_the_stored_tensors_are_bit_identical_afterwards() -> None:
    blocks = blocks_of([12, 5])
    before = [tensor.clone() for kv in blocks for tensor in (*kv.keys, *kv.values)]
    plan = RelayPlan([place(blocks)], [LAYOUT, LAYOUT], torch.device("cpu"))
    states = random(1, KV_HEADS, 3, SIZE)
    for layer in (0, 1):
        plan.attend(layer, random(1, HEADS, 3, SIZE), states, states, 0.25, None)
    after = [tensor for kv in blocks for tensor in (*kv.keys, *kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_query_is_turned_against_the_blocks_shift() -> None:
    # A query at position 10 and a key at local position 2 of a block placed at 5: distance 3.
    query, key = random(1, 1, SIZE), random(1, 1, SIZE, seed=1)
    at_ten = rotate(query, *LAYOUT.cos_sin(10, query.device), LAYOUT)
    at_two = rotate(key, *LAYOUT.cos_sin(2, key.device), LAYOUT)
    turned = shift_positions(at_ten, -5, LAYOUT)
    by_distance = rotate(query, *LAYOUT.cos_sin(3, query.device), LAYOUT)
    torch.testing.assert_close(turned @ at_two.mT, by_distance @ key.mT, atol=1e-5, rtol=1e-5)
