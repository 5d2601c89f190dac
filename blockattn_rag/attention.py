"""Relay attention: attention over blocks where they lie, merged by log-sum-exp.

A score depends only on the distance of query and key. So instead of rotating a block's keys by the
block's offset, the few queries are rotated the other way, once per block, and attend to the stored
keys as they are. Each block gives an output and a log-sum-exp; these are merged exactly
(RelayAttention, section 3.3 and appendix A). No key is copied, rotated or rounded again.

Shapes: ``B`` requests, ``H`` query heads, ``K`` key-value heads, ``G = H / K``, ``Q`` query tokens,
``N`` key tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from blockattn_rag.rope import RotaryLayout, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from blockattn_rag.kv import BlockKV, Context


class Partial(NamedTuple):
    """Attention over some keys: output ``[..., Q, D]`` and log-sum-exp ``[..., Q]``, float32.

    A query that sees none of these keys has output 0 and log-sum-exp -inf.
    """

    output: Tensor
    lse: Tensor


Backend = Callable[["Tensor", "Tensor", "Tensor", float, "Tensor | None"], Partial]


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """Attention with its log-sum-exp, by the fastest exact way there is for these tensors.

    Args:
        query: ``[B, K, Q, D]``: the heads of a group are folded into rows, so keys are never
            repeated.
        key, value: ``[B, K, N, D]``.
        scale: factor of the scores, natural exponent.
        mask: bool, broadcastable to ``[B, K, Q, N]``, True where a key is seen; None: all are.
    """
    return _backend(query, value)(query, key, value, scale, mask)


def _backend(query: Tensor, value: Tensor) -> Backend:
    if query.shape[-1] != value.shape[-1]:
        return attend_plain  # the fused kernels want one head size
    if query.device.type == "cpu" and query.dtype in _CPU_DTYPES:
        return attend_cpu
    if query.device.type == "cuda":
        return attend_cuda
    return attend_plain


_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Partial:
    """The readable one, in float32: what the others are tested against."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - _finite(lse).unsqueeze(-1)).exp()
    return Partial(weights @ value.float(), lse)


def attend_cpu(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Partial:
    """PyTorch's fused CPU kernel, which gives the log-sum-exp besides the output."""
    bias = _additive(mask, query) if mask is not None else None
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return _without_blind_rows(output, lse, mask)


def attend_cuda(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Partial:
    """PyTorch's CUDA kernels: flash for 16-bit types without a mask, else memory-efficient."""
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, False, scale=scale
        )
        return Partial(output.float(), lse[..., : query.shape[2]].float())
    bias = _additive(mask, query) if mask is not None else None
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, scale=scale
    )
    return _without_blind_rows(output, lse[..., : query.shape[2]], mask)


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """0 where seen, the dtype's minimum where not, at full size as the kernels want it."""
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~mask, torch.finfo(query.dtype).min)
    return bias


def _without_blind_rows(output: Tensor, lse: Tensor, mask: Tensor | None) -> Partial:
    """Set queries that see nothing to output 0 and -inf: kernels give them an average."""
    output, lse = output.float(), lse.float()
    if mask is None:
        return Partial(output, lse)
    blind = ~mask.any(dim=-1).expand(lse.shape)
    return Partial(output.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -math.inf))


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


def merge(outputs: Tensor, lses: Tensor) -> Partial:
    """Attention over the union of disjoint key sets (RelayAttention, equations 4-6), float32.

    Args:
        outputs: ``[P, ..., Q, D]``, one per key set.
        lses: ``[P, ..., Q]``; -inf where a query sees none of the set's keys.
    """
    lse = lses.logsumexp(dim=0)
    weights = (lses - _finite(lse)).exp()
    return Partial((outputs * weights.unsqueeze(-1)).sum(dim=0), lse)


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One block's bytes, and who reads them: pairs ``start..end`` of the plan."""

    kv: BlockKV
    start: int
    end: int


