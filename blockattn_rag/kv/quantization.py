"""Quantization of keys and values to int8.

Quantization is symmetric: ``x ~ q * scale`` with ``q`` from -127 to 127. Keys have one scale per
channel of a block, because a few key channels are far larger than the others. Values have one scale
per token (KIVI, arXiv 2402.02750). Blocks are immutable, so the scales fit exactly: the largest
magnitude maps to 127, and errors never exceed half a step.

Shapes: ``K`` key-value heads, ``n`` tokens, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

KVDtype = Literal["model", "int8"]
"""``model``: keys and values keep the model's dtype. ``int8``: new blocks are quantized."""

STEPS = 127
"""Number of steps from 0 to the largest magnitude. -128 is unused to keep the range symmetric."""

_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Minimum scale, used for zeros and tiny numbers. Below it, float32 loses precision."""


def check_kv_dtype(name: object) -> KVDtype:
    """Return ``name`` if it is a ``KVDtype``; otherwise raise ``ValueError``."""
    if name not in get_args(KVDtype):
        raise ValueError(f"Expected one of {get_args(KVDtype)} as kv_dtype, found {name!r:.80}")
    return cast("KVDtype", name)


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Scales of a block's int8 keys and values.

    Args:
        keys: Scales of the keys per layer, ``[K, 1, D]``, float32.
        values: Scales of the values per layer, ``[K, n, 1]``, float32.
        dtype: Dtype of the keys and values before quantization, and after dequantization.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    dtype: torch.dtype


def quantize(
    keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], KVScales]:
    """Quantize keys ``[K, n, D]`` and values per layer. Returns int8 keys, int8 values and scales.

    NaN and infinity propagate to the scales, where a later check for finite numbers detects them.

    Raises:
        ValueError: The dtypes differ, or are not floating-point.
    """
    kinds = {states.dtype for states in (*keys, *values)}
    if len(kinds) != 1 or not all(kind.is_floating_point for kind in kinds):
        raise ValueError(
            f"Cannot quantize {sorted(map(str, kinds))}: expected keys and values of one "
            "floating-point type"
        )
    key_codes, key_scales = zip(*(_quantized(k, dim=1) for k in keys), strict=True)
    value_codes, value_scales = zip(*(_quantized(v, dim=2) for v in values), strict=True)
    return key_codes, value_codes, KVScales(key_scales, value_scales, kinds.pop())


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``codes * scale`` in float32, and round the result once to ``dtype``."""
    return codes.float().mul_(scale).to(dtype)


def _quantized(states: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Quantize to int8 with one scale for all numbers along ``dim``. Returns codes and scales."""
    exact = states.float()
    scale = (exact.abs().amax(dim, keepdim=True) / STEPS).clamp_min_(_LEAST_SCALE)
    return (exact / scale).round_().to(torch.int8), scale
