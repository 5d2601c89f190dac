"""Attention kernels for CUDA, with their log-sum-exp. None of them has run on a GPU yet."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import (
    Kernel,
    Partial,
    additive_mask,
    with_whole_rows,
    without_masked_rows,
)


def kernel_on_cuda(query: Tensor, mask: Tensor | None) -> Kernel:
    """Flash kernels for 16-bit types without a mask, the flash-attn package's where that is
    installed, else PyTorch's; PyTorch's memory-efficient kernel for the rest."""
    if mask is not None or query.dtype not in (torch.float16, torch.bfloat16):
        return attend_memory_efficient
    if query.shape[-1] <= 256 and flash_attn() is not None:
        return attend_flash_attn
    return attend_flash


def attend_flash(query: Tensor, key: Tensor, value: Tensor, scale: float, _: object) -> Partial:
    """PyTorch's flash kernel, for 16-bit types without a mask."""
    query, key, value = map(with_whole_rows, (query, key, value))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, False, False, scale=scale
    )
    return Partial(output.float(), lse[..., : query.shape[2]].float())


def attend_memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> Partial:
    """PyTorch's memory-efficient kernel."""
    query, key, value = map(with_whole_rows, (query, key, value))
    bias = None
    if mask is not None:
        bias = additive_mask(mask, query)
        bias = bias.expand(*query.shape[:2], *bias.shape[2:])
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, scale=scale
    )
    return without_masked_rows(output, lse[..., : query.shape[2]], mask)


def attend_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, scale: float, _: Tensor | None = None
) -> Partial:
    """flash-attn's kernel for few queries over many keys, which splits the keys among the GPU's
    processors: PyTorch's leaves most of them idle. It takes ``[B, tokens, K, D]``."""
    states = (with_whole_rows(tensor).transpose(1, 2) for tensor in (query, key, value))
    output, lse = flash_attn()(*states, softmax_scale=scale, return_softmax_lse=True)
    return Partial(output.transpose(1, 2).float(), lse.float())


@cache
def flash_attn() -> Any:
    """flash-attn's kernel, if the package is there and fits this PyTorch; else None."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_with_kvcache
