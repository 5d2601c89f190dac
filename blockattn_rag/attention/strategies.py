"""Strategies: ways to attend to all segments and to the tail. One serves a whole forward.

The *tail* is what is no stored block: the final block and the generated tokens.

Shapes: ``B`` rows of the batch (a multiple of ``R`` requests: beams of one request follow one
another), ``K`` key-value heads, ``Q`` query rows (tokens times the heads that share keys), ``T``
tail tokens, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.cuda import kernel_on_cuda
from blockattn_rag.attention.kernels import (
    Kernel,
    Partial,
    attend_fused,
    attend_plain,
    merge,
    single_softmax,
)
from blockattn_rag.attention.segments import SegmentTable


class LayerInputs(NamedTuple):
    """What one layer attends with."""

    layer: int
    query: Tensor  # [B, K, Q, D], rotated for the queries' own positions
    tail_key: Tensor  # [B, K, T, D], as the values are
    tail_value: Tensor
    scale: float  # factor of the scores, natural exponent
    tail_mask: Tensor | None  # bool [B, 1, Q, T], True where seen; None: all


class Strategy(NamedTuple):
    """One way to attend, made for one forward: its name, and what gives a layer's attention
    ``[B, K, Q, D]`` to all segments and to the tail."""

    name: str
    attend: Callable[[LayerInputs], Tensor]


def strategy_for(table: SegmentTable, inputs: LayerInputs, num_tokens: int) -> Strategy:
    """The fastest exact strategy for the forward whose first layer has these inputs, and
    ``num_tokens`` query tokens in each row of the batch."""
    _, query, tail_key, tail_value, _, tail_mask = inputs
    one_request = len(query) == 1 and table.is_one_each and _computes_in_float32(query, tail_value)
    one_token = num_tokens == 1 and tail_mask is None
    if one_request and one_token and not table.is_dequantised:  # it takes all segments at once
        return Strategy("single softmax", partial(_by_single_softmax, table))
    kernel = kernel_for(query, tail_key, tail_value, tail_mask)
    return Strategy("merged parts", partial(_by_merged_parts, table, kernel, []))


def _by_single_softmax(table: SegmentTable, inputs: LayerInputs) -> Tensor:
    """One softmax over all scores of one request's token: no partial results."""
    layer, query, tail_key, tail_value, scale, _ = inputs
    queries = [*table.rotated(layer, query), query[0]]
    states = [*table.states(layer), (tail_key[0], tail_value[0])]
    return single_softmax(queries, states, scale)[None]


def _by_merged_parts(
    table: SegmentTable, tail_kernel: Kernel, kernels: list[Kernel], inputs: LayerInputs
) -> Tensor:
    """A partial result for each segment and for the tail, and their merge: always possible."""
    layer, query, tail_key, tail_value, scale, mask = inputs
    tail = tail_kernel(query, tail_key, tail_value, scale, mask)
    parts = _segment_parts(table, kernels, layer, query, scale)
    return merge([*parts, tail]).output if parts else tail.output


def _segment_parts(
    table: SegmentTable, kernels: list[Kernel], layer: int, query: Tensor, scale: float
) -> list[Partial]:
    """Partial results ``[B, K, Q, ...]`` that cover all segments.

    ``kernels`` are those of the segments; the first layer of the forward chooses and adds them.
    """
    beams = query.shape[0] // table.num_requests
    rotated = table.rotated(layer, _groups_to_rows(query, beams))
    parts, start = [], 0
    for index, (key, value) in enumerate(table.states(layer)):
        pairs = len(table.segments[index].readers)
        # All pairs in one call, so that a segment's keys are read once.
        rows = _groups_to_rows(rotated[start : start + pairs], pairs)
        if index == len(kernels):
            kernels.append(kernel_for(rows, key[None], value[None]))
        part = kernels[index](rows, key[None], value[None], scale, None)
        parts.append(_rows_to_groups(part, pairs))
        start += pairs
    return [_rows_to_groups(part, beams) for part in table.by_request(parts)]


def _computes_in_float32(query: Tensor, value: Tensor) -> bool:
    """Whether one softmax can take the place of the kernels: other types would round the scores,
    other devices have faster kernels, and gradients need what the online softmax overwrites."""
    if query.device.type != "cpu" or not query.dtype == value.dtype == torch.float32:
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.is_grad_enabled())


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Kernel:
    """The fastest exact kernel for tensors of these shapes, types and device."""
    if query.shape[-1] != value.shape[-1] or not key.shape[2]:
        return attend_plain  # fused kernels take one head size, and divide by zero without a key
    if torch.is_grad_enabled():
        return attend_plain  # others give no gradient through the log-sum-exp
    if query.device.type == "cuda":
        return kernel_on_cuda(query, mask)
    if query.device.type != "cpu" or query.dtype not in _FUSED_DTYPES:
        return attend_plain
    return attend_fused


_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
