"""Contexts (blocks with positions in a prompt), and the copy path, which concatenates blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate, rotate_into

Positions = Literal["reordered", "composite"]
"""``reordered``: keys are rotated to the block's position in the prompt. ``composite``: keys keep
positions 0..n-1, as in the ablation studies of the Block-Attention and TurboRAG papers."""


Assembly = Literal["auto", "relay", "copy"]
"""``relay``: attention reads the stored blocks in place. ``copy``: keys are rotated, and blocks are
concatenated in new tensors. ``auto``: the fastest path that is exact for the model."""


class PlacedBlock(NamedTuple):
    """A block, the index of its first token in the prompt, and the number of positions that its
    keys are shifted by."""

    kv: BlockKV
    start: int
    shift: int


@dataclass(frozen=True, slots=True)
class Context:
    """Blocks in prompt order with their positions. References the blocks without copying them."""

    blocks: tuple[PlacedBlock, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each block."""
        return tuple(block.kv.num_tokens for block in self.blocks)

    @property
    def token_ids(self) -> list[int]:
        return [token for block in self.blocks for token in block.kv.token_ids.tolist()]


def place(blocks: Sequence[BlockKV], positions: Positions = "reordered") -> Context:
    """Assign each block its position in a prompt (Block-Attention, section 2.3)."""
    if positions not in get_args(Positions):
        raise ValueError(f"Expected one of {get_args(Positions)} as positions, found {positions!r}")
    placed, start = [], 0
    for kv in blocks:
        placed.append(PlacedBlock(kv, start, start if positions == "reordered" else 0))
        start += kv.num_tokens
    return Context(tuple(placed))


def assemble(
    context: Context, layouts: Sequence[RotaryLayout], room: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Concatenate a context's blocks into one key and one value tensor per layer (the copy path).

    Args:
        context: Context with at least one block.
        layouts: Rotary layout of each layer.
        room: Number of uninitialized tokens at the end of each tensor, as space for later states.

    Yields:
        Keys, rotated by each block's shift, and values, ``[num_kv_heads, tokens + room,
        head_dim]`` in the model's dtype. Stored tensors are never modified. Without room, a
        context of one block that is neither shifted nor quantized yields the stored tensors
        themselves.
    """
    angles: Angles = {}
    for index, layout in enumerate(layouts):
        yield joined_states(context.blocks, index, layout, angles, room)


def joined_states(
    blocks: Sequence[PlacedBlock], layer: int, layout: RotaryLayout, angles: Angles, room: int = 0
) -> tuple[Tensor, Tensor]:
    """Assemble one layer; see :func:`assemble`. ``angles`` caches cos and sin across layers."""
    rotates = layout.rotates and any(block.shift for block in blocks)
    states = [block.kv.states(layer, exact_keys=rotates) for block in blocks]
    keys, values = zip(*states, strict=True)
    if not rotates:
        return _joined(keys, room), _joined(values, room)
    joined = _joined(keys, 0)
    if layout not in angles:
        angles[layout] = _angles(blocks, layout, joined.device)
    # Keys of quantized blocks are in float32 here, and are only rounded after the rotation.
    scales = next((b.kv.scales for b in blocks if b.kv.scales is not None), None)
    dtype = joined.dtype if scales is None else scales.dtype
    if not room and not joined.is_cuda:  # Avoid another tensor and another pass.
        return rotate(joined, *angles[layout], layout).to(dtype), _joined(values, room)
    heads, tokens, size = joined.shape
    rotated = joined.new_empty(heads, tokens + room, size, dtype=dtype)
    rotate_into(rotated[:, :tokens], joined, *angles[layout], layout)
    return rotated, _joined(values, room)


def _joined(states: tuple[Tensor, ...], room: int) -> Tensor:
    """Concatenate ``[heads, tokens, size]`` tensors along their tokens, with room at the end."""
    if not room:
        return states[0] if len(states) == 1 else torch.cat(states, dim=-2)
    heads, _, size = states[0].shape
    tokens = sum(one.shape[1] for one in states)
    joined = states[0].new_empty(heads, tokens + room, size)
    torch.cat(states, dim=-2, out=joined[:, :tokens])
    return joined


def _angles(
    blocks: Sequence[PlacedBlock], layout: RotaryLayout, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin once per block. Repeats them for its tokens: ``[tokens, rotary_dim]``."""
    cos, sin = layout.cos_sin(torch.tensor([block.shift for block in blocks]), device)
    counts = torch.tensor([block.kv.num_tokens for block in blocks])
    block_of = torch.arange(len(blocks)).repeat_interleave(counts).to(device)
    return cos[block_of], sin[block_of]
