"""Contexts: blocks with their positions in a prompt, and the copy path, which joins them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate

Positions = Literal["reordered", "composite"]
"""``reordered``: keys are re-encoded for the block's position in the prompt (the method of both
papers). ``composite``: keys keep positions 0..n-1 (the ablation in both papers)."""


Assembly = Literal["auto", "relay", "copy"]
"""``relay``: attention reads the stored blocks in place. ``copy``: keys are re-encoded and joined
into new tensors. ``auto``: relay where it is exact, else copy."""


class PlacedBlock(NamedTuple):
    """A block, the index of its first token in the prompt, and its keys' shift in positions."""

    kv: BlockKV
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class Context:
    """Blocks in prompt order, with their positions. References the blocks without copying them."""

    blocks: tuple[PlacedBlock, ...]

    @property
    def num_tokens(self) -> int:
        return sum(block.kv.num_tokens for block in self.blocks)

    @property
    def token_ids(self) -> list[int]:
        return [token for block in self.blocks for token in block.kv.token_ids.tolist()]


def place(blocks: Sequence[BlockKV], positions: Positions = "reordered") -> Context:
    """Assign each block its position in a prompt (Block-Attention, section 2.3)."""
    if positions not in get_args(Positions):
        raise ValueError(f"positions must be one of {get_args(Positions)}, found {positions!r}")
    placed, start = [], 0
    for kv in blocks:
        placed.append(PlacedBlock(kv, start, start if positions == "reordered" else 0))
        start += kv.num_tokens
    return Context(tuple(placed))


def assemble(context: Context, layouts: Sequence[RotaryLayout]) -> Iterator[tuple[Tensor, Tensor]]:
    """Join a context's blocks into one key and one value tensor per layer (the copy path).

    Args:
        context: Context with at least one block.
        layouts: Rotary layout per layer.

    Yields:
        Keys re-encoded by each block's shift, and values, both ``[num_kv_heads, tokens, head_dim]``
        in the blocks' dtype. Keys of quantised blocks are dequantised, rotated, and then rounded
        once. The stored tensors are never modified. A context of one block that is neither shifted
        nor quantised yields the stored tensors themselves.
    """
    angles: Angles = {}
    for index, layout in enumerate(layouts):
        yield joined_states(context.blocks, index, layout, angles)


def joined_states(
    blocks: Sequence[PlacedBlock], layer: int, layout: RotaryLayout, angles: Angles
) -> tuple[Tensor, Tensor]:
    """One layer of :func:`assemble`. ``angles`` caches cos and sin across layers."""
    rotates = layout.rotates and any(block.shift for block in blocks)
    states = [block.kv.states(layer, exact_keys=rotates) for block in blocks]
    keys, values = states[0]
    if len(states) > 1:
        keys, values = (torch.cat(tensors, dim=-2) for tensors in zip(*states, strict=True))
    if not rotates:
        return keys, values
    if layout not in angles:
        shifts = [torch.full((b.kv.num_tokens,), b.shift) for b in blocks]
        angles[layout] = layout.cos_sin(torch.cat(shifts), keys.device)
    rotated = rotate(keys, *angles[layout], layout)
    scales = next((b.kv.scales for b in blocks if b.kv.scales is not None), None)
    return rotated if scales is None else rotated.to(scales.dtype), values
