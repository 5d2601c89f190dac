"""Relay attention over blocks compared with float64 attention to moved keys."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest.mock import Mock

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
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout, shift_positions
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
    states = [b.kv.states(layer) for b in context.blocks]
    shifts = [b.shift for b in context.blocks]
    moved = [
        shift_positions(keys.double(), n, layout)
        for (keys, _), n in zip(states, shifts, strict=True)
    ]
    key = torch.cat([*moved, tail[0].double()], dim=1)
    value = torch.cat([*(values for _, values in states), tail[1]], dim=1)
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


def inputs_of(
    requests: int, tokens: int, tail_tokens: int, mask: Tensor | None = None, spread: float = 1.0
) -> AttentionInputs:
    """Random queries, tail keys and tail values. ``mask``: ``[tokens, tail tokens]``."""
    query = spread * random(requests, HEADS, tokens, SIZE, seed=7)
    key, value = (random(requests, KV_HEADS, tail_tokens, SIZE, seed=seed) for seed in (8, 9))
    seen = None if mask is None else mask[None, None].expand(requests, -1, -1, -1)
    return AttentionInputs(query, key, value, 0.25, seen)


def error_of(
    plan: RelayPlan,
    contexts: list[Context],
    inputs: AttentionInputs,
    layout: RotaryLayout = LAYOUT,
    layer: int = 0,
) -> float:
    """Maximum error over all rows. ``contexts``: The context of each row."""
    query, key, value, scale, mask, *_ = inputs
    found = plan.attend(layer, inputs)
    errors = []
    for row, context in enumerate(contexts):
        seen = None if mask is None else mask[row]
        states = query[row], context, (key[row], value[row])
        expected = by_moving_the_keys(*states, seen, layer, layout, scale)
        errors.append(float((found[row] - expected).abs().max()))
    return max(errors)


@pytest.mark.parametrize("orders", [*ORDERS.values(), [[]]], ids=[*ORDERS, "no context"])
@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
@pytest.mark.parametrize("joined", [0, 50], ids=["one by one", "joined"])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["float", "int8 and float"])
def test_relay_attention_equals_attention_to_moved_keys(
    is_mixed: bool, joined: int, layout: RotaryLayout, orders: list[list[int]]
) -> None:
    blocks = blocks_of([40, 1, 17, 60])
    if is_mixed:
        blocks = [kv if i % 2 else kv.quantized() for i, kv in enumerate(blocks)]
    contexts = [place([blocks[i] for i in order]) for order in orders]
    plan = relay_plan(contexts, [layout, NO_ROTATION], joined)
    # One plan serves a question and the tokens of its answer.
    for tokens, is_masked in ((1, False), (6, True), (1, True), (6, False)):
        mask = torch.ones(tokens, 6, dtype=torch.bool).tril(6 - tokens) if is_masked else None
        inputs = inputs_of(len(orders), tokens, 6, mask)
        for layer, own in enumerate((layout, NO_ROTATION)):
            assert error_of(plan, contexts, inputs, own, layer) <= RELAY_BUDGET


def test_beams_of_one_request_see_the_same_context() -> None:
    context = place(blocks_of([12, 5]))
    plan = relay_plan([context], [LAYOUT])
    assert error_of(plan, [context] * 3, inputs_of(3, 1, 2)) <= RELAY_BUDGET


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
@pytest.mark.parametrize("spread", [1.0, 1e3])
def test_large_scores_and_fully_masked_rows_are_exact(spread: float, layout: RotaryLayout) -> None:
    contexts = [place(blocks_of([40, 1, 17, 60]))]
    for diagonal in (0, -1):
        mask = torch.ones(6, 6, dtype=torch.bool).tril(diagonal)
        inputs = inputs_of(1, 6, 6, mask, spread)
        error = error_of(relay_plan(contexts, [layout]), contexts, inputs, layout)
        assert error <= RELAY_BUDGET * spread


def test_one_float32_request_uses_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of([4, 3])
    half = [replace(kv, keys=(kv.keys[0].half(),), values=(kv.values[0].half(),)) for kv in blocks]
    softmax = Mock(wraps=single_softmax)
    monkeypatch.setattr(relay, "single_softmax", softmax)

    def takes_one(
        contexts: list[Context], rows: int = 1, tokens: int = 1, dtype: torch.dtype = torch.float32
    ) -> bool:
        softmax.reset_mock()
        query = torch.zeros(rows, HEADS, tokens, SIZE, dtype=dtype)
        states = torch.zeros(rows, KV_HEADS, tokens, SIZE, dtype=dtype)
        found = relay_plan(contexts, [LAYOUT]).attend(
            0, AttentionInputs(query, states, states, 0.25)
        )
        assert found.dtype == dtype
        return softmax.called

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
