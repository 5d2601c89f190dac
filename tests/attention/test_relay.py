"""Relay attention over blocks compared with float64 attention to moved keys."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention import relay
from blockattn_rag.attention.kernels import (
    AttentionInputs,
    attend_flash,
    attend_memory_efficient,
    single_softmax,
)
from blockattn_rag.attention.merge import Partial
from blockattn_rag.attention.relay import ACCELERATOR_JOINS, CPU_JOINS, JoinLimits, RelayPlan
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout, rotate, shift_positions
from tests.attention.test_kernels import KV_HEADS, SIZE, bounds, budget, exact, random

HEADS = 6
pytestmark = pytest.mark.usefixtures("device", "no_gradients")
FREQUENCIES = 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
LAYOUT = RotaryLayout(FREQUENCIES, "half")
OTHER_LAYOUTS = {
    "interleaved": RotaryLayout(FREQUENCIES, "interleaved"),
    "partial": RotaryLayout(FREQUENCIES[: SIZE // 4], "half"),
    "nope": NO_ROTATION,
}


def blocks_of(
    lengths: list[int], layers: int = 2, *, size: int = SIZE, dtype: torch.dtype = torch.float32
) -> list[BlockKV]:
    def states(block: int, length: int, layer: int) -> Tensor:
        return random(KV_HEADS, length, size, seed=100 * block + layer, dtype=dtype)

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


def relay_plan(
    contexts: list[Context], layouts: list[RotaryLayout], joins: int | None = None
) -> RelayPlan:
    """Plan for the tested device. Blocks of fewer than ``joins`` tokens are joined."""
    limits = None if joins is None else JoinLimits(joins, joins)
    return RelayPlan(contexts, layouts, torch.get_default_device(), joins=limits)


def by_moving_the_keys(
    query: Tensor,
    context: Context,
    tail: tuple[Tensor, Tensor],
    mask: Tensor | None,
    layer: int,
    layout: RotaryLayout,
    scale: float = 0.25,
) -> Tensor:
    """Float64 reference attention of one request: keys moved and concatenated, heads repeated."""
    keys = [shift_positions(b.kv.keys[layer].double(), b.shift, layout) for b in context.blocks]
    key = torch.cat([*keys, tail[0].double()], dim=1)
    value = torch.cat([*(b.kv.values[layer] for b in context.blocks), tail[1]], dim=1)
    groups = len(query) // KV_HEADS
    seen = None
    if mask is not None:
        before = torch.ones(*mask.shape[:-1], context.num_tokens, dtype=torch.bool)
        seen = torch.cat([before, mask], dim=-1)
    key, value = key.repeat_interleave(groups, 0)[None], value.repeat_interleave(groups, 0)[None]
    return exact(query[None], key, value, scale, seen).output[0]


# Rotating in float32 adds one rounding per product to the scores.
RELAY_BUDGET = 2 * budget(torch.float32, 200)


ORDERS = {
    "one request": [[0, 1, 2, 3]],
    "one block twice": [[2, 0, 2]],
    "a batch that shares blocks": [[0, 1, 2, 3], [3, 0], [], [2, 2, 1]],
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("layout", [LAYOUT, NO_ROTATION], ids=["rotary", "nope"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_query_shift_is_exact(layout: RotaryLayout, tokens: int, orders: list[list[int]]) -> None:
    blocks = blocks_of([40, 1, 17, 60])
    contexts = [place([blocks[i] for i in order]) for order in orders]
    query = random(len(orders), HEADS, tokens, SIZE, seed=7)
    tail_key = random(len(orders), KV_HEADS, tokens, SIZE, seed=8)
    tail_value = random(len(orders), KV_HEADS, tokens, SIZE, seed=9)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    plan = relay_plan(contexts, [layout, layout])
    masks = mask.expand(len(orders), -1, -1, -1)
    found = plan.attend(1, AttentionInputs(query, tail_key, tail_value, 0.25, masks))
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
    plan = relay_plan([context], [LAYOUT])
    found = plan.attend(0, AttentionInputs(query, tail_key, tail_value, 0.25))
    for beam in range(3):
        tail = tail_key[beam], tail_value[beam]
        expected = by_moving_the_keys(query[beam], context, tail, None, 0, LAYOUT)
        assert (found[beam] - expected).abs().max() <= RELAY_BUDGET


def test_a_query_is_rotated_against_the_shift_of_the_block() -> None:
    # Query at position 10, key at local position 2 of a block that starts at 5: distance 3.
    query, key = random(1, 1, SIZE), random(1, 1, SIZE, seed=1)
    at_ten = rotate(query, *LAYOUT.cos_sin(10, query.device), LAYOUT)
    at_two = rotate(key, *LAYOUT.cos_sin(2, key.device), LAYOUT)
    turned = shift_positions(at_ten, -5, LAYOUT)
    by_distance = rotate(query, *LAYOUT.cos_sin(3, query.device), LAYOUT)
    torch.testing.assert_close(turned @ at_two.mT, by_distance @ key.mT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 6])
def test_joined_blocks_give_the_results_of_single_blocks(tokens: int) -> None:
    """Joined keys are rotated in float32 and rounded once more, as in the copy path."""
    blocks = blocks_of([9, 9, 1, 30, 2])
    contexts = [place([blocks[i] for i in order]) for order in ([0, 1, 2, 3], [0, 1, 4, 2])]
    query = random(2, HEADS, tokens, SIZE, seed=7)
    tail = random(2, KV_HEADS, tokens, SIZE, seed=8), random(2, KV_HEADS, tokens, SIZE, seed=9)
    found = []
    for limit in (0, 25):
        plan = relay_plan(contexts, [LAYOUT, NO_ROTATION], limit)
        found.append([plan.attend(layer, AttentionInputs(query, *tail, 0.25)) for layer in (0, 1)])
    for single, joined in zip(*found, strict=True):
        assert (single - joined).abs().max() <= RELAY_BUDGET
        assert not torch.equal(single, joined)


def test_decoding_joins_small_blocks_and_prefill_does_not() -> None:
    contexts, device = [place(blocks_of([40, 40]))], torch.get_default_device()
    plan = RelayPlan(contexts, [LAYOUT], device, joins=CPU_JOINS)
    assert [len(segment.blocks) for segment in plan.table(2).segments] == [1, 1]
    assert [len(segment.blocks) for segment in plan.table(1).segments] == [2]


def test_an_accelerator_joins_blocks_once_for_prefill_and_decoding() -> None:
    assert ACCELERATOR_JOINS.prefill_tokens > 1000
    plan = RelayPlan([place(blocks_of([40, 40]))], [LAYOUT], torch.device("meta"))
    assert plan.table(2) is plan.table(1)
    assert [len(segment.blocks) for segment in plan.table(2).segments] == [2]


@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
@pytest.mark.parametrize("joined", [0, 50], ids=["one by one", "joined"])
def test_a_generated_token_attends_to_all_blocks_at_once(layout: RotaryLayout, joined: int) -> None:
    context = place(blocks_of([40, 1, 17, 60]))
    plan = relay_plan([context], [layout], joined)
    query = random(1, HEADS, 1, SIZE, seed=7)
    tail = random(1, KV_HEADS, 5, SIZE, seed=8), random(1, KV_HEADS, 5, SIZE, seed=9)
    found = plan.attend(0, AttentionInputs(query, *tail, 0.25))
    ours = tail[0][0], tail[1][0]
    expected = by_moving_the_keys(query[0], context, ours, None, 0, layout)
    assert (found[0] - expected).abs().max() <= RELAY_BUDGET
    everywhere = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    masked = plan.attend(0, AttentionInputs(query, *tail, 0.25, everywhere))
    assert (masked - found).abs().max() <= RELAY_BUDGET


@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
@pytest.mark.parametrize("spread", [1.0, 1e3])
@pytest.mark.parametrize("fully_masked", [False, True], ids=["causal", "a row is fully masked"])
def test_question_attends_to_blocks(
    fully_masked: bool, spread: float, layout: RotaryLayout
) -> None:
    context = place(blocks_of([40, 1, 17, 60]))
    plan = relay_plan([context], [layout])
    query = random(1, HEADS, 6, SIZE, seed=7) * spread
    tail = random(1, KV_HEADS, 6, SIZE, seed=8), random(1, KV_HEADS, 6, SIZE, seed=9)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(-1 if fully_masked else 0)
    found = plan.attend(0, AttentionInputs(query, *tail, 0.25, mask))
    ours = tail[0][0], tail[1][0]
    expected = by_moving_the_keys(query[0], context, ours, mask[0], 0, layout)
    assert (found[0] - expected).abs().max() <= RELAY_BUDGET * spread


def test_a_prompt_without_context_attends_to_itself() -> None:
    plan = relay_plan([place([])], [LAYOUT])
    for tokens in (1, 3):
        query = random(1, HEADS, tokens, SIZE, seed=7)
        tail = random(1, KV_HEADS, 3, SIZE, seed=8), random(1, KV_HEADS, 3, SIZE, seed=9)
        found = plan.attend(0, AttentionInputs(query, *tail, 0.25))
        key, value = (states.repeat_interleave(HEADS // KV_HEADS, 1) for states in tail)
        expected = exact(query, key, value, 0.25, None).output
        assert (found - expected).abs().max() <= RELAY_BUDGET


def test_one_float32_request_uses_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of([4, 3])
    half = [replace(kv, keys=(kv.keys[0].half(),), values=(kv.values[0].half(),)) for kv in blocks]
    calls: list[object] = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return single_softmax(*args)

    monkeypatch.setattr(relay, "single_softmax", counted)

    def takes_one(
        contexts: list[Context], rows: int = 1, tokens: int = 1, dtype: torch.dtype = torch.float32
    ) -> bool:
        calls.clear()
        query = torch.zeros(rows, HEADS, tokens, SIZE, dtype=dtype)
        states = torch.zeros(rows, KV_HEADS, tokens, SIZE, dtype=dtype)
        found = relay_plan(contexts, [LAYOUT]).attend(
            0, AttentionInputs(query, states, states, 0.25)
        )
        assert found.dtype == dtype
        return bool(calls)

    one = [place(blocks)]
    assert takes_one(one) == (torch.get_default_device().type == "cpu")
    assert not takes_one(one, tokens=2)
    assert not takes_one(one, rows=2)  # with two beams
    assert not takes_one(one * 2, rows=2)
    assert not takes_one([place([*blocks, blocks[0]])])
    assert not takes_one([place(half)], dtype=torch.float16)
    assert not takes_one([place([kv.quantized() for kv in half])], dtype=torch.float16)
    with torch.enable_grad():
        assert not takes_one(one)
    with torch.autocast(torch.get_default_device().type):
        assert not takes_one(one)


def test_one_plan_serves_a_question_and_the_tokens_of_its_answer() -> None:
    context = place(blocks_of([40, 1, 17, 60]))
    plan = relay_plan([context], [LAYOUT, NO_ROTATION])
    for tokens, masked in ((1, False), (6, True), (1, True), (6, False)):
        query = random(1, HEADS, tokens, SIZE, seed=7)
        tail = random(1, KV_HEADS, 6, SIZE, seed=8), random(1, KV_HEADS, 6, SIZE, seed=9)
        mask = torch.ones(1, 1, tokens, 6, dtype=torch.bool).tril(5 - tokens) if masked else None
        for layer, layout in enumerate((LAYOUT, NO_ROTATION)):
            found = plan.attend(layer, AttentionInputs(query, *tail, 0.25, mask))[0]
            ours, seen = (tail[0][0], tail[1][0]), None if mask is None else mask[0]
            expected = by_moving_the_keys(query[0], context, ours, seen, layer, layout)
            assert (found - expected).abs().max() <= RELAY_BUDGET


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 80])
def test_relay_with_cuda_kernels_equals_moving_keys(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype
) -> None:
    """Rounding the rotated query to its dtype changes a score by up to half a step times the norms
    of query and key. The output is rounded twice: by the kernel and at the end."""
    monkeypatch.setattr(relay, "attend", _attend_as_on_cuda)
    layout = RotaryLayout(10_000.0 ** (-torch.arange(0, size, 2) / size), "half")
    scale = size**-0.5
    blocks = blocks_of([1, 17, 200], size=size, dtype=dtype)
    contexts = [place(blocks), place([blocks[2], blocks[0]])]
    for group, tokens in itertools.product((1, 2, 4, 8), (1, 5)):
        query = random(2, group * KV_HEADS, tokens, size, seed=7, dtype=dtype)
        keys = random(2, KV_HEADS, tokens, size, seed=8, dtype=dtype)
        values = random(2, KV_HEADS, tokens, size, seed=9, dtype=dtype)
        mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool).tril() if tokens > 1 else None
        found = relay_plan(contexts, [layout]).attend(
            0, AttentionInputs(query, keys, values, scale, mask)
        )
        assert found.dtype == dtype
        for row, context in enumerate(contexts):
            tail, seen = (keys[row], values[row]), None if mask is None else mask[row]
            expected = by_moving_the_keys(query[row], context, tail, seen, 0, layout, scale)
            key = torch.cat([*(block.kv.keys[0] for block in context.blocks), tail[0]], 1)
            value = torch.cat([*(block.kv.values[0] for block in context.blocks), tail[1]], 1)
            of_kernel, _ = bounds(query[row], key, value, scale)
            norms = query.float().norm(dim=-1).max() * key.float().norm(dim=-1).max()
            of_rotation = (2 * scale * norms + 1) * torch.finfo(dtype).eps / 2
            error = (found[row].double() - expected).abs().max()
            assert error <= of_kernel + of_rotation * value.float().abs().max()


def _attend_as_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, _: None
) -> Partial:
    is_flash = mask is None and query.dtype != torch.float32
    kernel = attend_flash if is_flash else attend_memory_efficient
    return kernel(query, key, value, scale, mask)
