"""Attention with its log-sum-exp, and the merge of attention over parts of the keys.

Attention over disjoint sets of keys, each with its log-sum-exp, merges exactly into attention over
all of them (RelayAttention, section 3.3 and appendix A).

Shapes: ``B`` requests, ``K`` key-value heads, ``Q`` query rows, ``N`` key tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


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
    if not key.shape[2]:
        return attend_plain(query, key, value, scale, mask)  # the kernel divides by zero
    if _matmul_is_faster(query, key, mask):
        return attend_matmul(query, key, value, scale)
    query, key, value = map(_with_whole_rows, (query, key, value))
    bias = _additive(mask, query) if mask is not None else None
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return _without_blind_rows(output, lse, mask)


def _matmul_is_faster(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """For a question's rows over a long block, where the fused kernel works on 32 rows at a time:
    up to twice as fast in float32. Not for more scores than 64 MiB hold."""
    requests, heads, rows, _ = query.shape
    keys = key.shape[2]
    fits = 16 <= rows < 192 and keys >= 512 and requests * heads * rows * keys <= 1 << 24
    return fits and mask is None and query.dtype == key.dtype == torch.float32


def attend_matmul(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Two matrix products and a softmax in place, for query and keys in float32."""
    scores = (query * scale) @ key.transpose(-1, -2)
    highest = scores.amax(dim=-1, keepdim=True)
    weights = _weights(scores, highest)
    total = weights.sum(dim=-1, keepdim=True)
    return Partial((weights @ value).div_(total), total.log_().add_(highest).squeeze(-1))


def attend_jointly(
    queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> Tensor:
    """Attention of a few rows over several sets of keys, by one softmax over all scores.

    In place of a partial result for each set and their merge, for the token of an answer: scores
    are few then, and a call of the fused kernel takes longer than the work in it.

    Args:
        queries: ``[K, Q, D]`` for each set: the same rows, turned as the set sees them; float32.
        keys, values: ``[K, N, D]`` for each set.
        scale: factor of the scores, natural exponent.

    Returns:
        ``[K, Q, D]``.
    """
    scores = [
        torch.bmm(query, key.transpose(1, 2)) for query, key in zip(queries, keys, strict=True)
    ]
    weights = torch.cat(scores, dim=-1).mul_(scale).softmax(dim=-1)
    first, *others = torch.split(weights, [key.shape[1] for key in keys], dim=-1)
    output = torch.bmm(first, values[0])
    for weight, value in zip(others, values[1:], strict=True):
        output.baddbmm_(weight, value)
    return output


def attend_onward(
    part: Partial, queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> Tensor:
    """Attention over several sets of keys and over a part that was attended to before.

    Set by set, as flash attention does: weights are relative to the highest score so far, and what
    is summed up already is rescaled when a higher one comes. So nothing is merged, and one buffer
    serves all scores: for a question's rows on the CPU faster than a partial result for each set.

    Args:
        part: ``[K, Q, D]`` and ``[K, Q]``.
        queries: ``[sets, K, Q, D]``: the same rows, turned as each set sees them and multiplied by
            the factor of the scores; float32.
        keys, values: ``[K, N, D]`` for each set, at least one set.

    Returns:
        ``[K, Q, D]``.
    """
    _, heads, rows, _ = queries.shape
    room = queries.new_empty(heads * rows * max(key.shape[1] for key in keys))
    highest, output = part.lse.unsqueeze(-1), part.output
    total = torch.ones_like(highest)
    for query, key, value in zip(queries, keys, values, strict=True):
        scores = room[: heads * rows * key.shape[1]].view(heads, rows, -1)
        torch.bmm(query, key.transpose(1, 2), out=scores)
        before, highest = highest, highest.maximum(scores.amax(dim=-1, keepdim=True))
        rescale = (before - highest).exp_()
        weights = _weights(scores, highest)
        total = weights.sum(dim=-1, keepdim=True).addcmul_(total, rescale)
        output = torch.baddbmm(output * rescale, weights, value)
    return output.div_(total)


def _weights(scores: Tensor, highest: Tensor) -> Tensor:
    """``exp(scores - highest)``, in place. Weights under e-60 count as e-60, far below rounding:
    with results that are denormal numbers, the processor takes up to a hundred times as long."""
    return scores.sub_(highest).clamp_(min=-60.0).exp_()


def attend_cuda(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> Partial:
    """Flash kernels for 16-bit types without a mask, the flash-attn package's where that is
    installed, else PyTorch's; PyTorch's memory-efficient kernel for the rest."""
    query, key, value = map(_with_whole_rows, (query, key, value))
    if mask is None and query.dtype in (torch.float16, torch.bfloat16):
        if query.shape[-1] <= 256 and (kernel := _flash_attn()) is not None:
            return attend_flash(query, key, value, scale, kernel)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, False, False, scale=scale
        )
        return Partial(output.float(), lse[..., : query.shape[2]].float())
    bias = _additive(mask, query) if mask is not None else None
    if bias is not None:
        bias = bias.expand(*query.shape[:2], *bias.shape[2:])
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, scale=scale
    )
    return _without_blind_rows(output, lse[..., : query.shape[2]], mask)


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Callable[..., Any]
) -> Partial:
    """flash-attn's kernel for few queries over many keys, which it splits among the GPU's
    processors: PyTorch's leaves most of them idle. It wants ``[B, tokens, K, D]``."""
    states = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output, lse = kernel(*states, softmax_scale=scale, return_softmax_lse=True)
    return Partial(output.transpose(1, 2).float(), lse.float())


@cache
def _flash_attn() -> Callable[..., Any] | None:
    """The kernel, if the package is there and fits this PyTorch."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    kernel: Callable[..., Any] = flash_attn_with_kvcache
    return kernel


def _with_whole_rows(states: Tensor) -> Tensor:
    """The kernels take it for granted that a head's numbers lie side by side in memory."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """0 where seen, the dtype's minimum where not. Rows start at multiples of 8 elements, as the
    CUDA kernel wants them."""
    *rows, keys = mask.shape
    bias = torch.zeros(*rows, -(-keys // 8) * 8, dtype=query.dtype, device=query.device)
    bias = bias[..., :keys]
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


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of disjoint key sets (RelayAttention, equations 4-6), float32.

    Args:
        parts: one per key set, all of one shape; a log-sum-exp is -inf where a query sees none of
            the set's keys.
    """
    lses = torch.stack([part.lse for part in parts])
    lse = lses.logsumexp(dim=0)
    weights = (lses - _finite(lse)).exp().unsqueeze(-1)
    output = parts[0].output * weights[0]
    # One after the other: outputs come from the kernel's cache, and a stack of them would not fit.
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return Partial(output, lse)
