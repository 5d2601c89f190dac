"""The file of a correction: a safetensors file with two tensors for each layer.

``weight.L`` ``[key-value heads, D, D]`` and ``bias.L`` ``[key-value heads, places, D]``, float32,
for layer L, or bfloat16 where that loses nothing. The metadata have ``format``, ``version``,
``sink`` and the model's ``fingerprint``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.files import replacing
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection

_FORMAT = {"format": "blockattn_rag.correction", "version": "1"}


def save_correction(correction: Correction, path: Path) -> None:
    """Write a correction, completely or not at all.

    Raises:
        ValueError: a number is not finite, or a shape is wrong.
        OSError: the file cannot be written.
    """
    tensors = {
        f"{name}.{index}": _compact(tensor.detach().float().cpu())
        for index, layer in enumerate(correction.layers)
        for name, tensor in layer._asdict().items()
    }
    _layers(path, tensors)
    metadata = {**_FORMAT, "sink": correction.sink, "fingerprint": correction.fingerprint}
    with replacing(path) as file:
        file.write(save(tensors, metadata))


def _compact(tensor: Tensor) -> Tensor:
    """The same numbers in bfloat16, where that loses nothing."""
    half = tensor.bfloat16()
    return (half if torch.equal(half.float(), tensor) else tensor).contiguous()


def read_correction(path: Path) -> Correction:
    """Read a correction.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no file of a correction: {error}") from error
    if found := {
        name: metadata.get(name) for name in _FORMAT if metadata.get(name) != _FORMAT[name]
    }:
        raise ValueError(f"{path} is no file of a correction: found {found}, expected {_FORMAT}.")
    if missing := {"sink", "fingerprint"} - metadata.keys():
        raise ValueError(f"{path} is damaged: its metadata lack {', '.join(sorted(missing))}.")
    return Correction(_layers(path, tensors), metadata["sink"], metadata["fingerprint"])


def _layers(path: Path, tensors: dict[str, Tensor]) -> tuple[LayerCorrection, ...]:
    """The layers; raises ``ValueError`` unless names, shapes and numbers are a correction's."""
    layers = []
    for index in range(len(tensors) // 2):
        try:
            layer = LayerCorrection(tensors[f"weight.{index}"], tensors[f"bias.{index}"])
        except KeyError as error:
            raise ValueError(f"{path}: found no tensor {error.args[0]}") from error
        shapes = tuple(layer.weight.shape), tuple(layer.bias.shape)
        heads, _, size = shapes[1] if len(shapes[1]) == 3 else (0, 0, 0)
        if shapes != ((heads, size, size), (heads, NUM_PLACES, size)):
            raise ValueError(
                f"{path}: found shapes {shapes[0]} and {shapes[1]} in layer {index}, expected "
                f"(heads, size, size) and (heads, {NUM_PLACES}, size)"
            )
        for name, tensor in layer._asdict().items():
            if not tensor.is_floating_point():
                raise ValueError(
                    f"{path}: found {tensor.dtype} in {name}.{index}, expected floating point"
                )
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{path}: found NaN or infinity in {name}.{index}, expected finite numbers"
                )
        layers.append(LayerCorrection(*(tensor.float() for tensor in layer)))
    if len(tensors) != 2 * len(layers) or not layers:
        raise ValueError(f"{path}: found {len(tensors)} tensors, expected two for each layer")
    return tuple(layers)
