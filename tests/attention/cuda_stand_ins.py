"""CPU stand-ins of the kernels for CUDA: real signatures, checks and result layouts, torch maths.

Signatures and checks are those of flash-attn 2.8 and of PyTorch 2.13's native functions. Options
that the package does not use are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention.kernels import flash_attn

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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """flash-attn's: states ``[B, tokens, heads, D]``, log-sum-exp ``[B, heads, tokens]``."""
    unused = (k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
    assert all(one is None for one in (*unused, block_table, alibi_slopes))
    assert (causal, window_size, softcap, num_splits) == (False, (-1, -1), 0.0, 0)
    assert softmax_scale is not None
    assert return_softmax_lse
    check_rows(q, k_cache, v_cache)
    assert q.dtype in HALF
    assert q.shape[-1] <= 256
    assert k_cache.shape == v_cache.shape
    assert q.shape[2] % k_cache.shape[2] == 0
    groups = q.shape[2] // k_cache.shape[2]
    key, value = (one.transpose(1, 2).repeat_interleave(groups, 1) for one in (k_cache, v_cache))
    output, lse = softmax_attention(q.transpose(1, 2), key, value, softmax_scale)
    return output.transpose(1, 2).contiguous(), lse


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
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    assert scale is not None
    check_rows(query, key, value)
    assert query.dtype in HALF
    assert query.shape[-1] <= 256
    assert key.shape == value.shape
    assert key.shape[1] == query.shape[1]
    empty = query.new_empty(0)
    lengths = query.shape[2], key.shape[2]
    output, lse = softmax_attention(query, key, value, scale)
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
def flash_attn_installed(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> Iterator[None]:
    """The package flash-attn is a stand-in, or is missing."""
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module if is_there else None)
    flash_attn.cache_clear()
    yield
    flash_attn.cache_clear()


@contextmanager
def cuda_kernels_on_cpu() -> Iterator[None]:
    """PyTorch's kernels for CUDA take tensors of the CPU."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", memory_efficient, "CPU")
    yield
    library._destroy()
