"""Relay attention: reads stored blocks in place, once for all requests in a batch.

Positions affect attention scores only through the distance between query and key. Relay attention
therefore leaves a block's keys unchanged, and rotates the few queries in the opposite direction,
once per block. The partial results are merged by their log-sum-exp. Keys are not copied, rotated or
rounded again, except in quantized blocks, latent layers, and joined small blocks (``JoinLimits``).

The *tail* is the final block and the generated tokens.

Shapes: ``R`` requests, ``B`` batch rows (a multiple of ``R``; the beams of a request are adjacent),
``H`` query heads, ``K`` key-value heads, ``Q`` query rows (tokens times the heads that share keys),
``T`` tail tokens, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import (
    AttentionInputs,
    attend,
    fold_heads,
    fold_sinks,
    single_softmax,
)
from blockattn_rag.attention.latent import LatentMap
from blockattn_rag.attention.merge import Partial, merge, with_sinks
from blockattn_rag.attention.segments import SegmentTable, View
from blockattn_rag.kv.context import Context
from blockattn_rag.kv.rope import RotaryLayout

RELAY_FINAL_TOKENS = 1024
"""Maximum tokens in a final block for which ``assembly="auto"`` uses relay attention. Beyond this,
rotating the queries for each stored block costs more than rotating all keys once."""


class JoinLimits(NamedTuple):
    """Block sizes in tokens below which blocks are joined into segments, for speed.
    ``decode_tokens`` applies to forward passes of one token, ``prefill_tokens`` to all others.

    Joined segments are one to two times as long as the limit; the last one may be shorter. They are
    temporary copies that are freed when the answer is complete. 0 disables joining.
    """

    prefill_tokens: int
    decode_tokens: int


# Each segment has a call overhead of 30 to 40 microseconds per layer, regardless of its size
# (`bench decode --block-tokens 128,512`).
CPU_JOINS = JoinLimits(prefill_tokens=32, decode_tokens=512)
# On a GPU, launching a kernel takes longer than its computation (`benchmarks/results/gpu`).
ACCELERATOR_JOINS = JoinLimits(prefill_tokens=131_072, decode_tokens=131_072)


class LayerReads(NamedTuple):
    """What a layer of the model reads from blocks: the tensors of the blocks' layer ``place``.

    ``window``: Sliding window in tokens. None: no window. ``latent``: Maps from latents to keys and
    values. None: the blocks contain keys and values.
    """

    place: int
    window: int | None = None
    latent: LatentMap | None = None


class RelayPlan:
    """Plan of which request in a batch attends to which block. All layers share it.

    Each layer reads a block once for all requests that contain it, even if its offset differs
    between requests.

    Args:
        contexts: Blocks of each request, with their positions.
        layouts: Rotary layout of each layer in the blocks.
        joins: Sizes below which blocks are joined. Default: the fastest values for the device.
        layers: What each layer of the model reads. Default: layer i reads layer i of the blocks,
            without windows.
    """

    takes_mask = True

    def __init__(
        self,
        contexts: Sequence[Context],
        layouts: Sequence[RotaryLayout],
        device: torch.device,
        *,
        joins: JoinLimits | None = None,
        layers: Mapping[int, LayerReads] | None = None,
    ) -> None:
        plain = {index: LayerReads(index) for index in range(len(layouts))}
        self._layers = plain if layers is None else layers
        self.num_tokens = max(context.num_tokens for context in contexts)
        self._joins = joins or (CPU_JOINS if device.type == "cpu" else ACCELERATOR_JOINS)
        self._blocks = contexts, layouts, device
        self._tables: dict[tuple[int, int | None], SegmentTable] = {}

    def table(self, tokens: int, window: int | None = None) -> SegmentTable:
        """Get the segments for layers with this window, in forward passes of ``tokens`` tokens."""
        limit = self._joins.decode_tokens if tokens == 1 else self._joins.prefill_tokens
        key = limit, window
        if key not in self._tables:
            self._tables[key] = SegmentTable(*self._blocks, *key)
        return self._tables[key]

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Compute attention of the newest tokens of the tail to all blocks and to the tail.

        ``inputs`` contain the tail's keys, values and mask. In layers with windows, the tail must
        have no padding. Returns ``[B, H, tokens, D]`` in the query's dtype.
        """
        query, tail_key, tail_value, scale, tail_mask, cap, sinks = inputs
        batch, heads, tokens, _ = query.shape
        place, window, latent = self._layers[layer]
        folded, mask = fold_heads(query, tail_mask, tail_key.shape[1])
        asked = folded if latent is None else latent.queries(query)
        # Latents and rotary keys are joined only once if prefill uses the table for decoding, too.
        table = self.table(tokens if latent is None else 1, window)
        groups = asked.shape[2] // tokens * (batch // table.num_requests)
        views = table.views(tail_key.shape[2] - tokens, tokens, groups)
        rows = None if sinks is None else fold_sinks(sinks, tokens, tail_key.shape[1])
        states = table.states(place, views, are_latents=latent is not None)
        is_plain = tokens == 1 and mask is None and latent is None
        if is_plain and _takes_one_softmax(table, folded, tail_value):
            pairs = zip(table.rotated(place, folded), states, strict=True)
            read = [(turned, seen) for turned, seen in pairs if seen is not None]
            read.append((folded[0], (tail_key[0], tail_value[0])))
            queries, visible = zip(*read, strict=True)
            output = single_softmax(queries, visible, scale, cap, rows)
        else:
            parts = _segment_parts(table, place, asked, states, views, scale, cap)
            if latent is not None and parts:
                parts = [latent.outputs(merge(parts))]
            tail = attend(folded, tail_key, tail_value, scale, mask, cap)
            output = with_sinks(merge([*parts, tail]) if parts else tail, rows)
        return output.reshape(batch, heads, tokens, -1).to(query.dtype)