class RelayPlan:
    """Who attends to which block, for one batch of requests. Made once, used by every layer.

    Every distinct block is read once per layer, for all requests that hold it, each of which sees
    it at an offset of its own.

    Args:
        contexts: the placed blocks of each request.
        layouts: rotary layout per layer.
        device: where queries are.
    """

    def __init__(
        self, contexts: Sequence[Context], layouts: Sequence[RotaryLayout], device: torch.device
    ) -> None:
        self.num_requests = len(contexts)
        readers: dict[int, tuple[BlockKV, list[tuple[int, int]]]] = {}
        for request, context in enumerate(contexts):
            for kv, _, shift in context.blocks:
                readers.setdefault(id(kv), (kv, []))[1].append((request, shift))
        self._readings: list[_Reading] = []
        requests: list[int] = []
        shifts: list[int] = []
        for kv, pairs in readers.values():
            self._readings.append(_Reading(kv, len(requests), len(requests) + len(pairs)))
            requests += [request for request, _ in pairs]
            shifts += [shift for _, shift in pairs]
        self._layouts = layouts
        # Queries stand at their own positions; seen from a block that was moved by `shift`, they
        # stand `shift` earlier.
        self._tables: dict[RotaryLayout, tuple[Tensor, Tensor]] = {}
        for layout in set(layouts):
            if layout.rotates and shifts:
                cos, sin = layout.cos_sin(-torch.tensor(shifts), device)
                self._tables[layout] = cos[:, None, None], sin[:, None, None]
        self._request_of = torch.tensor(requests, dtype=torch.long, device=device)
        self._slot_of, self._num_slots = _slots(requests, device)

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
            query: ``[B, H, Q, D]``, rotated for the queries' own positions. ``B`` is a multiple of
                the number of requests: beams of one request follow one another.
            tail_key, tail_value: ``[B, K, T, D]``: final block and generated tokens.
            tail_mask: bool ``[B, 1, Q, T]``, True where seen; None: all.

        Returns:
            ``[B, H, Q, D]`` in the query's dtype.
        """
        groups = query.shape[1] // tail_key.shape[1]
        tail_mask = _fold_mask(tail_mask, groups)
        whole = attend(_fold(query, groups), tail_key, tail_value, scale, tail_mask)
        if self._readings:
            blocks = self._attend_blocks(layer, query, groups, scale)
            whole = merge(
                torch.cat([blocks.output, whole.output[None]]),
                torch.cat([blocks.lse, whole.lse[None]]),
            )
        return _unfold(whole.output, query).to(query.dtype)

    def _attend_blocks(self, layer: int, query: Tensor, groups: int, scale: float) -> Partial:
        """Partials over the context's blocks: ``[slots, B, K, G * Q, D]`` and without ``D``."""
        beams = query.shape[0] // self.num_requests
        turned = _fold(self._turned(layer, _beams_to_rows(query, beams)), groups)
        shape = (self._num_slots, self.num_requests, *turned.shape[1:-1])
        outputs = turned.new_zeros((*shape, self._value_size(layer)), dtype=torch.float32)
        lses = outputs.new_full(shape, -math.inf)
        for reading in self._readings:
            pairs = slice(reading.start, reading.end)
            part = _attend_shared(
                turned[pairs], reading.kv.keys[layer], reading.kv.values[layer], scale
            )
            at = self._slot_of[pairs], self._request_of[pairs]
            outputs[at], lses[at] = part.output, part.lse
        if beams == 1:
            return Partial(outputs, lses)
        return Partial(_rows_to_beams(outputs, beams, groups), _rows_to_beams(lses, beams, groups))

    def _turned(self, layer: int, query: Tensor) -> Tensor:
        """Each pair's queries ``[pairs, H, Q, D]`` as its block sees them."""
        layout = self._layouts[layer]
        if self.num_requests > 1:
            chosen = query[self._request_of]
        else:
            chosen = query.expand(len(self._request_of), *query.shape[1:])
        return rotate(chosen, *self._tables[layout], layout) if layout in self._tables else chosen

    def _value_size(self, layer: int) -> int:
        return self._readings[0].kv.values[layer].shape[-1]


def _beams_to_rows(query: Tensor, beams: int) -> Tensor:
    """``[R * beams, H, Q, D]`` to ``[R, H, beams * Q, D]``: beams see the same context."""
    if beams == 1:
        return query
    rows, heads, tokens, size = query.shape
    split = query.reshape(rows // beams, beams, heads, tokens, size)
    return split.transpose(1, 2).reshape(rows // beams, heads, beams * tokens, size)


def _rows_to_beams(part: Tensor, beams: int, groups: int) -> Tensor:
    """``[S, R, K, G * beams * Q, ...]`` to ``[S, R * beams, K, G * Q, ...]``."""
    slots, requests, heads, rows, *rest = part.shape
    tokens = rows // (groups * beams)
    split = part.reshape(slots, requests, heads, groups, beams, tokens, *rest)
    moved = split.movedim(4, 2)
    return moved.reshape(slots, requests * beams, heads, groups * tokens, *rest)


def _attend_shared(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Several requests' queries ``[R, K, Q, D]`` over one block's keys ``[K, N, D]``, read once."""
    requests, heads, rows, size = query.shape
    flat = query.transpose(0, 1).reshape(1, heads, requests * rows, size)
    part = attend(flat, key[None], value[None], scale)
    output = part.output.reshape(heads, requests, rows, -1).transpose(0, 1)
    return Partial(output, part.lse.reshape(heads, requests, rows).transpose(0, 1))


def _fold(query: Tensor, groups: int) -> Tensor:
    """``[B, H, Q, D]`` to ``[B, K, G * Q, D]``: heads that share keys become rows."""
    batch, heads, rows, size = query.shape
    return query.reshape(batch, heads // groups, groups * rows, size)


def _unfold(output: Tensor, query: Tensor) -> Tensor:
    """Back to ``[B, H, Q, D]``."""
    return output.reshape(*query.shape[:3], output.shape[-1])


def _fold_mask(mask: Tensor | None, groups: int) -> Tensor | None:
    """``[B, 1, Q, T]`` to ``[B, 1, G * Q, T]``."""
    return None if mask is None else mask.repeat(1, 1, groups, 1)


def _slots(requests: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """A place for each pair in the table of partials: counts up within a request."""
    used: dict[int, int] = {}
    slots = []
    for request in requests:
        slots.append(used.get(request, 0))
        used[request] = slots[-1] + 1
    return torch.tensor(slots, dtype=torch.long, device=device), max(used.values(), default=0)
