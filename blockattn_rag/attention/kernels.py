"""Attention kernels that also return the log-sum-exp, which ``attention.merge`` needs.

Shapes: ``B`` requests, ``K`` key-value heads, ``Q`` query rows, ``N`` key tokens, ``D`` head size.

A ``Kernel`` takes:

- ``query``: Queries ``[B, K, Q, D]``. Query heads that share keys are folded into rows, so that
  keys are never repeated.
- ``key`` and ``value``: Keys and values ``[B, K, N, D]``.
- ``scale``: Factor that scores are multiplied by before the softmax (base e).
- ``mask``: Bool, broadcastable to ``[B, K, Q, N]``, True where a key is visible. None: all keys are
  visible.

``attend`` and ``attend_plain`` also support a soft cap on scores: ``cap * tanh(score / cap)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.flash import aligned, fastest_flash
from blockattn_rag.attention.merge import LEAST_LSE, Partial

Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Partial]

MOST_SCORES = 1 << 24
"""Maximum number of scores that ``attend`` computes at a time without a fused kernel."""

_HALF = (torch.float16, torch.bfloat16)
_FUSED_DTYPES = (torch.float32, *_HALF)


class AttentionInputs(NamedTuple):
    """Inputs of one layer's attention.

    Args:
        query: Queries ``[B, H, tokens, D]``, rotated to their positions.
        key, value: Keys and values ``[B, K, T, D]``.
        scale: Factor that scores are multiplied by before the softmax (base e).
        mask: Bool ``[B, 1, tokens, T]``, True where a key is visible. None: all are visible.
        cap: Soft cap on scores. None: no cap.
        sinks: Score of each query head's attention sink, ``[H]``. None: no sinks.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> Partial:
    """Compute attention with the fastest exact kernel. See the module docstring for shapes."""
    kernel = attend_plain if cap is not None else kernel_for(query, key, value, mask)
    if kernel is not attend_plain:
        return kernel(query, key, value, scale, mask)
    # The plain kernel keeps all scores in memory, so limit the query rows of each call.
    rows = max(1, MOST_SCORES // max(1, len(query) * key.shape[1] * key.shape[2]))
    if query.shape[2] <= rows:
        return attend_plain(query, key, value, scale, mask, cap)
    key, value = key.float(), value.float()
    masks: Sequence[Tensor | None] = [None] * -(-query.shape[2] // rows)
    if mask is not None:
        masks = torch.split(mask.expand(*mask.shape[:-2], query.shape[2], -1), rows, dim=-2)
    parts = [
        attend_plain(part, key, value, scale, seen, cap)
        for part, seen in zip(torch.split(query, rows, dim=2), masks, strict=True)
    ]
    return Partial(*(torch.cat(states, dim=2) for states in zip(*parts, strict=True)))


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Kernel:
    """Select the fastest kernel that is exact for these tensors and this mask."""
    if query.shape[-1] != value.shape[-1] or not key.shape[2]:
        return attend_plain  # Fused kernels require equal head sizes and at least one key.
    if query.dtype not in _FUSED_DTYPES or torch.is_grad_enabled():
        return attend_plain  # Fused kernels do not backpropagate through the log-sum-exp.
    if query.is_cpu:
        return attend_fused
    return cuda_kernel_for(query, mask) if query.is_cuda else attend_plain


def cuda_kernel_for(query: Tensor, mask: Tensor | None) -> Kernel:
    """Select the fastest exact CUDA kernel for a query in float32, float16 or bfloat16.

    The flash kernel supports neither masks nor float32. The memory-efficient kernel supports heads
    whose size is a multiple of 16 bytes. Otherwise, and before Ampere, the plain kernel is used.
    """
    size = query.shape[-1]
    if mask is None and takes_flash(query.device, query.dtype, size):
        return attend_flash
    if size * query.itemsize % 16 or torch.cuda.get_device_capability(query.device) < (8, 0):
        return attend_plain
    return attend_memory_efficient


def takes_flash(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether CUDA flash kernels support a head size and a dtype on a device."""
    is_supported = device.type == "cuda" and dtype in _HALF and size <= 256 and size % 8 == 0
    return is_supported and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> Partial:
    """Compute attention in float32 without a fused kernel. Other kernels are tested against it."""
    scores = (query.float() @ key.float().mT).mul_(scale)
    if cap is not None:
        scores = capped(scores, cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.clamp_min(LEAST_LSE).unsqueeze(-1)).exp()
    return Partial(weights @ value.float(), lse)


def capped(scores: Tensor, cap: float) -> Tensor:
    """Soft-cap the scores: ``cap * tanh(score / cap)``. Overwrites ``scores``."""
    # Do not multiply in place, because the gradient of tanh needs its result.
    return scores.div_(cap).tanh_() * cap


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """Run PyTorch's flash kernel for the CPU. Requires ``N > 0``."""
    # The kernel assumes that rows are contiguous.
    query, key, value = (s if s.stride(-1) == 1 else s.contiguous() for s in (query, key, value))
    bias = None if mask is None else _additive_mask(mask, query)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return _without_masked_rows(output, lse, mask)


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, _: Tensor | None = None
) -> Partial:
    """Run the fastest flash kernel for CUDA. Requires 16-bit dtypes, no mask and ``N > 0``."""
    kernel = fastest_flash(query.device, query.dtype, query.shape[-1])
    output, lse = kernel(query, key, value, scale, False)
    return Partial(output.float(), lse)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last tokens to all tokens with a flash kernel.

    Queries and output are ``[B, H, tokens, D]``, keys and values ``[B, K, N, D]``. H is a multiple
    of K. Requires ``takes_flash`` for the device, dtype and head size.
    """
    kernel = fastest_flash(query.device, query.dtype, query.shape[-1])
    return kernel(query, key, value, scale, query.shape[2] > 1)[0]


def attend_memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """Run PyTorch's memory-efficient kernel for CUDA. Requires ``N > 0``."""
    query, key, value = map(aligned, (query, key, value))
    bias = None
    if mask is not None:  # The kernel does not broadcast masks.
        bias = _additive_mask(mask, query).expand(*query.shape[:3], -1)
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, scale=scale
    )
    # The kernel pads the log-sum-exp to a multiple of 32 rows.
    return _without_masked_rows(output, lse.narrow(-1, 0, query.shape[2]), mask)


def single_softmax(
    queries: Sequence[Tensor],
    states: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of a few query rows to several sets of keys with a single softmax.

    Used in decoding, where the overhead of a fused kernel exceeds the computation itself.

    Args:
        queries: Query rows for each set, ``[K, Q, D]``, float32: the same rows, rotated to match
            the set's keys.
        states: Keys and values of each set, ``[K, N, D]``.
        sinks: Score of each row's attention sink, ``[K, Q]``. None: no sinks.

    Returns:
        Attention output, ``[K, Q, D]``.
    """
    keys, values = zip(*states, strict=True)
    scores = [torch.bmm(query, key.mT) for query, key in zip(queries, keys, strict=True)]
    joined = torch.cat(scores, dim=-1).mul_(scale)
    if cap is not None:
        joined = capped(joined, cap)
    counts = [key.shape[1] for key in keys]
    if sinks is not None:
        joined = torch.cat([joined, sinks.unsqueeze(-1)], dim=-1)
        counts.append(1)
    first, *others = torch.split(joined.softmax(dim=-1), counts, dim=-1)
    output = torch.bmm(first, values[0])
    for weight, value in zip(others, values[1:], strict=False):  # A sink has no value.
        output.baddbmm_(weight, value)
    return output


def fold_heads(query: Tensor, mask: Tensor | None, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """Fold query heads that share keys into rows, so that keys are never repeated.

    Converts queries ``[B, H, tokens, D]`` to ``[B, K, Q, D]``, and the mask ``[B, 1, tokens, N]``
    to ``[B, 1, Q, N]``.
    """
    batch, heads, _, size = query.shape
    folded = query.reshape(batch, kv_heads, -1, size)
    return folded, None if mask is None else mask.repeat(1, 1, heads // kv_heads, 1)


def fold_sinks(sinks: Tensor, tokens: int, kv_heads: int) -> Tensor:
    """Repeat sink scores ``[H]`` for the rows of ``fold_heads``. Returns ``[K, Q]``, float32."""
    return sinks.float().reshape(kv_heads, -1).repeat_interleave(tokens, dim=1)


def _additive_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Additive mask: 0 where a key is visible, else the dtype's minimum. Rows begin at multiples of
    8 elements, as the memory-efficient kernel requires."""
    *rows, keys = mask.shape
    bias = torch.zeros(*rows, -(-keys // 8) * 8, dtype=query.dtype, device=query.device)
    return bias.narrow(-1, 0, keys).masked_fill_(mask.logical_not(), torch.finfo(query.dtype).min)


def _without_masked_rows(output: Tensor, lse: Tensor, mask: Tensor | None) -> Partial:
    """Set the output of fully masked rows to 0, and their log-sum-exp to -inf, because fused
    kernels return an average for them."""
    output, lse = output.float(), lse.float()
    if mask is not None:
        masked = mask.any(dim=-1).logical_not().expand(lse.shape)
        output = output.masked_fill(masked.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(masked, -math.inf)
    return Partial(output, lse)
