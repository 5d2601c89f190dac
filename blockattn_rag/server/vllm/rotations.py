"""Startup check that vLLM rotates keys with the profile's layouts.

vLLM's attention layers have no reference to the module that rotates their keys. vLLM stores these
modules, one per layout, in ``_ROPE_DICT``. The check runs them on random keys at two positions. It
cannot detect swapped layouts, because vLLM does not record which layer uses which.

The keys of latent attention are views of a wider tensor, with a dimension for their single head.
vLLM's CPU kernel, ``rotary_embedding`` in ``csrc/cpu/pos_encoding.cpp``, uses the stride of that
dimension to step between tokens, and so rotates the wrong elements. The check therefore passes
these keys in the same layout as the layer does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

from blockattn_rag.errors import ServingError
from blockattn_rag.kv.rope import RotaryLayout, relative_error, shift_positions
from blockattn_rag.server.profile import LayerProfile, ModelProfile

_OFFSETS = (13, 1009)
_TOKENS = 4
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 3e-2
"""Exceeds rounding errors of keys, cosine and sine. Wrong frequencies cause errors near 1."""


def check_rotations(profile: ModelProfile, layers: Iterable[int]) -> set[int]:
    """Check that vLLM has a matching rotary embedding for each of the profile's ``layers``.

    Returns:
        Latent layers whose keys use the half-split (NeoX-style) layout in transformers and the
        interleaved (GPT-J-style) layout in vLLM.
    """
    checked: dict[tuple[int, RotaryLayout], bool] = {}
    interleaved = set()
    for index in layers:
        layer = profile.layers[index]
        kind = layer.key_size, layer.layout
        if kind not in checked:
            checked[kind] = layer.layout.rotates and _is_interleaved(layer, profile)
        if checked[kind]:
            interleaved.add(index)
    return interleaved


def _is_interleaved(layer: LayerProfile, profile: ModelProfile) -> bool:
    """Whether vLLM, unlike the profile, interleaves the pairs of a latent layer's keys."""
    layout = layer.layout
    layouts = [layout]
    if layer.is_latent and layout.pairing == "half" and layout.rotary_dim == layer.key_size:
        layouts.append(replace(layout, pairing="interleaved"))
    if not _ROPE_DICT:
        raise ServingError(
            f"Layer {layer.index}: vLLM has no rotary embeddings of its own for {profile.name}, so "
            "the rotation of keys cannot be checked; its transformers backend is not supported: "
            "remove --model-impl, or use a model that vLLM implements natively"
        )
    ropes = [
        rope
        for rope in _ROPE_DICT.values()
        if getattr(rope, "head_size", layer.key_size) == layer.key_size
    ]
    tolerance = _TOLERANCE if profile.dtype.itemsize > 2 else _TOLERANCE_OF_16_BITS
    others, flat_only = [], []
    for rope in ropes:
        try:
            errors = [_error(rope, one, layer, profile) for one in layouts]
        except (AttributeError, TypeError, StopIteration) as cause:  # The signature differs.
            others.append(f"{_shown(rope)}, which cannot be run ({cause!r})")
            continue
        if min(errors) <= tolerance:
            return errors.index(min(errors)) > 0
        if layer.is_latent and _error_of_flat_keys(rope, layouts, layer, profile) <= tolerance:
            flat_only.append(_shown(rope))
        others.append(f"{_shown(rope)}, which differs by {errors[0]:.2g}")
    if flat_only:
        raise ServingError(
            f"Layer {layer.index}: {' and '.join(flat_only)} rotates the wrong elements of the "
            "keys of latent attention (MLA), because vLLM's CPU kernel expects keys without a head "
            "dimension. Disable the kernel: add --compilation-config "
            """'{"custom_ops": ["-rotary_embedding"]}'"""
        )
    raise ServingError(
        f"Layer {layer.index}: vLLM rotates keys by {'; '.join(others) or 'no module'}, expected "
        f"{layout.pairing} pairs of {layout.rotary_dim} dimensions with frequencies from "
        f"{layout.frequencies.max():.4g} to {layout.frequencies.min():.4g} from the config of "
        f"{profile.name}; report this model"
    )


def _error_of_flat_keys(
    rope: Any, layouts: Sequence[RotaryLayout], layer: LayerProfile, profile: ModelProfile
) -> float:
    """Return the error of a latent layer's module if keys are not views."""
    flat = replace(layer, is_latent=False)
    try:
        return min(_error(rope, layout, flat, profile) for layout in layouts)
    except RuntimeError:  # The module requires a head dimension.
        return math.inf


def _error(rope: Any, layout: RotaryLayout, layer: LayerProfile, profile: ModelProfile) -> float:
    """Return the largest difference between keys rotated by ``layout`` and by vLLM."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(_TOKENS, layer.key_size, generator=generator).to(profile.dtype)
    limit = profile.max_positions - 1
    offsets = {min(offset, limit) for offset in _OFFSETS}
    at_zero, *rotated = [
        _rotated(rope, keys, offset, is_latent=layer.is_latent).float() for offset in (0, *offsets)
    ]
    return max(
        relative_error(shift_positions(at_zero[None], offset, layout)[0], keys)
        for offset, keys in zip(offsets, rotated, strict=True)
    )


@torch.inference_mode()
def _rotated(rope: Any, keys: Tensor, position: int, *, is_latent: bool) -> Tensor:
    """Rotate keys ``[tokens, head_size]`` of one head, all to the same position, on the CPU."""
    device = next(rope.buffers()).device
    positions = torch.full((len(keys),), position, dtype=torch.int64, device=device)
    # Copy, because vLLM's kernels modify their arguments.
    query, copy = (keys.to(device, copy=True) for _ in range(2))
    if is_latent:  # ``[tokens, 1, head_size]``, as views of the wider projection.
        # The order of these calls determines the stride of the head dimension.
        query, copy = (
            torch.cat([torch.zeros_like(one), one], dim=-1)[:, one.shape[-1] :].unsqueeze(1)
            for one in (query, copy)
        )
    _, rotated = rope(positions, query, copy)
    return torch.as_tensor(rotated).reshape(keys.shape).cpu()


def _shown(rope: Any) -> str:
    neox = getattr(rope, "is_neox_style", True)  # Some classes support only this style.
    pairs = "half" if neox else "interleaved"
    dims, base = (getattr(rope, name, "unknown") for name in ("rotary_dim", "base"))
    return f"{type(rope).__name__} ({pairs} pairs of {dims}, base {base})"
