"""Digests of weights: of tensors of every kind, and of all that a model's state holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn


def weights_digest(hf_model: nn.Module) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes of all parameters, buffers and packed weights.

    Content, not name: a fine-tuned copy under the same name differs, a renamed copy does not. Not
    a cryptographic hash: it guards against mistakes at memory speed, not against an attacker, who
    could replace the model itself.
    """
    digest = xxhash.xxh3_128()
    seen: dict[tuple[Any, ...], str] = {}  # tied weights are read once
    for name, value in sorted(_state(hf_model).items()):
        digest.update(json.dumps([name, _digest(value, seen)]).encode())
    return digest.hexdigest()


def _state(hf_model: nn.Module) -> dict[str, Any]:
    """What the model would save, and the buffers that it would not (frequencies of RoPE)."""
    state = {**hf_model.state_dict(), **dict(hf_model.named_buffers())}
    return state | dict(_offloaded(hf_model))


def _offloaded(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that accelerate keeps elsewhere and brings for each forward (offloading)."""
    for name, module in hf_model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):  # several in a row
            kept = getattr(one, "weights_map", None)
            if kept is not None:
                tensors = [*module.named_parameters(recurse=False)]
                tensors += module.named_buffers(recurse=False)
                absent = [own for own, tensor in tensors if tensor.is_meta]
                yield from ((f"{name}.{own}" if name else own, kept[own]) for own in absent)


def _digest(value: Any, seen: dict[tuple[Any, ...], str]) -> Any:
    """A tensor by its content; other entries of a state (packed weights, extra state) by parts."""
    if isinstance(value, Tensor):
        # With the device: two GPUs may use one address for different weights.
        plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not plain or value.is_quantized or not value.numel():
            return tensor_digest(value)
        place = (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if place not in seen:
            seen[place] = tensor_digest(value)
        return seen[place]
    if isinstance(value, dict):
        return [[str(key), _digest(value[key], seen)] for key in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [_digest(item, seen) for item in value]
    if isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype)):
        return repr(value)
    return type(value).__qualname__  # its address would differ in each process


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-128 over the dtype, shape and content of a tensor, wherever it lies."""
    digest = xxhash.xxh3_128(f"{tensor.dtype}:{tuple(tensor.shape)}".encode())
    for part in _parts(tensor.detach()):
        data = part.to("cpu").contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one of another kind is made of."""
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)
            return [tensor.int_repr(), scale]
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [tensor.int_repr(), scales, zeros]
    if tensor.layout != torch.strided:
        return [tensor.to_dense()]
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # a subclass, as quantising libraries make them
        return [part for name in names for part in _parts(getattr(tensor, name))]
    return [tensor]
