"""CPU stand-ins of the kernels for CUDA: real signatures, checks and result layouts, torch maths.

Signatures and checks are those of PyTorch 2.13's native functions. Options that the package does
not use are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output in the query's dtype and log-sum-exp in float32, computed in float32."""
    scores = query.float() @ key.float().mT * scale
    if bias is not None:
        scores = scores + bias.float()
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def check_rows(*states: Tensor) -> None:
    """Kernels read 16 bytes at once, from the beginning of each row on."""
    first, *others = states
    for one in states:
        *steps, last = one.stride()
        assert last == 1
        assert not any(n * one.itemsize % 16 for n in (*steps, one.storage_offset()))
        assert one.shape[-1] * one.itemsize % 16 == 0
    for other in others:
        assert other.dtype == first.dtype
        assert other.device == first.device
        assert other.shape[0] == first.shape[0]
        assert other.shape[-1] == first.shape[-1]


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``."""
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert scale is not None
    check_rows(query, key, value)
    assert query.dtype in HALF
    assert query.shape[-1] <= 256
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    empty = query.new_empty(0)
    lengths = query.shape[2], key.shape[2]
    bias = None
    if is_causal:  # the last query sees the last key
        seen = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
        bias = torch.zeros(lengths).masked_fill(~seen, -torch.inf)
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    output, lse = softmax_attention(query, key, value, scale, bias)
    return output, lse, empty, empty, *lengths, empty, empty, empty


def memory_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten::_scaled_dot_product_efficient_attention``: pads the log-sum-exp to 32 rows."""
    assert (compute_log_sumexp, dropout_p, is_causal) == (True, 0.0, False)
    assert scale is not None
    check_rows(query, key, value)
    assert query.dtype in (*HALF, torch.float32)
    assert key.shape[:3] == value.shape[:3]
    assert key.shape[1] == query.shape[1]
    if attn_bias is not None:
        assert attn_bias.shape == (*query.shape[:3], key.shape[2])
        assert attn_bias.dtype == query.dtype
        *steps, last = attn_bias.stride()
        assert last == 1
        assert not any(step * attn_bias.itemsize % 16 for step in steps)
    output, lse = softmax_attention(query, key, value, scale, attn_bias)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan)
    padded[..., : lse.shape[2]] = lse
    empty = query.new_empty(0)
    return output.transpose(1, 2).contiguous().transpose(1, 2), padded, empty, empty


@contextmanager
def cuda_kernels_on_cpu() -> Iterator[None]:
    """PyTorch's kernels for CUDA take tensors of the CPU."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", memory_efficient, "CPU")
    yield
    library._destroy()
