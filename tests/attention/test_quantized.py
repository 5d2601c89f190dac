"""Attention over int8 blocks: memory, segments, and rounding of copied keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.segments import Segment, segments_of
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, assemble, place
from blockattn_rag.kv.rope import NO_ROTATION, RotaryLayout, rotate
from tests.attention.test_relay import LAYOUT, OTHER_LAYOUTS, blocks_of, inputs_of, relay_plan

pytestmark = pytest.mark.usefixtures("device", "no_gradients")


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
    relay_plan([context], [LAYOUT], 0).attend(0, inputs_of(1, 6, 6))
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
