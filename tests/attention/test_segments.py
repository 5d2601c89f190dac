"""Joining of blocks into segments."""

from __future__ import annotations

from blockattn_rag.attention.segments import segments_of
from blockattn_rag.kv.context import Context, place
from tests.attention.test_relay import blocks_of


def small_segments(contexts: list[Context], tokens: int) -> list[list[int]]:
    """Return the token counts of the blocks in each segment."""
    return [
        [block.kv.num_tokens for block in segment.blocks]
        for segment in segments_of(contexts, tokens)
    ]


def test_blocks_under_the_limit_are_joined_until_they_reach_it() -> None:
    context = place(blocks_of([3, 20, 4, 5, 2, 6, 1]))
    assert small_segments([context], 10) == [[20], [3, 4, 5], [2, 6, 1]]
    assert small_segments([context], 1) == [[n] for n in (3, 20, 4, 5, 2, 6, 1)]


def test_only_blocks_with_the_same_position_for_all_readers_are_joined() -> None:
    a, b, c = blocks_of([3, 4, 5])
    shared, same_start = place([a, b, c]), place([a, b])
    assert small_segments([shared, same_start], 100) == [[3, 4], [5]]
    other_order = place([b, a])
    assert small_segments([shared, other_order], 100) == [[3], [4], [5]]
