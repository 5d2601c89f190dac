"""Relay attention over int8 blocks, and over batches that mix precisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.kernels import AttentionInputs
from blockattn_rag.attention.segments import Segment, segments_of
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, assemble, place
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout, rotate
from tests.attention.test_kernels import KV_HEADS, SIZE, random
from tests.attention.test_relay import (
    HEADS,
    LAYOUT,
    ORDERS,
    OTHER_LAYOUTS,
    RELAY_BUDGET,
    blocks_of,
    by_moving_the_keys,
    relay_plan,
)

pytestmark = pytest.mark.usefixtures("device", "no_gradients")

LENGTHS = [40, 1, 17, 60]


def plain(kv: BlockKV) -> BlockKV:
    """Return the dequantized block."""
    keys, values = zip(*(kv.states(layer) for layer in range(kv.num_layers)), strict=True)
    return replace(kv, keys=keys, values=values, scales=None)


def mixed(lengths: list[int]) -> list[BlockKV]:
    """Return blocks of which every other one, starting with the first, is quantized."""
    return [kv if i % 2 else kv.quantized() for i, kv in enumerate(blocks_of(lengths))]


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("joined", [0, 50], ids=["one by one", "joined"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_int8_and_float_share_a_batch(tokens: int, joined: int, orders: list[list[int]]) -> None:
    blocks = mixed(LENGTHS)
    contexts = [place([blocks[i] for i in order]) for order in orders]
    query = random(len(orders), HEADS, tokens, SIZE, seed=7)
    tail_key = random(len(orders), KV_HEADS, tokens, SIZE, seed=8)
    tail_value = random(len(orders), KV_HEADS, tokens, SIZE, seed=9)
    plan = relay_plan(contexts, [LAYOUT, LAYOUT], joined)
    found = plan.attend(1, AttentionInputs(query, tail_key, tail_value, 0.25))
    for row, order in enumerate(orders):
        same = place([plain(blocks[i]) for i in order])
        tail = tail_key[row], tail_value[row]
        expected = by_moving_the_keys(query[row], same, tail, None, 1, LAYOUT)
        assert (found[row] - expected).abs().max() <= RELAY_BUDGET


@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
def test_a_generated_token_attends_to_each_int8_block(layout: RotaryLayout) -> None:
    blocks = mixed(LENGTHS)
    query = random(1, HEADS, 1, SIZE, seed=7)
    tail = random(1, KV_HEADS, 5, SIZE, seed=8), random(1, KV_HEADS, 5, SIZE, seed=9)
    same = place([plain(kv) for kv in blocks])
    expected = by_moving_the_keys(query[0], same, (tail[0][0], tail[1][0]), None, 0, layout)
    for joins in (0, 99):  # without and with joining, which dequantizes blocks
        found = relay_plan([place(blocks)], [layout], joins).attend(
            0, AttentionInputs(query, *tail, 0.25)
        )
        assert (found[0] - expected).abs().max() <= RELAY_BUDGET


def test_blocks_are_not_dequantized_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    states, count = Segment.states, 0

    def _forget() -> None:
        nonlocal count
        count -= 1

    def watched(*of: Any, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal count
        keys, values = states(*of, **options)
        count += 1
        alive.append(count)
        finalize(keys, _forget)
        return keys, values

    monkeypatch.setattr(Segment, "states", watched)
    context = place([kv.quantized() for kv in blocks_of([40] * 8)])
    tail = random(1, KV_HEADS, 6, SIZE, seed=8)
    plan = relay_plan([context], [LAYOUT], 0)
    plan.attend(0, AttentionInputs(random(1, HEADS, 6, SIZE), tail, tail, 0.25))
    assert len(alive) == 8
    assert max(alive) <= 2


def test_one_text_in_two_precisions_is_two_segments() -> None:
    (kv,) = blocks_of([40])
    contexts = [place([kv]), place([kv.quantized()]), place([kv])]
    found = segments_of(contexts, 10)
    assert [[reader.request for reader in segment.readers] for segment in found] == [[0, 2], [1]]


@pytest.mark.parametrize("layout", [LAYOUT, *OTHER_LAYOUTS.values()], ids=["half", *OTHER_LAYOUTS])
def test_copied_keys_are_rotated_before_they_are_rounded(layout: RotaryLayout) -> None:
    narrow = [_of_one_layer(kv, torch.bfloat16) for kv in blocks_of([9, 1, 30])]
    blocks = [narrow[0].quantized(), narrow[1], narrow[2].quantized()]
    ((keys, values),) = assemble(place(blocks), [layout])
    assert keys.dtype == values.dtype == torch.bfloat16
    exact_keys = [kv.states(0, exact_keys=True)[0].float() for kv in blocks]
    offsets = torch.cat([torch.full((n,), o) for n, o in zip((9, 1, 30), (0, 9, 10), strict=True)])
    turned = torch.cat(exact_keys, dim=1)
    if layout is not NO_ROTATION:
        turned = rotate(turned, *layout.cos_sin(offsets, turned.device), layout)
    assert torch.equal(keys, turned.bfloat16())
    assert torch.equal(values, torch.cat([kv.states(0)[1] for kv in blocks], dim=1))
    # Quantized blocks do not change the keys of an unquantized block.
    lone = Context(place(narrow).blocks[1:2])
    ((expected, _),) = assemble(lone, [layout])
    assert torch.equal(keys[:, 9:10], expected)


def _of_one_layer(kv: BlockKV, dtype: torch.dtype) -> BlockKV:
    keys, values = (tuple(t[:1] for t in states) for states in (kv.keys, kv.values))
    return replace(
        kv, keys=tuple(t.to(dtype) for t in keys), values=tuple(t.to(dtype) for t in values)
    )
