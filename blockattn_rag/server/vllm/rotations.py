"""Checks at start that vLLM rotates keys as the profile says.

vLLM's attention layers do not know the module that rotates their keys, and a connector is not given
the model. vLLM makes these modules with ``get_rope``, once for each layout, and keeps them in
``_ROPE_DICT``. So they are run here, on random keys at two positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from blockattn_rag.errors import ServingError
from blockattn_rag.kv.rope import RotaryLayout, relative_error, shift_positions
from blockattn_rag.server.profile import ModelProfile

_OFFSETS = (13, 1009)
_TOKENS = 4
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_OF_16_BITS = 3e-2
"""Above the rounding of keys, cosine and sine. Other frequencies or pairs have errors near 1."""


def check_rotations(profile: ModelProfile, layers: Iterable[int]) -> None:
    """Check that vLLM has a rotary embedding for each of these layers.

    Raises:
        ServingError: No module rotates keys of a layer's size by the layer's layout.
    """
    checked: set[tuple[int, int]] = set()
    for index in layers:
        layer, layout = profile.layers[index], profile.layouts[index]
        if not layout.rotates or (layer.key_size, layer.rotary) in checked:
            continue
        checked.add((layer.key_size, layer.rotary))
        ropes = [rope for rope in _ROPE_DICT.values() if rope.head_size == layer.key_size]
        errors = {_shown(rope): _error(rope, layout, profile) for rope in ropes}
        if not errors or min(errors.values()) > _tolerance(profile.torch_dtype):
            found = [f"{name}, which differs by {error:.2g}" for name, error in errors.items()]
            raise ServingError(
                f"Layer {index}: vLLM rotates keys by {'; '.join(found) or 'no module'}, expected "
                f"{layout.pairing} pairs of {layout.rotary_dim} dimensions with frequencies from "
                f"{layout.frequencies.max():.4g} to {layout.frequencies.min():.4g} from the config "
                f"of {profile.name}; report the model"
            )


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, _TOLERANCE_OF_16_BITS)


def _error(rope: Any, layout: RotaryLayout, profile: ModelProfile) -> float:
    """Largest error of keys that ``layout`` moves, compared with those that vLLM rotates."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(_TOKENS, rope.head_size, generator=generator).to(profile.torch_dtype)
    limit = profile.max_positions - 1
    at_zero = _rotated(rope, keys, 0).float()
    return max(
        relative_error(
            shift_positions(at_zero[None], offset, layout)[0], _rotated(rope, keys, offset).float()
        )
        for offset in {min(offset, limit) for offset in _OFFSETS}
    )


@torch.inference_mode()
def _rotated(rope: Any, keys: Tensor, position: int) -> Tensor:
    """Keys ``[tokens, head_size]`` of one head, all rotated for one position, on the CPU."""
    device = rope.cos_sin_cache.device
    positions = torch.full((len(keys),), position, dtype=torch.int64, device=device)
    # vLLM's kernels write to their arguments.
    queries, own = keys.to(device, copy=True), keys.to(device, copy=True)
    _, rotated = rope(positions, queries, own)
    return torch.as_tensor(rotated).view(keys.shape).cpu()


def _shown(rope: Any) -> str:
    pairs = "half" if rope.is_neox_style else "interleaved"
    return f"{type(rope).__name__} ({pairs} pairs of {rope.rotary_dim}, base {rope.base})"
