"""Relay attention: attention reads stored blocks in place, once for all requests of a batch.

A score depends only on the distance between query and key. Relay attention therefore leaves a
block's keys unchanged and rotates the few queries in the opposite direction, once per block. The
partial results are merged by their log-sum-exp. Keys are not copied, rotated or rounded again,
except in small blocks, which are joined (``JoinLimits``).

The *tail* is the final block and the generated tokens.

Shapes: ``R`` requests, ``B`` rows of the batch (a multiple of ``R``; the beams of a request are
adjacent), ``H`` query heads, ``K`` key-value heads, ``Q`` query rows (tokens times the heads
that share keys), ``T`` tail tokens, ``D`` head size.
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
"""Maximum tokens of a final block for relay attention. For a longer block, rotating the queries for
every block costs more than rotating the keys once."""


class JoinLimits(NamedTuple):
    """Token counts below which blocks are joined into segments, for speed.

    Segments reach about as many tokens as the limit. Joined blocks are copies that live until the
    answer ends. 0 disables joining.

    Args:
        prefill_tokens: Limit for prefill, which processes all queries of a prompt at once.
        decode_tokens: Limit for decoding, which processes one token at a time.
    """

    prefill_tokens: int
    decode_tokens: int


# Each segment costs 30 to 40 microseconds of call overhead per layer, whatever its size
# (`bench decode --block-tokens 128,512`).
CPU_JOINS = JoinLimits(prefill_tokens=32, decode_tokens=512)
# Launching a kernel takes longer than running it (`benchmarks/results/gpu`).
ACCELERATOR_JOINS = JoinLimits(prefill_tokens=131_072, decode_tokens=131_072)


class LayerReads(NamedTuple):
    """Tensors of a block that a layer of a model reads.

    Args:
        place: Index among the layers of the blocks.
        window: Sliding window in tokens. None: no window.
        latent: Maps from the blocks' latents to keys and values. None: blocks have keys and values.
    """

    place: int
    window: int | None = None
    latent: LatentMap | None = None


class RelayPlan:
    """Plan of one batch: which request attends to which block. Shared by all layers.

    Each layer reads a distinct block once for all requests that contain it, although its offset may
    differ between requests.

    Args:
        contexts: Placed blocks of each request.
        layouts: Rotary layout of each layer of the blocks.
        joins: Limits below which blocks are joined. Default: the fastest limits for the device.
        layers: Reads of each layer of the model, by its index. Default: layer i reads layer i of
            the blocks, without windows.
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
        """Segments for layers with this window, in forward passes of ``tokens`` tokens."""
        limit = self._joins.decode_tokens if tokens == 1 else self._joins.prefill_tokens
        key = limit, window
        if key not in self._tables:
            self._tables[key] = SegmentTable(*self._blocks, *key)
        return self._tables[key]

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Attention of the final block's queries to all blocks and to the tail.

        Args:
            inputs: Queries, and the tail's keys, values and mask. Requests with windows must have
                no padding.

        Returns:
            Attention output ``[B, H, tokens, D]`` in the query's dtype.
        """
        query, tail_key, tail_value, scale, tail_mask, cap, sinks = inputs
        batch, heads, tokens, _ = query.shape
        place, window, latent = self._layers[layer]
        folded, mask = fold_heads(query, tail_mask, tail_key.shape[1])
        asked = folded if latent is None else latent.queries(query)
        # Latents are joined with their rotary keys once, for the question and its answer.
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
    """Whether ``single_softmax`` can replace the kernels.

    True only for one request on the CPU in float32, without gradients or quantized blocks. Other
    dtypes would round the scores, and other devices have faster kernels. Gradients need the tensors
    that ``single_softmax`` overwrites, and all quantized blocks would be dequantized at once.
    """
    if len(query) > 1 or not table.is_one_each or table.is_dequantized or not query.is_cpu:
        return False
    if not query.dtype == value.dtype == torch.float32:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


def _segment_parts(
    table: SegmentTable,
    place: int,
    query: Tensor,
    states: Iterable[tuple[Tensor, Tensor] | None],
    views: Sequence[View],
    scale: float,
    cap: float | None,
) -> list[Partial]:
    """Partial results ``[B, K, Q, ...]``, which together cover all segments."""
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
