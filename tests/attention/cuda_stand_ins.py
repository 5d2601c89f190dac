"""CPU stand-ins for CUDA kernels, with the real signatures, checks and result layouts. Signatures
and checks match the native functions of PyTorch 2.13, and the functions of flash-attn 2.8.3,
FlashAttention 3 (August 2026) and flash-attn-4 4.0.0b36. The results are computed with PyTorch.
Options that the package does not use are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention in float32. Returns output in the query's dtype, and log-sum-exp."""
    scores = query.float() @ key.float().mT * scale
    if bias is not None:
        scores = scores + bias.float()
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def check_rows(*states: Tensor) -> None:
    """Check that rows are aligned to 16 bytes, the size of the kernels' memory accesses."""
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
    """Stand-in for ``aten::_scaled_dot_product_flash_attention``."""
    assert (dropout_p, return_debug_mask) == (0.0, False)
    output, lse = flash_attention(query, key, value, scale, is_causal)
    empty = query.new_empty(0)
    return output, lse, empty, empty, query.shape[2], key.shape[2], empty, empty, empty


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    is_causal: bool,
    window: tuple[int | None, int | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of any flash kernel. ``window``: visible keys to the left, right."""
    assert type(is_causal) is bool
    check_rows(query, key, value)
    assert query.dtype in HALF
    assert query.shape[-1] <= 256
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    # The last query is aligned with the last key.
    apart = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    apart = apart + query.shape[2] - key.shape[2]
    left, right = (torch.inf if one in (None, -1) else one for one in window)
    seen = (apart <= (0 if is_causal else right)) & (apart >= -left)
    bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return softmax_attention(query, key, value, scale, bias)


def flash_attn_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Stand-in for ``flash_attn.flash_attn_func``. States are ``[B, tokens, heads, D]``."""
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    query, key, value = (one.transpose(1, 2) for one in (q, k, v))
    output, lse = flash_attention(query, key, value, softmax_scale, causal, window_size)
    output = output.transpose(1, 2)
    return (output, lse, None) if return_attn_probs else output


def flash_attn_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Stand-in for ``flash_attn_interface.flash_attn_func``, for Hopper GPUs."""
    assert (qv, q_descale, k_descale, v_descale, attention_chunk) == (None, None, None, None, 0)
    assert num_splits >= 0
    found = flash_attn_2(
        *(q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, True)
    )
    return found[:2] if return_attn_probs else found[0]


def flash_attn_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **others: None,
) -> tuple[Tensor, Tensor | None]:
    """Stand-in for ``flash_attn.cute.flash_attn_func``, which always returns two values."""
    assert (qv, gather_kv_indices, learnable_sink, others) == (None, None, None, {})
    assert num_splits >= 0
    left, right = (-1 if one is None else one for one in window_size)
    found = flash_attn_2(
        *(q, k, v, 0.0, softmax_scale, causal, (left, right), softcap, None, deterministic, True)
    )
    return found[0], found[1] if return_lse else None


FLASH_PACKAGES: dict[str, tuple[str, Any]] = {
    "FlashAttention 2": ("flash_attn", flash_attn_2),
    "FlashAttention 3": ("flash_attn_interface", flash_attn_3),
    "FlashAttention 4": ("flash_attn.cute", flash_attn_4),
}
"""Module and function of each package."""


def install_flash(monkeypatch: pytest.MonkeyPatch, name: str, function: Any = None) -> None:
    """Make a package importable. ``function`` overrides its stand-in."""
    place, stand_in = FLASH_PACKAGES[name]
    module: Any = ModuleType(place)
    module.flash_attn_func = function or stand_in
    if place == "flash_attn.cute" and "flash_attn" not in sys.modules:  # without FlashAttention 2
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, place, module)


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
    """Stand-in for ``aten::_scaled_dot_product_efficient_attention``. Pads the lse to 32 rows."""
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
    """Let PyTorch's CUDA kernels accept CPU tensors, by using the stand-ins."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", memory_efficient, "CPU")
    yield
    library._destroy()
