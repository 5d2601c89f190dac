"""Startup check that vLLM rotates keys by the layouts of the profile.

vLLM's attention layers have no reference to the module that rotates their keys. vLLM makes these
modules with ``get_rope``, once for each layout, and keeps them in ``_ROPE_DICT``. The check runs
them on random keys at two positions.

It detects a layout that vLLM lacks, such as a layout with another base or scaling. It does not
detect layers that use each other's layouts, because vLLM does not record which layer uses which.

The keys of latent attention are views of a wider tensor, with a dimension for their one head.
vLLM's kernel for CPUs, ``rotary_embedding`` in ``csrc/cpu/pos_encoding.cpp``, steps from token to
token by the stride of that dimension, and so rotates other elements. The check therefore passes
such keys as the layer passes them.
"""

from __future__ import annotations

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
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_OF_16_BITS = 3e-2
"""Above the rounding of keys, cosine and sine. Other frequencies or pairs have errors near 1."""


def check_rotations(profile: ModelProfile, layers: Iterable[int]) -> set[int]:
    """Check that vLLM has a rotary embedding for each of these layers of the profile.

    Returns:
        Latent layers whose keys transformers stores in halves, and vLLM in interleaved pairs.

    Raises:
        ServingError: No module rotates keys of a layer's size by the layer's layout.
    """
    checked: dict[tuple[int, int], bool] = {}
    interleaved = set()
    for index in layers:
        layer, layout = profile.layers[index], profile.layouts[index]
        if not layout.rotates:
            continue
        kind = layer.key_size, layer.rotary
        if kind not in checked:
            checked[kind] = _is_interleaved(profile, index)
        if checked[kind]:
            interleaved.add(index)
    return interleaved


def _is_interleaved(profile: ModelProfile, index: int) -> bool:
    """Whether vLLM interleaves the pairs of a latent layer's keys, unlike the profile."""
    layer, layout = profile.layers[index], profile.layouts[index]
    layouts = [layout]
    if layer.is_latent and layout.pairing == "half" and layout.rotary_dim == layer.key_size:
        layouts.append(replace(layout, pairing="interleaved"))
    if not _ROPE_DICT:
        raise ServingError(
            f"Layer {layer.index}: vLLM has no rotary embeddings of its own for {profile.name}, so "
            "the rotation of keys cannot be checked; its transformers backend is not "
            "supported: remove --model-impl, or use a model that vLLM implements"
        )
    ropes = [
        rope
        for rope in _ROPE_DICT.values()
        if getattr(rope, "head_size", layer.key_size) == layer.key_size
    ]
    others, flat_only = [], []
    for rope in ropes:
        try:
            errors = [_error(rope, one, layer, profile) for one in layouts]
        except (AttributeError, TypeError, StopIteration) as cause:  # another signature
            others.append(f"{_shown(rope)}, which cannot be run ({cause!r})")
            continue
        if min(errors) <= _tolerance(profile.torch_dtype):
            return errors.index(min(errors)) > 0
        if layer.is_latent and _rotates_flat_keys(rope, layouts, layer, profile):
            flat_only.append(_shown(rope))
        others.append(f"{_shown(rope)}, which differs by {errors[0]:.2g}")
    if flat_only:
        raise ServingError(
            f"Layer {layer.index}: {' and '.join(flat_only)} rotates other elements than the keys "
            "of latent attention (MLA), because vLLM's kernel for CPUs expects keys without a "
            "dimension for heads. Disable the kernel: add --compilation-config "
            """'{"custom_ops": ["-rotary_embedding"]}'"""
        )
    raise ServingError(
        f"Layer {layer.index}: vLLM rotates keys by {'; '.join(others) or 'no module'}, expected "
        f"{layout.pairing} pairs of {layout.rotary_dim} dimensions with frequencies from "
        f"{layout.frequencies.max():.4g} to {layout.frequencies.min():.4g} from the config "
        f"of {profile.name}; report the model"
    )


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, _TOLERANCE_OF_16_BITS)


def _rotates_flat_keys(
    rope: Any, layouts: Sequence[RotaryLayout], layer: LayerProfile, profile: ModelProfile
) -> bool:
    """Whether a latent layer's module rotates keys as the profile says if they are not views."""
    flat = replace(layer, is_latent=False)
    try:
        errors = [_error(rope, layout, flat, profile) for layout in layouts]
    except RuntimeError:  # a module that needs a dimension for heads
        return False
    return min(errors) <= _tolerance(profile.torch_dtype)


def _error(rope: Any, layout: RotaryLayout, layer: LayerProfile, profile: ModelProfile) -> float:
    """Largest difference between keys rotated by ``layout`` and keys rotated by vLLM."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(_TOKENS, layer.key_size, generator=generator).to(profile.torch_dtype)
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
    """Keys ``[tokens, head_size]`` of one head, all rotated for one position, on the CPU."""
    device = next(rope.buffers()).device
    positions = torch.full((len(keys),), position, dtype=torch.int64, device=device)
    # vLLM's kernels write to their arguments.
    copy = _as_latent if is_latent else _as_flat
    _, rotated = rope(positions, copy(keys, device), copy(keys, device))
    return torch.as_tensor(rotated).reshape(keys.shape).cpu()


def _as_flat(keys: Tensor, device: torch.device) -> Tensor:
    return keys.to(device, copy=True)


def _as_latent(keys: Tensor, device: torch.device) -> Tensor:
    """Copy of keys ``[tokens, 1, head_size]``, as views of the projection that contains them."""
    joined = torch.cat([torch.zeros_like(keys), keys], dim=-1).to(device)
    # In this order, which decides the stride of the dimension.
    return joined[:, keys.shape[-1] :].unsqueeze(1)


def _shown(rope: Any) -> str:
    neox = getattr(rope, "is_neox_style", True)  # Some classes support no other style.
    pairs = "half" if neox else "interleaved"
    dims, base = (getattr(rope, name, "unknown") for name in ("rotary_dim", "base"))
    return f"{type(rope).__name__} ({pairs} pairs of {dims}, base {base})"
