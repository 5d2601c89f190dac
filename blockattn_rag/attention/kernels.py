"""Attention with its log-sum-exp, and the merge of attention over parts of the keys.

Attention over disjoint sets of keys, each with its log-sum-exp, merges exactly into attention over
all of them (RelayAttention, section 3.3 and appendix A).

Shapes: ``B`` requests, ``K`` key-value heads, ``Q`` query rows, ``N`` key tokens, ``D`` head size.
Every kernel takes ``query`` ``[B, K, Q, D]`` (query heads that share keys are rows, so keys are
never repeated), ``key`` and ``value`` ``[B, K, N, D]``, ``scale`` (factor of the scores, natural
exponent) and ``mask`` (bool, broadcastable to ``[B, K, Q, N]``, True where a key is seen; None: all
are seen). Kernels for CUDA are in ``attention.cuda``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some keys: output ``[..., Q, D]`` and log-sum-exp ``[..., Q]``, float32.

    A query that sees none of these keys has output 0 and log-sum-exp -inf.
    """

    output: Tensor
    lse: Tensor


Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Partial]

# Stands for a log-sum-exp of -inf where one is subtracted, because -inf less -inf is no number.
LEAST_LSE = torch.finfo(torch.float32).min


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """The readable kernel, in float32, against which the others are tested."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.clamp_min(LEAST_LSE).unsqueeze(-1)).exp()
    return Partial(weights @ value.float(), lse)


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """PyTorch's fused CPU kernel, which gives the log-sum-exp besides the output; ``N > 0``."""
    query, key, value = map(with_whole_rows, (query, key, value))
    bias = additive_mask(mask, query) if mask is not None else None
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return without_masked_rows(output, lse, mask)


def single_softmax(
    queries: Sequence[Tensor], states: Sequence[tuple[Tensor, Tensor]], scale: float
) -> Tensor:
    """Attention of a few rows over several sets of keys, by one softmax over all scores.

    For the token of an answer: its scores are few, and a call of the fused kernel takes longer than
    the work in it.

    Args:
        queries: ``[K, Q, D]`` for each set: the same rows, rotated as the set sees them; float32.
        states: keys and values ``[K, N, D]`` of each set.
        scale: factor of the scores, natural exponent.

    Returns:
        ``[K, Q, D]``.
    """
    keys, values = zip(*states, strict=True)
    scores = [torch.bmm(query, key.mT) for query, key in zip(queries, keys, strict=True)]
    weights = torch.cat(scores, dim=-1).mul_(scale).softmax(dim=-1)
    first, *others = torch.split(weights, [key.shape[1] for key in keys], dim=-1)
    output = torch.bmm(first, values[0])
    for weight, value in zip(others, values[1:], strict=True):
        output.baddbmm_(weight, value)
    return output


def fold_heads(query: Tensor, mask: Tensor | None, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """Query heads that share keys as rows, so that keys are never repeated.

    Args:
        query: ``[B, H, tokens, D]``.
        mask: ``[B, 1, tokens, N]``, or None.
        kv_heads: K.

    Returns:
        ``[B, K, Q, D]`` and ``[B, 1, Q, N]``, or None.
    """
    batch, heads, _, size = query.shape
    folded = query.reshape(batch, kv_heads, -1, size)
    return folded, None if mask is None else mask.repeat(1, 1, heads // kv_heads, 1)


def with_whole_rows(states: Tensor) -> Tensor:
    """States whose heads' numbers lie side by side in memory, as the fused kernels assume."""
    return states if states.stride(-1) == 1 else states.contiguous()


def additive_mask(mask: Tensor, query: Tensor) -> Tensor:
    """0 where seen, the dtype's minimum where not. Rows start at multiples of 8 elements, because
    the CUDA kernel requires it."""
    *rows, keys = mask.shape
    bias = torch.zeros(*rows, -(-keys // 8) * 8, dtype=query.dtype, device=query.device)
    return bias[..., :keys].masked_fill_(~mask, torch.finfo(query.dtype).min)


def without_masked_rows(output: Tensor, lse: Tensor, mask: Tensor | None) -> Partial:
    """Set fully masked rows to output 0 and -inf: fused kernels give an average there."""
    output, lse = output.float(), lse.float()
    if mask is not None:
        masked = ~mask.any(dim=-1).expand(lse.shape)
        output = output.masked_fill(masked.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(masked, -math.inf)
    return Partial(output, lse)


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint key sets (RelayAttention, equations 4-6), float32.

    Args:
        parts: one per key set, all of one shape; a log-sum-exp is -inf where a query sees none of
            the set's keys.
    """
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.clamp_min(LEAST_LSE)).exp().unsqueeze(-1)
    output = parts[0].output * weights[0]
    # One after the other, because a stack of all outputs would not fit the processor's cache.
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return Partial(output, lse)
