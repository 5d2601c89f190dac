"""Contexts of blocks: positions, keys, and no changes to stored tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockattn_rag.kv.context import assemble, place
from blockattn_rag.kv.rope import shift_positions
from tests.kv.test_block_kv import LAYOUTS, block, bytes_of


def test_blocks_are_placed_one_after_the_other() -> None:
    one, two = block(3, 1), block(1, 2)
    context = place([one, two, one])
    assert [(b.start, b.shift) for b in context.blocks] == [(0, 0), (3, 3), (4, 4)]
    assert context.num_tokens == 7
    assert context.token_ids == [100, 101, 102, 200, 100, 101, 102]
    assert all(placed.kv is kv for placed, kv in zip(context.blocks, (one, two, one), strict=True))


def test_composite_positions_shift_nothing() -> None:
    context = place([block(3, 1), block(2, 2)], "composite")
    assert [(b.start, b.shift) for b in context.blocks] == [(0, 0), (3, 0)]


def test_a_context_may_be_empty_and_unknown_positions_are_refused() -> None:
    assert place([]).num_tokens == 0
    assert place([]).token_ids == []
    with pytest.raises(ValueError, match=r"Expected one of .* as positions, found 'absolute'"):
        place([], "absolute")  # type: ignore[arg-type]


def test_assembled_keys_are_moved_and_values_are_unchanged() -> None:
    # Keys and values may have different dtypes.
    blocks = [
        replace(kv, values=tuple(values.half() for values in kv.values))
        for kv in (block(3, 1), block(1, 2), block(5, 3))
    ]
    context = place(blocks)
    for index, (keys, values) in enumerate(assemble(context, LAYOUTS)):
        moved = [shift_positions(b.kv.keys[index], b.shift, LAYOUTS[index]) for b in context.blocks]
        assert torch.equal(keys, torch.cat(moved, dim=1))
        assert torch.equal(values, torch.cat([kv.values[index] for kv in blocks], dim=1))


def test_composite_keys_are_concatenated_unchanged() -> None:
    blocks = [block(3, 1), block(4, 2)]
    for index, (keys, _) in enumerate(assemble(place(blocks, "composite"), LAYOUTS)):
        assert torch.equal(keys, torch.cat([kv.keys[index] for kv in blocks], dim=1))


def test_a_single_block_is_not_copied() -> None:
    one = block(3, 1)
    for index, (keys, values) in enumerate(assemble(place([one]), LAYOUTS)):
        assert keys is one.keys[index]
        assert values is one.values[index]


@pytest.mark.parametrize("count", [1, 3])
def test_every_layer_has_room_for_new_tokens(count: int) -> None:
    context = place([block(3, 1), block(1, 2), block(5, 3)][:count])
    plain, roomy = assemble(context, LAYOUTS), assemble(context, LAYOUTS, room=4)
    for expected, found in zip(plain, roomy, strict=True):
        for without, having in zip(expected, found, strict=True):
            assert having.shape[1] == context.num_tokens + 4
            assert torch.equal(having[:, : context.num_tokens], without)
            assert having.data_ptr() != without.data_ptr()


def test_assembling_does_not_modify_stored_tensors() -> None:
    blocks = [block(3, 1), block(4, 2)]
    before = [bytes_of(kv) for kv in blocks]
    for _ in assemble(place([*blocks, *blocks]), LAYOUTS):
        pass
    assert [bytes_of(kv) for kv in blocks] == before
