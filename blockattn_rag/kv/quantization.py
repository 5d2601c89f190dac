"""Keys and values in 8 bits: whole numbers from -127 to 127, and the scales that turn them back.

Symmetric, ``x ~ q * scale``. Keys have a scale for each channel of a block, because a few channels
of keys are far larger than the others; values have one for each token (KIVI, arXiv 2402.02750). A
block never changes, so its scales are exact: the largest magnitude is 127 steps, and no number is
off by more than half a step.

Shapes: ``K`` key-value heads, ``n`` tokens, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

KVDtype = Literal["model", "int8"]
"""``model``: keys and values as the model computes them. ``int8``: quantised when computed."""

STEPS = 127
"""Steps from 0 to the largest magnitude; -128 is not used, so that the range is symmetric."""

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Zeros and what is near them get this scale: below it, float32 loses digits."""

_KEY_DIM, _VALUE_DIM = 1, 2  # over which the largest magnitude is taken: tokens, channels


def check_kv_dtype(name: object) -> KVDtype:
    """The name as it stands.

    Raises:
        ValueError: it is none of ``KVDtype``.
    """
    for known in get_args(KVDtype):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f"kv_dtype must be one of {get_args(KVDtype)}, found {name!r:.80}")


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """What turns a block's int8 keys and values back into numbers.

    Args:
        keys: per layer ``[K, 1, D]``, float32.
        values: per layer ``[K, n, 1]``, float32.
        dtype: the floating-point type of the keys and values that were quantised, in which
            dequantised ones are given.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    dtype: torch.dtype


def quantise(
    keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], KVScales]:
    """A block's keys and values in int8, and their scales.

    NaN and infinity make the scales that they belong to NaN or infinite, so that whoever refuses
    such blocks still sees them.

    Args:
        keys: per layer ``[K, n, D]``, of one floating-point type.
        values: as ``keys``, but for the head size.

    Raises:
        ValueError: several number types, or one that is not floating-point.
    """
    kinds = {states.dtype for states in (*keys, *values)}
    if len(kinds) != 1 or not all(kind.is_floating_point for kind in kinds):
        raise ValueError(
            f"expected keys and values of one floating-point type to quantise, found "
            f"{sorted(map(str, kinds))}"
        )
    key_codes, key_scales = zip(*(_quantised(k, _KEY_DIM) for k in keys), strict=True)
    value_codes, value_scales = zip(*(_quantised(v, _VALUE_DIM) for v in values), strict=True)
    return key_codes, value_codes, KVScales(key_scales, value_scales, kinds.pop())


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes * scale``, computed in float32 and rounded once, to ``dtype``."""
    return codes.float().mul_(scale).to(dtype)


def _quantised(states: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """int8 of the same shape, and scales whose size is 1 along ``dim``."""
    exact = states.float()
    scale = (exact.abs().amax(dim, keepdim=True) / STEPS).clamp_min_(LEAST_SCALE)
    return (exact / scale).round_().to(torch.int8), scale
