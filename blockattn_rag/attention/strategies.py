"""Strategies: ways to attend to all segments and to the tail. One serves a whole forward.

The *tail* is what is no stored block: the final block and the generated tokens.

Shapes: ``B`` rows of the batch (a multiple of ``R`` requests: beams of one request follow one
another), ``K`` key-value heads, ``Q`` query rows (tokens times the heads that share keys), ``T``
tail tokens, ``D`` head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from blockattn_rag.attention.cuda import kernel_on_cuda
from blockattn_rag.attention.kernels import (
    FUSED,
    MATMUL,
    PLAIN,
    Kernel,
    Partial,
    merge,
    online_softmax,
    single_softmax,
)
from blockattn_rag.attention.segments import SegmentTable
from blockattn_rag.attention.tuning import CPU, Tuning

if TYPE_CHECKING:
    from torch import Tensor


class LayerInputs(NamedTuple):
    """What one layer attends with.

    Args:
        layer: index of the layer.
        query: ``[B, K, Q, D]``, rotated for the queries' own positions.
        tail_key, tail_value: ``[B, K, T, D]``.
        scale: factor of the scores, natural exponent.
        tail_mask: bool ``[B, 1, Q, T]``, True where seen; None: all.
        num_tokens: query tokens of each row of the batch, ``Q`` divided by the heads that share
            keys.
    """

    layer: int
    query: Tensor
    tail_key: Tensor
    tail_value: Tensor
    scale: float
    tail_mask: Tensor | None
    num_tokens: int


class Strategy(Protocol):
    """One way to attend, made for one forward."""

    name: str

    def attend(self, inputs: LayerInputs) -> Tensor:
        """Attention ``[B, K, Q, D]`` to all segments and to the tail."""


class SingleSoftmax:
    """One softmax over all scores of one request's token: no partial results."""

    name = "single softmax"

    def __init__(self, table: SegmentTable) -> None:
        self._table = table

    def attend(self, inputs: LayerInputs) -> Tensor:
        layer, query, tail_key, tail_value, scale, *_ = inputs
        queries = [*self._table.rotated(layer, query), query[0]]
        states = [*self._table.states(layer), (tail_key[0], tail_value[0])]
        return single_softmax(queries, states, scale)[None]


class OnlineSoftmax:
    """A running softmax from segment to segment, for one request's question."""

    name = "online softmax"

    def __init__(self, table: SegmentTable, tail_kernel: Kernel) -> None:
        self._table = table
        self._tail_kernel = tail_kernel

    def attend(self, inputs: LayerInputs) -> Tensor:
        layer, query, tail_key, tail_value, scale, mask, _ = inputs
        tail = self._tail_kernel.attend(query, tail_key, tail_value, scale, mask)
        queries = self._table.rotated(layer, query * scale)
        part = Partial(tail.output[0], tail.lse[0])
        return online_softmax(part, queries, self._table.states(layer))[None]


class MergedParts:
    """A partial result for each segment and for the tail, and their merge: always possible.

    Each segment has a kernel of its own, which the first layer of the forward chooses.
    """

    name = "merged parts"

    def __init__(self, table: SegmentTable, tail_kernel: Kernel) -> None:
        self._table = table
        self._tail_kernel = tail_kernel
        self._kernels: list[Kernel] = []

    def attend(self, inputs: LayerInputs) -> Tensor:
        layer, query, tail_key, tail_value, scale, mask, _ = inputs
        tail = self._tail_kernel.attend(query, tail_key, tail_value, scale, mask)
        parts = [*self._attend_segments(layer, query, scale), tail]
        return merge(parts).output if len(parts) > 1 else tail.output

    def _attend_segments(self, layer: int, query: Tensor, scale: float) -> list[Partial]:
        """Partials over the context's blocks, each ``[B, K, Q, D]``."""
        beams = query.shape[0] // self._table.num_requests
        rotated = self._table.rotated(layer, _groups_to_rows(query, beams))
        parts, start = [], 0
        for index, (key, value) in enumerate(self._table.states(layer)):
            pairs = len(self._table.segments[index].readers)
            # All pairs in one call, so that a segment's keys are read once.
            rows = _groups_to_rows(rotated[start : start + pairs], pairs)
            if index == len(self._kernels):
                self._kernels.append(kernel_for(rows, key[None], value[None]))
            part = self._kernels[index].attend(rows, key[None], value[None], scale, None)
            parts.append(Partial(*(_rows_to_groups(tensor, pairs) for tensor in part)))
            start += pairs
        by_request = self._table.by_request(parts)
        return [Partial(*(_rows_to_groups(t, beams) for t in part)) for part in by_request]


def strategy_for(table: SegmentTable, inputs: LayerInputs, tuning: Tuning) -> Strategy:
    """The fastest exact strategy for the forward whose first layer has these inputs."""
    _, query, tail_key, tail_value, _, tail_mask, num_tokens = inputs
    one_softmax = len(query) == 1 and table.is_one_each and _computes_in_float32(query, tail_value)
    if one_softmax and num_tokens == 1 and tail_mask is None:
        return SingleSoftmax(table)
    tail_kernel = kernel_for(query, tail_key, tail_value, tail_mask)
    _, heads, rows, _ = query.shape
    longest = max((segment.num_tokens for segment in table.segments), default=0)
    fits = rows <= tuning.online_rows and 0 < heads * rows * longest <= tuning.most_scores
    return (OnlineSoftmax if one_softmax and fits else MergedParts)(table, tail_kernel)


def _computes_in_float32(query: Tensor, value: Tensor) -> bool:
    """Whether one softmax can take the place of the kernels: other types would round the scores,
    other devices have faster kernels, and gradients need what the online softmax overwrites."""
    if query.device.type != "cpu" or not query.dtype == value.dtype == torch.float32:
        return False
    return not (torch.is_autocast_enabled("cpu") or torch.is_grad_enabled())


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Kernel:
    """The fastest exact kernel for tensors of these shapes, types and device."""
    if query.shape[-1] != value.shape[-1] or not key.shape[2]:
        return PLAIN  # fused kernels take one head size, and divide by zero without a key
    if query.device.type == "cuda":
        return kernel_on_cuda(query, mask)
    if query.device.type != "cpu" or query.dtype not in _FUSED_DTYPES:
        return PLAIN
    return MATMUL if mask is None and _matmul_is_faster(query, key) else FUSED


_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _matmul_is_faster(query: Tensor, key: Tensor) -> bool:
    """For a question's rows over a long block, in float32."""
    batch, heads, rows, _ = query.shape
    keys = key.shape[2]
    fits = keys >= CPU.matmul_keys and batch * heads * rows * keys <= CPU.most_scores
    return fits and rows in CPU.matmul_rows and query.dtype == key.dtype == torch.float32


def _groups_to_rows(query: Tensor, group: int) -> Tensor:
    """``[n * group, K, Q, D]`` to ``[n, K, group * Q, D]``: what sees the same keys, in one."""
    if group == 1:
        return query
    count, heads, rows, size = query.shape
    split = query.reshape(count // group, group, heads, rows, size).transpose(1, 2)
    return split.reshape(count // group, heads, group * rows, size)


def _rows_to_groups(part: Tensor, group: int) -> Tensor:
    """``[n, K, group * Q, ...]`` back to ``[n * group, K, Q, ...]``."""
    if group == 1:
        return part
    count, heads, rows, *rest = part.shape
    split = part.reshape(count, heads, group, rows // group, *rest).transpose(1, 2)
    return split.reshape(count * group, heads, rows // group, *rest)
