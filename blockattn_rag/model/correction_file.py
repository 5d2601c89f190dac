"""The file of a correction: a safetensors file with two tensors for each layer.

``weight.L`` ``[key-value heads, D, D]`` and ``bias.L`` ``[key-value heads, places, D]``, float32,
for layer L; the metadata have ``format``, ``version``, ``sha256``, ``sink`` and the model's
``fingerprint``. Version 1 had no ``sha256``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from torch import Tensor

from blockattn_rag.files.state import FileState
from blockattn_rag.files.tensor_file import TensorFormat
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection

_FORMAT = TensorFormat(
    "blockattn_rag.correction", "2", "a correction", "blockattn-rag adapt --fit correction"
)


def save_correction(correction: Correction, path: Path) -> None:
    """Write a correction, whole or not at all.

    Raises:
        ValueError: another suffix than ``.safetensors``, or a number that is not finite.
        OSError: the file cannot be written.
    """
    tensors = {
        f"{name}.{index}": tensor.detach().float().cpu()
        for index, layer in enumerate(correction.layers)
        for name, tensor in layer._asdict().items()
    }
    _layers(path, tensors)
    _FORMAT.save(path, tensors, sink=correction.sink, fingerprint=correction.fingerprint)


def load_correction(path: str | Path) -> Correction:
    """Read a correction, once while the file stays as it is.

    Raises:
        ValueError: no such file, or it is no file of a correction.
    """
    return _read(*_FORMAT.find(path))


@lru_cache(maxsize=4)
def _read(path: Path, _state: FileState) -> Correction:
    """The file at ``path``; its state is part of the cache's key."""
    tensors, metadata = _FORMAT.read(path)
    if missing := {"sink", "fingerprint"} - metadata.keys():
        raise ValueError(f"{path} is damaged: it does not tell {', '.join(sorted(missing))}")
    return Correction(_layers(path, tensors), metadata["sink"], metadata["fingerprint"])


def _layers(path: Path, tensors: dict[str, Tensor]) -> tuple[LayerCorrection, ...]:
    """The layers; raises ``ValueError`` unless names and shapes are a correction's."""
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
        layers.append(LayerCorrection(*(tensor.float() for tensor in layer)))
    if len(tensors) != 2 * len(layers) or not layers:
        raise ValueError(f"{path}: found {len(tensors)} tensors, expected two for each layer")
    return tuple(layers)