def _takes_one_softmax(table: SegmentTable, query: Tensor, value: Tensor) -> bool:
    """Whether to use ``single_softmax`` instead of the kernels.

    True only for one row on the CPU in float32, without gradients, autocast, and repeated or
    quantized blocks. Other dtypes round the scores, other devices have faster kernels, gradients
    need tensors that are overwritten, and quantized blocks would all be dequantized at once.
    """
    is_single = len(query) == 1 and table.is_one_each and not table.is_dequantized
    is_exact = query.is_cpu and query.dtype == value.dtype == torch.float32
    is_changed = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return is_single and is_exact and not is_changed


def _segment_parts(
    table: SegmentTable,
    place: int,
    query: Tensor,
    states: Iterable[tuple[Tensor, Tensor] | None],
    views: Sequence[View],
    scale: float,
    cap: float | None,
) -> list[Partial]:
    """Compute partial results ``[B, K, Q, ...]`` that together cover all segments."""
    beams = len(query) // table.num_requests
    rotated = table.rotated(place, _groups_to_rows(query, beams))
    parts, start = [], 0
    for segment, view, pair in zip(table.segments, views, states, strict=True):
        pairs = len(segment.readers)
        if pair is not None:
            # One call for all pairs of a segment, so that its keys are read only once.
            rows = _groups_to_rows(rotated[start : start + pairs], pairs)
            key, value = (tensor[None] for tensor in pair)
            part = attend(rows, key, value, scale, view.mask, cap)
            parts.append(_rows_to_groups(part, pairs))
        start += pairs
    return [_rows_to_groups(part, beams) for part in table.by_request(parts)]


def _groups_to_rows(query: Tensor, group: int) -> Tensor:
    """Fold groups into rows: ``[n * group, K, Q, D]`` to ``[n, K, group * Q, D]``."""
    if group == 1:
        return query
    return torch.unflatten(query, 0, (-1, group)).transpose(1, 2).flatten(2, 3)


def _rows_to_groups(part: Partial, group: int) -> Partial:
    """Unfold rows into groups: ``[n, K, group * Q, ...]`` to ``[n * group, K, Q, ...]``."""
    if group == 1:
        return part
    apart = (torch.unflatten(states, 2, (group, -1)) for states in part)
    return Partial(*(states.transpose(1, 2).flatten(0, 1) for states in apart))
