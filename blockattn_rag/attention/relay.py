"""Relay attention: blocks are attended to where they lie, and read once for all requests.

A score depends only on the distance of query and key. So instead of rotating a block's keys by the
block's offset, the few queries are rotated the other way, once per block, and attend to the stored
keys unchanged. The partial results are merged by their log-sum-exp. No key is copied, rotated or
rounded again, except those of small blocks, which are joined (``JoinLimits``).

The *tail* is the final block and the generated tokens.

Shapes: ``R`` requests, ``B`` rows of the batch (a multiple of ``R``: beams of one request follow
one another), ``H`` query heads, ``K`` key-value heads, ``Q`` query rows (tokens times the heads
that share keys), ``T`` tail tokens, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import Partial, attend, fold_heads, merge, single_softmax
from blockattn_rag.attention.segments import SegmentTable
from blockattn_rag.kv.context import Context
from blockattn_rag.kv.rope import RotaryLayout


class JoinLimits(NamedTuple):
    """Blocks of fewer tokens are joined into segments of about as many, for speed.

    Joined blocks are copies that live until the answer ends. 0 joins nothing.

    Args:
        prefill_tokens: limit for the queries of a prompt, which are read in one pass.
        decode_tokens: limit for the single tokens of an answer, each of which is a pass.
    """

    prefill_tokens: int
    decode_tokens: int


# One more block costs 30 to 40 microseconds a layer in calls, whatever its size
# (`bench decode --block-tokens 128,512`).
CPU_JOINS = JoinLimits(prefill_tokens=32, decode_tokens=512)
# Reasoned from the cost of launching kernels.
ACCELERATOR_JOINS = JoinLimits(prefill_tokens=8192, decode_tokens=8192)


class RelayPlan:
    """Which request attends to which block, for one batch. Made once, used by every layer.

    Every distinct block is read once per layer, for all requests that have it, each of which sees
    the block at an offset of its own.

    Args:
        contexts: the placed blocks of each request.
        layouts: rotary layout per layer.
        device: where queries are.
        joins: which blocks are joined. Default: what is fastest on the device.
    """

    def __init__(
        self,
        contexts: Sequence[Context],
        layouts: Sequence[RotaryLayout],
        device: torch.device,
        *,
        joins: JoinLimits | None = None,
    ) -> None:
        self.num_layers = len(layouts)
        self.num_tokens = max(context.num_tokens for context in contexts)
        self._joins = joins or (CPU_JOINS if device.type == "cpu" else ACCELERATOR_JOINS)
        self._blocks = contexts, layouts, device

    @cached_property
    def prefill_table(self) -> SegmentTable:
        """What the queries of a prompt read."""
        return SegmentTable(*self._blocks, self._joins.prefill_tokens)

    @cached_property
    def decode_table(self) -> SegmentTable:
        """What the query of an answer's single token reads."""
        if self._joins.decode_tokens == self._joins.prefill_tokens:
            return self.prefill_table  # joined once
        return SegmentTable(*self._blocks, self._joins.decode_tokens)

    def attend(
        self,
        layer: int,
        query: Tensor,
        tail_key: Tensor,
        tail_value: Tensor,
        scale: float,
        tail_mask: Tensor | None,
    ) -> Tensor:
        """Attention of the final block's queries to all blocks and to the tail.

        Args:
            layer: index of the layer.
            query: ``[B, H, tokens, D]``, rotated for the queries' own positions.
            tail_key, tail_value: ``[B, K, T, D]``.
            scale: factor of the scores, natural exponent.
            tail_mask: bool ``[B, 1, tokens, T]``, True where seen; None: all.

        Returns:
            ``[B, H, tokens, D]`` in the query's dtype.
        """
        batch, heads, tokens, _ = query.shape
        folded, mask = fold_heads(query, tail_mask, tail_key.shape[1])
        table = self.decode_table if tokens == 1 else self.prefill_table
        if tokens == 1 and mask is None and _takes_one_softmax(table, folded, tail_value):
            queries = [*table.rotated(layer, folded), folded[0]]
            states = [*table.states(layer), (tail_key[0], tail_value[0])]
            output = single_softmax(queries, states, scale)
        else:
            parts = _segment_parts(table, layer, folded, scale)
            tail = attend(folded, tail_key, tail_value, scale, mask)
            output = merge([*parts, tail]).output if parts else tail.output
        return output.reshape(batch, heads, tokens, -1).to(query.dtype)


def _takes_one_softmax(table: SegmentTable, query: Tensor, value: Tensor) -> bool:
    """Whether one softmax over all scores can take the place of the kernels.

    Only for one request on the CPU in float32: other dtypes would round the scores, other devices
    have faster kernels, gradients need what the products overwrite, and quantised blocks need not
    all be in memory at once.
    """
    if len(query) > 1 or not table.is_one_each or table.is_dequantised or not query.is_cpu:
        return False
    if not query.dtype == value.dtype == torch.float32:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def _segment_parts(table: SegmentTable, layer: int, query: Tensor, scale: float) -> list[Partial]:
    """Partial results ``[B, K, Q, ...]`` that cover all segments."""
    beams = len(query) // table.num_requests
    rotated = table.rotated(layer, _groups_to_rows(query, beams))
    parts, start = [], 0
    for segment, (key, value) in zip(table.segments, table.states(layer), strict=True):
        pairs = len(segment.readers)
        # All pairs in one call, so that a segment's keys are read once.
        rows = _groups_to_rows(rotated[start : start + pairs], pairs)
        parts.append(_rows_to_groups(attend(rows, key[None], value[None], scale), pairs))
        start += pairs
    return [_rows_to_groups(part, beams) for part in table.by_request(parts)]


def _groups_to_rows(query: Tensor, group: int) -> Tensor:
    """``[n * group, K, Q, D]`` to ``[n, K, group * Q, D]``: what sees the same keys, in one."""
    if group == 1:
        return query
    return torch.unflatten(query, 0, (-1, group)).transpose(1, 2).flatten(2, 3)


def _rows_to_groups(part: Partial, group: int) -> Partial:
    """``[n, K, group * Q, ...]`` back to ``[n * group, K, Q, ...]``."""
    if group == 1:
        return part
    apart = (torch.unflatten(states, 2, (group, -1)) for states in part)
    return Partial(*(states.transpose(1, 2).flatten(0, 1) for states in apart))
