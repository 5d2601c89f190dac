"""Validation of keys, of blocks, and of the tensors in a header."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from blockattn_rag.errors import FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import STEPS, KVScales

Outline = tuple[tuple[int, int, torch.dtype], ...]
"""``BlockKV.token_outline``: head count, head size and dtype per layer, keys before values."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I8": torch.int8,  # Only quantized keys and values have this dtype.
    "I64": torch.int64,  # Only token ids have this dtype.
}
"""Supported dtypes, by their safetensors names."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_LAYERS = 4096

_KEY = re.compile(r"[0-9a-f]{64}")


def is_key(key: object) -> TypeGuard[str]:
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    if not is_key(key):
        raise ValueError(f"Expected a store key of 64 lowercase hex digits (kv.key), found {key!r}")
    return key


def check_entry(key: str, kv: BlockKV) -> None:
    """Raise ValueError if ``kv`` does not belong under ``key``, or is malformed."""
    if key != kv.key:
        raise ValueError(f"Found key {key!r}, expected {kv.key!r}: store a block under kv.key")
    for text in (kv.fingerprint, kv.digest, kv.handle, kv.namespace):
        check_text(text)
    check_states(kv.token_ids, kv.keys, kv.values, quantized=kv.scales is not None)
    if kv.scales is not None:
        _check_scales(kv, kv.scales)


def check_block(kv: BlockKV, key: str, token_ids: Sequence[int], outline: Outline) -> None:
    if kv.key != key:
        raise FingerprintMismatchError(
            f"The entry {key} contains another block (digest {kv.digest[:12]}, fingerprint "
            f"{kv.fingerprint[:12]})"
        )
    if kv.token_ids.tolist() != [*token_ids]:
        raise FingerprintMismatchError(
            f"The entry {key} contains the keys and values of other tokens"
        )
    if kv.token_outline != outline:
        raise FingerprintMismatchError(
            f"The keys and values of the entry {key} do not have this model's shape or dtype; "
            "a rank's disk or cache tier must not be shared with other ranks"
        )


def is_finite(kv: BlockKV) -> bool:
    """Whether all keys and values are finite. One NaN or infinity can corrupt the entire answer."""
    if kv.scales is None:
        return all(all_finite(states) for states in (*kv.keys, *kv.values))
    # Check the largest magnitude that a scale can produce, in the dequantized dtype.
    scales = (*kv.scales.keys, *kv.scales.values)
    return all(all_finite((scale * STEPS).to(kv.scales.dtype)) for scale in scales)


def check_finite(kv: BlockKV, place: object) -> None:
    if not is_finite(kv):
        dtype = str((kv.scales or kv.keys[0]).dtype).removeprefix("torch.")
        raise StoreError(
            f"Cannot write {place}: keys or values of the block contain NaN or infinity. The model "
            f"may overflow {dtype}; load it with dtype='float32' or 'bfloat16'"
        )


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor, and its byte range within the entry."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Shaped = Tensor | TensorSpec


def check_states(
    ids: _Shaped, keys: Sequence[_Shaped], values: Sequence[_Shaped], *, quantized: bool = False
) -> None:
    if not keys or len(keys) != len(values) or len(keys) > MOST_LAYERS:
        raise ValueError(
            f"A BlockKV needs the same number of key and value layers, 1 to {MOST_LAYERS}; "
            f"found {len(keys)} and {len(values)}"
        )
    if len(ids.shape) != 1 or ids.dtype != torch.int64 or not ids.shape[0]:
        raise ValueError(
            f"token_ids must be int64 [num_tokens], num_tokens >= 1; "
            f"found {ids.dtype} {list(ids.shape)}"
        )
    for layer in (*keys, *values):
        if len(layer.shape) != 3 or layer.shape[1] != ids.shape[0] or 0 in layer.shape:
            raise ValueError(
                f"Keys and values must be [num_kv_heads, {ids.shape[0]} tokens, head_dim] and not "
                f"empty; found {list(layer.shape)}"
            )
        if quantized and layer.dtype != torch.int8:
            raise ValueError(f"Quantized keys and values must be int8; found {layer.dtype}")
        if not quantized and not (layer.dtype.is_floating_point and layer.dtype in DTYPE_NAMES):
            raise ValueError(
                f"Keys and values must have a floating-point dtype that safetensors supports; "
                f"found {layer.dtype}"
            )
    for index, (k, v) in enumerate(zip(keys, values, strict=True)):
        if k.shape[0] != v.shape[0]:
            raise ValueError(
                f"Keys and values of a layer must have the same number of heads; "
                f"found {k.shape[0]} and {v.shape[0]} in layer {index}"
            )


def _check_scales(kv: BlockKV, scales: KVScales) -> None:
    if not scales.dtype.is_floating_point or scales.dtype not in DTYPE_NAMES:
        raise ValueError(f"Cannot dequantize to {scales.dtype}: expected a floating-point dtype")
    actual = [(t.dtype, tuple(t.shape)) for t in (*scales.keys, *scales.values)]
    shapes = [(k.shape[0], 1, k.shape[2]) for k in kv.keys]
    shapes += [(v.shape[0], v.shape[1], 1) for v in kv.values]
    expected = [(torch.float32, shape) for shape in shapes]
    if actual != expected:
        raise ValueError(
            "A quantized block needs float32 scales in each layer: [num_kv_heads, 1, head_dim] for "
            f"keys and [num_kv_heads, num_tokens, 1] for values; found {actual}, expected "
            f"{expected}"
        )


def check_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(
            f"fingerprint, digest, handle and namespace must be strings, found {value!r:.80}"
        )
    value.encode()  # A lone surrogate raises UnicodeEncodeError, a ValueError.
    return value


def all_finite(states: Tensor) -> bool:
    """Whether all elements are finite. Takes a single pass, and copies only 8-bit tensors."""
    # `aminmax` does not support 8-bit floating-point dtypes.
    wide = states.float() if states.element_size() == 1 else states
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(wide))
