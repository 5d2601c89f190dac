"""A context: blocks in the order of a prompt, each with its position, and the copy path over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate

Positions = Literal["reordered", "composite"]
"""``reordered``: a block's keys are re-encoded for where the block stands (both papers' method).
``composite``: they keep positions 0..n-1 (both papers' ablation)."""


Assembly = Literal["auto", "relay", "copy"]
"""``relay``: blocks are attended to where they lie. ``copy``: their keys are re-encoded and joined
into new tensors. ``auto``: relay where it is exact, else copy."""


class PlacedBlock(NamedTuple):
    """A block and where it stands: its first token's index in the prompt, and its keys' shift."""

    kv: BlockKV
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class Context:
    """Blocks in the order of the prompt, each with its place. Nothing is copied."""

    blocks: tuple[PlacedBlock, ...]

    @property
    def num_tokens(self) -> int:
        return sum(block.kv.num_tokens for block in self.blocks)

    @property
    def token_ids(self) -> list[int]:
        return [token for block in self.blocks for token in block.kv.token_ids.tolist()]


def place(blocks: Sequence[BlockKV], positions: Positions = "reordered") -> Context:
    """Give each block its position in this prompt (Block-Attention, section 2.3)."""
    if positions not in get_args(Positions):
        raise ValueError(f"positions must be one of {get_args(Positions)}, found {positions!r}")
    placed, start = [], 0
    for kv in blocks:
        placed.append(PlacedBlock(kv, start, start if positions == "reordered" else 0))
        start += kv.num_tokens
    return Context(tuple(placed))


def assemble(context: Context, layouts: Sequence[RotaryLayout]) -> Iterator[tuple[Tensor, Tensor]]:
    """The copy path: per layer, one key and one value tensor for the whole context.

    Args:
        context: at least one placed block.
        layouts: one per layer.

    Yields:
        Keys re-encoded by each block's shift, and values, both ``[num_kv_heads, tokens, head_dim]``
        in the blocks' dtype. Quantised blocks are dequantised, their keys rotated and then rounded,
        once. The stored tensors are not written; a context of one unshifted block that is not
        quantised yields the stored tensors themselves.
    """
    angles: Angles = {}
    for index, layout in enumerate(layouts):
        yield joined_states(context.blocks, index, layout, angles)


def joined_states(
    blocks: Sequence[PlacedBlock], layer: int, layout: RotaryLayout, angles: Angles
) -> tuple[Tensor, Tensor]:
    """One layer of :func:`assemble`; ``angles`` has those of earlier layers and takes new ones."""
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
